"""Where the blocks of a sequence live outside the GPU: pinned host memory, or a file."""

from cupaged.streaming.store.base import BlockStore, Tail
from cupaged.streaming.store.file import FileStore
from cupaged.streaming.store.pinned import PinnedStore

__all__ = ["BlockStore", "FileStore", "PinnedStore", "Tail"]
