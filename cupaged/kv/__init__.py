"""The paged cache as one object: pools, and what writes, reads back, copies and swaps their blocks."""

from cupaged.kv.cache import KVCache
from cupaged.kv.swap import HostBlocks

__all__ = ["HostBlocks", "KVCache"]
