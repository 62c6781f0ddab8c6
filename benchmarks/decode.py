"""Throughput of `Decoder`: the table of loads, unequal lengths, many sequences, generality, fixed splits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from benchmarks import accuracy, cases, loads
from benchmarks.cases import SPLIT_TOKENS, Case
from benchmarks.loads import Load
from benchmarks.pools import Batch
from benchmarks.session import Row, Session, timed
from cupaged.decode import Decoder

DRY_TOKENS = 20  # least length in a dry run: more than a block


def decode_call(decoder: Any, batch: Batch, table: Any, stream: int) -> Callable[[], None]:
    """One decode of a batch through a table."""
    k_pool, v_pool = batch.pools
    arrays = (batch.q, k_pool, v_pool, table, batch.seq_lens, batch.output)
    options: dict[str, Any] = {
        "num_seqs": batch.num_seqs,
        "max_blocks_per_seq": batch.max_blocks_per_seq,
        "stream": stream,
        "sliding_window": batch.load.sliding_window,
        "num_blocks": batch.num_blocks,
    }
    for name, layout in (("k_scale", batch.layout), ("v_scale", batch.value_layout)):
        if layout.format.needs_scale:
            options[name] = 1.0
    return lambda: decoder.decode(*arrays, **options)


def decode_calls(session: Session, decoder: Any, batch: Batch) -> list[Callable[[], None]]:
    """One decode through each of the batch's tables."""
    return [decode_call(decoder, batch, table, session.device.stream) for table in batch.tables]


def measure(session: Session, case: Case) -> Row:
    """A row: time in a graph, bytes, share of the read ceiling, error to float64.

    Raises:
        whatever the decoder raises for a shape that it does not support.
    """
    device = session.device
    decoder = case.decoder(Decoder, device.gpu)
    batch = session.arenas.batch(case.fmt, case.load, case.value_format, case.float16)
    calls = decode_calls(session, decoder, batch)
    device.wait()
    calls[0]()
    device.wait()
    error = accuracy.relative_error(device, batch, batch.tables[0])
    time = device.time(calls)
    return {
        **timed(time, case.num_bytes, session.ceiling.get("read")),
        "relative_error": error,
        "tables": len(calls),
        "workspace_bytes": decoder.workspace_bytes,
    }


def _run(session: Session, name: str, chosen: Iterable[Load]) -> None:
    for fmt in session.formats:
        for load in chosen:
            labels = {"load": load.label, "format": fmt.name}
            session.attempt(name, labels, lambda f=fmt, x=load: measure(session, Case(f, x)))


def table(session: Session) -> None:
    """The loads that the peer is measured on too."""
    _run(session, "table", shrunk(session, loads.TABLE))


def long(session: Session) -> None:
    """64 x 32768."""
    _run(session, "long", shrunk(session, loads.LONG))


def unequal(session: Session) -> None:
    """Unequal lengths, and equal ones of the same bytes: what the inequality costs; 100,000 sequences."""
    uneven, many = shrunk(session, (loads.UNEQUAL, loads.MANY))
    even = loads.leveled(uneven)
    for fmt in session.formats:
        pair = [
            session.attempt(
                "unequal",
                {"load": x.label, "format": fmt.name, "lengths": kind},
                lambda f=fmt, x=x: measure(session, Case(f, x)),
            )
            for kind, x in (("equal", even), ("unequal", uneven))
        ]
        if pair[0] and pair[1]:
            pair[1]["price"] = pair[1]["median_us"] / pair[0]["median_us"] - 1
            session.say(f"{fmt.name}: unequal lengths cost {100 * pair[1]['price']:+.1f}%")
    _run(session, "many", (many,))


def generality(session: Session) -> None:
    """Each supported shape at 2 GB of K and V, and one sequence of 4 M tokens."""
    least, num_seqs = loads.GENERAL_BYTES // session.shrink, 64 if session.shrink == 1 else 2
    chosen = cases.generality(session.formats, least, num_seqs)
    millions = shrunk(session, (loads.MILLIONS,))[0]
    chosen += [("one sequence", Case(fmt, millions)) for fmt in session.formats]
    for axis, case in chosen:
        labels = {"load": case.load.label, "format": case.fmt.name, "axis": axis}
        session.attempt("generality", labels, lambda c=case: measure(session, c))


def fixed_split(session: Session) -> None:
    """What a fixed split size costs, and whether a sequence's bits depend on its batch."""
    for fmt in session.formats:
        for load in shrunk(session, loads.FIXED_SPLIT):
            labels = {"load": load.label, "format": fmt.name}
            free = session.attempt("fixed_split", labels, lambda f=fmt, x=load: measure(session, Case(f, x)))
            for tokens in SPLIT_TOKENS:
                case = Case(fmt, load, split_tokens=tokens)
                row = session.attempt(
                    "fixed_split",
                    {**labels, "split_tokens": tokens},
                    lambda c=case: {
                        **measure(session, c),
                        "bits_depend_on_batch": bits_depend_on_batch(session, c),
                    },
                )
                if free and row:
                    row["price"] = row["median_us"] / free["median_us"] - 1
                    session.say(f"split of {tokens} tokens: {100 * row['price']:+.1f}%")


def bits_depend_on_batch(session: Session, case: Case) -> bool:
    """Whether the first or the last sequence, decoded alone, gives other bits than in the batch."""
    device, load = session.device, case.load
    batch = session.arenas.batch(case.fmt, load)
    decoder = case.decoder(Decoder, device.gpu)
    together = batch.output
    device.wait()
    decode_call(decoder, batch, batch.tables[0], device.stream)()
    device.wait()
    for seq in {0, batch.num_seqs - 1}:
        alone = replace(
            batch,
            load=replace(load, seq_lens=(load.seq_lens[seq],)),
            seq_lens=batch.seq_lens[seq : seq + 1],
            q=batch.q[seq : seq + 1],
            output=device.xp.full_like(together[:1], 0x7FC0),
        )
        own_table = device.xp.ascontiguousarray(batch.tables[0][seq : seq + 1, : alone.max_blocks_per_seq])
        device.wait()
        decode_call(decoder, alone, own_table, device.stream)()
        device.wait()
        if not bool((alone.output[0] == together[seq]).all()):
            return True
    return False


def shrunk(session: Session, chosen: Iterable[Load]) -> tuple[Load, ...]:
    """The loads; in a dry run with a few short sequences each."""
    if session.shrink == 1:
        return tuple(chosen)
    return tuple(
        replace(x, seq_lens=tuple(DRY_TOKENS + n // session.shrink for n in x.seq_lens[:3])) for x in chosen
    )
