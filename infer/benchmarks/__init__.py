"""Speed and memory, measured side by side in one process; records live beside the code that made them."""
