"""Training data: where rows come from, how they become tokens, and in which order they are read."""
