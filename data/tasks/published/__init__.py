"""The published benchmarks: real rows, official prompts, official metrics."""
