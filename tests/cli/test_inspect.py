"""``cupaged inspect`` against the packer: the bytes it names are those that a write changes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from cupaged import cli
from cupaged.cli.pool_map import Place, locate
from cupaged.cli.status import DONE, USAGE
from cupaged.errors import ArgumentValueError
from cupaged.formats import BF16, FP8, NVFP4, CacheFormat, CacheLayout, write_tokens

TABLE = (5, 0, 3)
BLOCKS = 6


def pool_bytes(layout: CacheLayout, token: int, head: int, values: Any) -> np.ndarray:
    """A pool with one token written, zeros in its other heads, as bytes."""
    pool = np.zeros(BLOCKS * layout.block_stride_bytes, np.uint8)
    rows = np.zeros((1, layout.num_kv_heads, layout.head_dim), np.float32)
    rows[0, head] = values
    slot = TABLE[token // layout.block_size] * layout.block_size + token % layout.block_size
    write_tokens(pool.view(np.uint16) if layout.format == BF16 else pool, layout, rows, np.array([slot]))
    return pool


def inside(spans: list[Any], index: int) -> bool:
    return any(span.begin <= index < span.begin + span.num_bytes for span in spans if span is not None)


LAYOUTS = [
    CacheLayout(fmt, num_kv_heads=3, head_dim=32, block_size=4, heads_first=heads_first, **options)
    for fmt, options in (
        (BF16, {}),
        (BF16, {"block_stride_override": 1024}),
        (FP8, {}),
        (FP8, {"block_stride_override": 800}),
        (NVFP4, {}),
        (NVFP4, {"block_stride_override": 512, "data_section_override": 256}),
    )
    for heads_first in (False, True)
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("token", [0, 3, 4, 11])
def test_the_bytes_named_are_those_written(layout: CacheLayout, token: int) -> None:
    for head in range(layout.num_kv_heads):
        place = locate(layout, token, head, 0, TABLE)
        changed = np.flatnonzero(pool_bytes(layout, token, head, 3.0))
        assert changed.size
        assert all(inside([place.data, place.scales], index) for index in changed)
        codes = pool_bytes(layout, token, head, 3.0)[place.data.begin :][: place.data.num_bytes]
        assert codes.reshape(layout.head_dim // 2, -1).any(axis=1).all()  # all of the row, not a part


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("element", [0, 1, 16, 31])
def test_one_value(layout: CacheLayout, element: int) -> None:
    token, head = 6, 2
    place = locate(layout, token, head, element, TABLE)
    values = np.zeros(layout.head_dim)
    values[element] = 6.0  # E2M1's largest: its scale is 1
    pool = pool_bytes(layout, token, head, values)
    data = [index for index in np.flatnonzero(pool) if inside([place.data], index)]
    assert data
    assert all(inside([place.element], index) for index in data)
    if layout.format == NVFP4:
        assert place.element.num_bytes == 1
        assert pool[place.element.begin] == (0x07 if place.nibble == "low" else 0x70)
        assert place.element_scale is not None
        assert pool[place.element_scale.begin] == 0x38
    else:
        assert place.nibble == ""
        assert place.element.num_bytes == layout.pool_dtype.itemsize


def test_slots_and_tables() -> None:
    layout = CacheLayout(FP8, 2, 32, 16)
    place = locate(layout, 37, 1, 0, (7, 2, 9))
    assert (place.column, place.block, place.offset, place.slot) == (2, 9, 5, 149)
    assert locate(layout, 37, 1, 0, None).block == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": 2}, r"head: got 2, allowed is 0 to 1"),
        ({"element": 32}, r"element: got 32, allowed is 0 to 31"),
        ({"token": 48}, r"token: got 48, allowed is 0 to 47"),
        ({"token": 20}, r"table: column 1, which token 20 needs, is -1"),
    ],
)
def test_what_is_not_there(changes: dict[str, int], message: str) -> None:
    arguments = {"token": 0, "head": 0, "element": 0} | changes
    with pytest.raises(ArgumentValueError, match=message):
        locate(CacheLayout(FP8, 2, 32, 16), **arguments, table=(7, -1, 9))


def inspect(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["inspect", *arguments]) == DONE
    return capsys.readouterr().out


def test_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--format", "nvfp4", "--kv-heads", "2", "--head-dim", "64"]
    options = [*sizes, "--token", "37", "--head", "1", "--element", "5"]
    text = inspect(*options, capsys=capsys)
    for part in (
        "one block, 1,152 bytes: | data 1,024 B | scales 128 B |",
        "data            1,152      64     32",
        "scales          1,152       8      4",
        "token 5     320   [352]",
        "bytes of head 1      2,656 .. 2,687",
        "bytes of its scales  3,372 .. 3,375",
        "byte of value 5      2,658, its high nibble",
    ):
        assert part in text


def test_json_has_the_numbers_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads(inspect("--format", "nvfp4", "--token", "37", "--json", capsys=capsys))
    place = locate(CacheLayout(NVFP4, 8, 128, 16), 37, 0, 0, None)
    assert content["place"]["data"] == {"begin": place.data.begin, "num_bytes": place.data.num_bytes}
    assert set(content["place"]) == set(Place.__dataclass_fields__)
    assert content["stride_bytes"]["scales"]["tokens"] == 8 * 128 // 16


@pytest.mark.parametrize("fmt", [BF16, FP8, NVFP4], ids=lambda f: f.name)
def test_interleaved_pools_have_twice_the_stride(
    fmt: CacheFormat, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, both = (
        json.loads(inspect("--format", fmt.name, "--token", "20", "--json", *extra, capsys=capsys))
        for extra in ((), ("--interleaved",))
    )
    assert both["block_stride_bytes"] == 2 * alone["block_stride_bytes"]
    assert both["place"]["data"]["begin"] == alone["place"]["data"]["begin"] + alone["block_stride_bytes"]
    text = inspect("--format", fmt.name, "--interleaved", capsys=capsys)
    assert f"V's are {alone['block_stride_bytes']:,} bytes higher" in text


def test_a_picture_of_many_rows_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    text = inspect("--kv-heads", "64", "--block-size", "256", "--token", "100", "--head", "40", capsys=capsys)
    assert max(map(len, text.splitlines())) < 120
    assert len(text.splitlines()) < 40
    assert text.count("[") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--head", "8"], "head: got 8, allowed is 0 to 7"),
        (["--data-section", "64"], "data_section_override: got 64, allowed is None: bf16 has no scale"),
        (["--format", "nvfp4", "--head-dim", "24"], "head_dim: got 24, allowed is a multiple of 16"),
    ],
)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", *arguments]) == USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("ids", ["99999999999999", "1,-2", "1,,2", ""])
def test_ids_that_no_table_holds(ids: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=str(USAGE)):
        cli.main(["inspect", "--table", ids])
    assert f"got {ids!r}, allowed are block ids up to 2147483647" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--head-dim", "72"], "head_dim: got 72, allowed are 16, 32"),
        (["--block-size", "1000", "--json"], "block_size: got 1000, allowed is 1 to 256"),
        (["--format", "fp8", "--block-stride", "16400"], ""),
        (
            ["--format", "fp8", "--block-stride", "16392"],
            "block_stride_bytes is 16392, which must be a multiple",
        ),
    ],
)
def test_a_layout_that_no_kernel_takes(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is shown all the same, with a line that says so."""
    assert cli.main(["inspect", *arguments]) == DONE
    captured = capsys.readouterr()
    assert captured.out
    warnings = captured.err.splitlines()
    assert len(warnings) == bool(message)
    assert all(line.startswith(f"warning: no kernel takes this layout: its {message}") for line in warnings)
