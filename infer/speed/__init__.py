"""Speed and memory, measured against what the machine can do: shapes, methods, meters, records."""
