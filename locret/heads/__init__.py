"""Retaining heads: the small trained networks, and how they are saved, published and loaded."""
