"""Inference: reading prompts, answering, the `locret-infer` command, benchmarks."""
