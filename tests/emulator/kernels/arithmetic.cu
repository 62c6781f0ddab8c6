#include "ptx.cuh"

extern "C" __global__ void pack_halves(const float* in, u32* f16, u32* bf16, u32 count) {
  for (u32 i = threadIdx.x; i < count / 2; i += blockDim.x) {
    f16[i] = ptx::pack_f16x2(in[2 * i], in[2 * i + 1]);
    bf16[i] = ptx::pack_bf16x2(in[2 * i], in[2 * i + 1]);
  }
}

extern "C" __global__ void multiply_halves(const u32* a, const u32* b, u32* out, u32 count) {
  for (u32 i = threadIdx.x; i < count; i += blockDim.x) out[i] = ptx::mul_f16x2(a[i], b[i]);
}

extern "C" __global__ void exp2_of(const float* in, float* out, u32 count) {
  for (u32 i = threadIdx.x; i < count; i += blockDim.x) out[i] = ptx::exp2_approx(in[i]);
}

extern "C" __global__ void permute_bytes(const u32* a, const u32* b, const u32* selector, u32* out) {
  const u32 i = threadIdx.x;
  out[2 * i] = __byte_perm(a[i], b[i], selector[i]);
  out[2 * i + 1] = ptx::bit_select(a[i], b[i], selector[i]);
}

extern "C" __global__ void count_bits(const u32* in, i32* out) {
  const u32 v = in[threadIdx.x];
  i32* row = out + 4 * threadIdx.x;
  row[0] = __popc(v), row[1] = __clz(static_cast<i32>(v)), row[2] = __ffs(static_cast<i32>(v));
  row[3] = static_cast<i32>(__brev(v));
}

// out float [n, 6]: fmaxf, fminf, and rounded sum, product, quotient, fma with c = a.
extern "C" __global__ void float_pairs(const float* a, const float* b, float* out) {
  const u32 i = threadIdx.x;
  float* row = out + 6 * i;
  row[0] = max(a[i], b[i]), row[1] = min(a[i], b[i]), row[2] = __fadd_rn(a[i], b[i]);
  row[3] = __fmul_rn(a[i], b[i]), row[4] = __fdiv_rn(a[i], b[i]), row[5] = __fmaf_rn(a[i], b[i], a[i]);
}

extern "C" __global__ void mixed_min_max(u64* out) {
  out[0] = max(-1, 1u), out[1] = min(-1, 1u), out[2] = max(-1, 1) == 1, out[3] = min(3ull, 2ll);
  out[4] = max(-1ll, 1ull) == ~0ull;
}

extern "C" __global__ void float_to_int(const float* in, i32* out) {
  const u32 i = threadIdx.x;
  out[3 * i] = __float2int_rn(in[i]), out[3 * i + 1] = __float2int_rz(in[i]);
  out[3 * i + 2] = static_cast<i32>(__float2uint_rn(in[i]));
}
