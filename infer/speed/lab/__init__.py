"""Programs that measure one idea each; their records lie in `infer/speed/records`, the command is `locret-bench`."""
