"""A kernel of one's own on either backend: `python -m examples.own_kernel.run --help`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cupaged import CupyBackend, EmulatorBackend, KernelFault, KernelLaunch

SOURCE = Path(__file__).with_name("layer_norm.cu")
THREADS = 128
SUMS_BYTES = THREADS // 32 * 4  # one float32 for each warp
EPSILON = 1e-5


def layer_norm(gpu: Any, x: Any, weight: Any, bias: Any, *, forget_barrier: bool = False) -> Any:
    """Normalise the rows of x, BF16 ``[rows, row_elems]`` on the device; weight and bias ``[row_elems]``."""
    rows, row_elems = x.shape
    kernel = gpu.kernel(SOURCE, "layer_norm", THREADS=THREADS, FORGET_BARRIER=int(forget_barrier))
    out = gpu.empty(x.shape, ml_dtypes.bfloat16)
    launch = KernelLaunch(gpu, kernel).grid([rows, 1, 1]).block([THREADS, 1, 1]).shared_mem(SUMS_BYTES)
    launch.arg_ptr(x).arg_ptr(weight).arg_ptr(bias).arg_ptr(out)
    launch.arg_u32(row_elems).arg_f32(EPSILON).launch(gpu.null_stream())
    return out


def reference(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The same in float64."""
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=1, keepdims=True)
    normal = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + EPSILON)
    return np.asarray(normal * weight.astype(np.float64) + bias.astype(np.float64))


def relative_error(gpu: Any, *, rows: int = 4, row_elems: int = 300, forget_barrier: bool = False) -> float:
    """Run a random case and compare with `reference`."""
    rng = np.random.default_rng(0)
    x, weight, bias = (
        rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
        for shape in ((rows, row_elems), row_elems, row_elems)
    )
    out = layer_norm(gpu, *(gpu.asarray(array) for array in (x, weight, bias)), forget_barrier=forget_barrier)
    got = gpu.to_host(out).view(ml_dtypes.bfloat16).astype(np.float64)
    expected = reference(x, weight, bias)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def main(arguments: list[str] | None = None) -> int:
    """Run the example; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Layer normalisation, a kernel that is not the package's own."
    )
    parser.add_argument("--backend", choices=("emulator", "cupy"), default="emulator")
    parser.add_argument("--check", action="store_true", help="find races and stray accesses (emulator)")
    parser.add_argument("--forget-barrier", action="store_true", help="run the variant with a bug")
    options = parser.parse_args(arguments)
    if options.backend == "cupy":
        gpu: Any = CupyBackend()
    else:
        gpu = EmulatorBackend(check="full" if options.check else "off")
    try:
        error = relative_error(gpu, forget_barrier=options.forget_barrier)
    except KernelFault as fault:
        print(f"{type(fault).__name__}: {fault}")
        return 1
    print(f"{gpu.name}: relative error to NumPy float64 {error:.1e}")
    return 0 if error < 5e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
