"""What has been read: units per layer, whole caches, and caches on disk."""

from locret.cache.cache import RetentionCache

__all__ = ["RetentionCache"]
