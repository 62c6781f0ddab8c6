"""What a call costs the host, and whether a warm call allocates; what compiling a kernel costs.

One sequence of 16 tokens: the device is done before the host is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from benchmarks import launchers
from benchmarks.decode import decode_call
from benchmarks.loads import equal
from benchmarks.pools import Batch
from benchmarks.session import Row, Session
from benchmarks.timing import host_time
from cupaged.decode import Decoder
from cupaged.formats import BF16

ALLOCATION_CALLS = 100
TABLES = 1024
# The parameters of paged_decode_attn_bf16, in a kernel that does nothing.
EMPTY_SOURCE = r"""
extern "C" __global__ void empty(const void* q, const void* k_cache, const void* v_cache, void* output,
                                 const int* block_tables, const int* seq_lens, unsigned max_blocks_per_seq,
                                 unsigned num_seqs, unsigned num_q_heads, unsigned num_kv_heads,
                                 unsigned head_dim, unsigned block_size, float inv_sqrt_d, unsigned q_stride,
                                 unsigned sliding_window, unsigned num_blocks) {}
"""


def measure(session: Session) -> None:
    """Rows "host_cost": microseconds of host time a call, device allocations of warm calls."""
    device = session.device
    load = equal(1, 16)
    batch = session.arenas.batch(BF16, load)
    decoder = Decoder(device.gpu, load.layout(BF16), load.num_q_heads, 1)
    cases: list[tuple[str, Callable[[], None]]] = [
        (f"{name}, {pointers}", make(maker, chosen, table, device.stream))
        for pointers, (chosen, table) in (
            ("integer pointers and stream", with_addresses(batch)),
            ("arrays", (batch, batch.tables[0])),
        )
        for name, make, maker in (
            ("launcher", launchers.single_pass, device.gpu),
            ("Decoder", decode_call, decoder),
        )
    ]
    cases.append((f"Decoder, integers, {TABLES} tables in turn", in_turn(decoder, batch, device.stream)))
    if device.is_gpu:
        cases.append(("CuPy RawKernel, the launcher's arguments", raw_kernel(session, batch)))
    with device.current():
        for name, call in cases:
            session.attempt("host_cost", {"call": name}, lambda c=call: _measure(session, c))


def _measure(session: Session, call: Callable[[], None]) -> Row:
    device = session.device
    calls = 200 if device.is_gpu else 2
    time = host_time(call, device.wait, batches=25 if device.is_gpu else 2, calls=calls)
    return {**asdict(time), "allocations": allocations(session, call)}


def allocations(session: Session, call: Callable[[], None]) -> int | None:
    """Device allocations of warm calls, counted at CuPy's allocator; None on the emulator."""
    if not session.device.is_gpu:
        return None
    import cupy

    class Counter(cupy.cuda.MemoryHook):  # type: ignore[misc]
        name = "Counter"
        count = 0

        def malloc_preprocess(self, **_: Any) -> None:
            self.count += 1

    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    with Counter() as counter:
        for _ in range(ALLOCATION_CALLS):
            call()
    session.device.wait()
    return int(counter.count) + int(pool.used_bytes() != before)


def addresses(*arrays: Any) -> list[int]:
    """Device addresses."""
    return [x.data.ptr if hasattr(x.data, "ptr") else x.ctypes.data for x in arrays]


def with_addresses(batch: Batch) -> tuple[Batch, int]:
    """The batch with addresses as Python integers in place of arrays, and its table's address."""
    names = ("k_pool", "v_pool", "q", "output", "seq_lens")
    found = addresses(*(getattr(batch, name) for name in names))
    return replace(batch, **dict(zip(names, found, strict=True))), addresses(batch.tables[0])[0]


def in_turn(decoder: Decoder, batch: Batch, stream: int) -> Callable[[], None]:
    """One decode through the next of so many tables that none is remembered from its last turn."""
    bare, _ = with_addresses(batch)
    calls = itertools.cycle(
        [decode_call(decoder, bare, x, stream) for x in addresses(*batch.tables[:TABLES])]
    )
    return lambda: next(calls)()


def raw_kernel(session: Session, batch: Batch) -> Callable[[], None]:
    """CuPy's own call of a kernel with the launcher's parameters, ready-made, on CuPy's current stream."""
    import cupy

    kernel = cupy.RawKernel(EMPTY_SOURCE, "empty")
    load = batch.load
    pointers = addresses(batch.q, *batch.pools, batch.output, batch.tables[0], batch.seq_lens)
    sizes = (1, load.num_q_heads, load.num_kv_heads, load.head_dim, load.block_size)
    arguments = (
        *map(np.uint64, pointers), np.uint32(batch.max_blocks_per_seq), *map(np.uint32, sizes),
        np.float32(load.head_dim**-0.5), np.uint32(load.num_q_heads * load.head_dim), np.uint32(0),
        np.uint32(batch.num_blocks),
    )  # fmt: skip
    grid, block = (load.num_q_heads, 1, 1), (256, 1, 1)
    return lambda: kernel(grid, block, arguments)


def compile_times(session: Session) -> None:
    """Rows "compile": first use of a fast kernel, compiled and from the disk, each in a new process.

    Three at a time, which leaves most processors idle.
    """
    from tools import jit_times

    with ThreadPoolExecutor(3) as pool:
        found = {module: pool.submit(jit_times.measure, module) for module in jit_times.MODULES}
        for module, row in found.items():
            session.attempt("compile", {"module": module}, lambda r=row: dict(r.result()))
