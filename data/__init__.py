"""Training data and generated tasks."""
