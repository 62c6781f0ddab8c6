"""What the emulator has bodies for compiles for GPUs too: the wrappers of ptx.cuh, from sm_80 on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cupaged.backends.cupy import nvrtc
from cupaged.backends.cupy.nvrtc import CHECKED_TARGETS, Target
from cupaged.source import KernelSource, parse_parameters
from tests.test_nvrtc import needs_nvrtc

SOURCE = """#include "ptx.cuh"
extern "C" __global__ void own(const u8* in, u8* out, u32* flag) {
  __shared__ __align__(128) u8 buffer[512];
  __shared__ u64 barrier;
  if (threadIdx.x == 0) ptx::mbarrier_init(&barrier, 33), ptx::mbarrier_init_fence();
  __syncthreads();
  ptx::prefetch_l2(in + 4096);
  ptx::cp_async_16(buffer + 16 * threadIdx.x, in + 16 * threadIdx.x);
  ptx::cp_async_mbarrier_arrive_noinc(&barrier);
  if (threadIdx.x == 0) ptx::mbarrier_arrive(&barrier);
#if __CUDA_ARCH__ >= 900
  ptx::bulk_prefetch_l2(in, 4096);
#endif
  ptx::mbarrier_wait_parity(&barrier, 0);
  out[threadIdx.x] = buffer[511 - threadIdx.x] + ptx::load_relaxed(flag);
}
"""
EVERYWHERE = {"cp.async.mbarrier.arrive.noinc", "prefetch.global.L2", "ld.relaxed.gpu", "mbarrier.arrive"}
WITHOUT_COPY_ENGINE = {"mbarrier.test_wait.parity"}
WITH_COPY_ENGINE = {"mbarrier.try_wait.parity", "fence.mbarrier_init", "cp.async.bulk.prefetch.L2"}


@needs_nvrtc
@pytest.mark.parametrize("target", CHECKED_TARGETS)
def test_barriers_of_every_architecture(tmp_path: Path, target: str) -> None:
    path = tmp_path / "own.cu"
    path.write_text(SOURCE)
    source = KernelSource(path, "own", parse_parameters(SOURCE, "own"))
    assert nvrtc.compile_source(source, Target(target))[:4] == b"\x7fELF"
    text = nvrtc.compile_source(source, Target(target.replace("sm_", "compute_"))).decode()
    has_engine = Target(target).has_bulk_copies
    wanted = EVERYWHERE | (WITH_COPY_ENGINE if has_engine else WITHOUT_COPY_ENGINE)
    others = WITHOUT_COPY_ENGINE if has_engine else WITH_COPY_ENGINE
    used = set(re.findall(r"^\s*(?:\{ \.reg \.pred p; )?([a-z][\w.:]+)", text, re.MULTILINE))
    assert [name for name in sorted(wanted) if not any(u.startswith(name) for u in used)] == []
    assert [name for name in sorted(others) if any(u.startswith(name) for u in used)] == []
