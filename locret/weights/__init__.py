"""How a backbone's weights come into memory: in which numbers, on which devices, in how many bytes."""
