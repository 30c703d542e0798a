"""Training: labels, loss, the one-pass trainer and the `locret-train` command."""
