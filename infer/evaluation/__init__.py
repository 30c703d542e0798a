"""`locret-eval`: every method on every task within the same budget, measured alike."""
