"""The reader of the assembler's log, and its command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from cupaged.source import KernelSource, parse_parameters
from tests.test_nvrtc import needs_nvrtc
from tools import cubin_info
from tools.cubin_info import Usage, main, parse_log

LOG = """ptxas info    : 93 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
ptxas         .     8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 148 registers, used 1 barriers, 8 bytes cumulative stack size, 9216 bytes smem
ptxas info    : Compile time = 52.453 ms
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 13 registers, 300 bytes cmem[0]
"""


def test_both_forms_of_the_log_are_read() -> None:
    assert parse_log(LOG) == {
        "first": Usage("first", 148, 9216, 8, 12, 16),
        "second": Usage("second", 13, 0, 0, 0, 0),
    }


def test_a_log_that_does_not_tell_is_an_error() -> None:
    for log in ("", "ptxas info : nothing", LOG.replace("stack frame", "frame")):
        with pytest.raises(ValueError, match="no kernel in the assembler's log"):
            parse_log(log)


@needs_nvrtc
def test_stack_and_shared_memory_of_real_code_are_seen(tmp_path: Path) -> None:
    text = """extern "C" __global__ void own(float* x, int n) {
      __shared__ float shared[32];
      float local[100];
      for (int i = 0; i < 100; i++) local[i] = x[i];
      shared[threadIdx.x] = local[n];
      __syncthreads();
      x[n] = shared[31 - threadIdx.x];
    }
    """
    path = tmp_path / "own.cu"
    path.write_text(text)
    source = KernelSource(path, "own", parse_parameters(text, "own"))
    usage = cubin_info.usage_of(source, "sm_90a")["own"]
    assert usage.stack == 400
    assert usage.shared == 128
    assert usage.registers > 0


@needs_nvrtc
def test_spills_of_real_code_are_seen(tmp_path: Path) -> None:
    """128 values that live at once, in 32 registers."""
    loads = "".join(f"float v{i} = x[{i} * stride];" for i in range(128))
    stores = "".join(f"x[{i}] = v{i} * v{127 - i};" for i in range(128))
    head = 'extern "C" __global__ void __launch_bounds__(1024, 2) own(float* x, int stride)'
    text = f"{head} {{ {loads} __syncthreads(); {stores} }}\n"
    path = tmp_path / "own.cu"
    path.write_text(text)
    source = KernelSource(path, "own", parse_parameters(text, "own"))
    usage = cubin_info.usage_of(source, "sm_90a")["own"]
    assert usage.registers <= 32
    assert usage.spill_stores > 0
    assert usage.spill_loads > 0


@needs_nvrtc
def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["bf16_absmax", "attention_finalize", "--arch", "sm_80", "--spec", "head_dim=64"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["entry", "registers", "shared", "stack", "stores", "loads"]
    assert sorted(line.split()[0] for line in lines[1:]) == [
        "attention_finalize",
        "bf16_absmax",
        "bf16_absmax_rows",
    ]
    assert all(int(line.split()[1]) > 0 for line in lines[1:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "no kernel nothing; there are"),
        (["--spec", "head_dim=3"], "head_dim: got 3, allowed are 16"),
        (["--spec", "key_format=3"], "key_format: got 3, allowed are 0"),
        (["--spec", "size=3"], "got 'size=3', allowed are key_format"),
        (["--spec", "head_dim=x"], "head_dim=x"),
    ],
)
def test_bad_command_lines(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


@needs_nvrtc
def test_the_planned_kernels_of_any_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    formats = ["--spec", "key_format=2", "--spec", "value_format=1", "--spec", "query_tokens=2"]
    main(["paged_decode_attn_merge_chunks", "paged_decode_attn_plan", "--arch", "sm_89", *formats])
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["paged_decode_attn_merge_chunks", "paged_decode_attn_plan"]
