"""Records of speed and memory, and the programs that measure one thing each; `locret.infer.bench` has the command."""
