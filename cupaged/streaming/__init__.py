"""Decode over contexts that do not fit in GPU memory. See docs/streaming.md."""

from cupaged.streaming.context_parallel import ContextParallelDecoder
from cupaged.streaming.decoder import StreamingDecoder
from cupaged.streaming.multi import Communicator, NcclCommunicator, local_blocks
from cupaged.streaming.progress import ProgressBar
from cupaged.streaming.records import decode_records, encode_records
from cupaged.streaming.sequence import StreamedSequence
from cupaged.streaming.store import BlockStore, FileStore, PinnedStore, Tail
from cupaged.streaming.transfer import Trace

__all__ = [
    "BlockStore",
    "Communicator",
    "ContextParallelDecoder",
    "FileStore",
    "NcclCommunicator",
    "PinnedStore",
    "ProgressBar",
    "StreamedSequence",
    "StreamingDecoder",
    "Tail",
    "Trace",
    "decode_records",
    "encode_records",
    "local_blocks",
]
