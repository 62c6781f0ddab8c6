// Cache formats by number, as the host names them (cupaged/registry/ring.py).
#pragma once
#include "attention/format_bf16.cuh"
#include "attention/format_fp8.cuh"
#include "attention/format_nvfp4.cuh"

template <int NUMBER, int HEAD_DIM>
struct FormatOf;
template <int HEAD_DIM>
struct FormatOf<0, HEAD_DIM> {
  using type = Bf16Format<HEAD_DIM>;
};
template <int HEAD_DIM>
struct FormatOf<1, HEAD_DIM> {
  using type = Fp8Format<HEAD_DIM>;
};
template <int HEAD_DIM>
struct FormatOf<2, HEAD_DIM> {
  using type = Nvfp4Format<HEAD_DIM>;
};
