#include "ptx.cuh"

// One m16n8k16 product. a 16-bit [16, 16], b 16-bit [16, 8], c float [16, 8] is added to.
DEVICE void fragments(const u16* a, const u16* b, u32 (&fa)[4], u32 (&fb)[2]) {
  const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  UNROLL for (int i = 0; i < 4; i++) {
    const u16* row = a + (g + 8 * (i % 2)) * 16 + 2 * t + 8 * (i / 2);
    fa[i] = row[0] | static_cast<u32>(row[1]) << 16;
  }
  UNROLL for (int i = 0; i < 2; i++) {
    const u16* column = b + (2 * t + 8 * i) * 8 + g;
    fb[i] = column[0] | static_cast<u32>(column[8]) << 16;
  }
}

extern "C" __global__ void multiply(const u16* a, const u16* b, float* c, u32 is_bf16) {
  u32 fa[4], fb[2];
  fragments(a, b, fa, fb);
  const u32 g = threadIdx.x / 4, t = threadIdx.x % 4;
  float* rows[2] = {c + g * 8 + 2 * t, c + (g + 8) * 8 + 2 * t};
  float fc[4] = {rows[0][0], rows[0][1], rows[1][0], rows[1][1]};
  if (is_bf16) {
    ptx::mma_m16n8k16_bf16(fc, fa[0], fa[1], fa[2], fa[3], fb[0], fb[1]);
  } else {
    ptx::mma_m16n8k16_f16(fc, fa[0], fa[1], fa[2], fa[3], fb[0], fb[1]);
  }
  rows[0][0] = fc[0], rows[0][1] = fc[1], rows[1][0] = fc[2], rows[1][1] = fc[3];
}

// `count` products by each warp of a block: for timing.
extern "C" __global__ void multiply_often(const u16* a, const u16* b, float* c, u32 count) {
  u32 fa[4], fb[2];
  fragments(a, b, fa, fb);
  float fc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (u32 i = 0; i < count; i++) ptx::mma_m16n8k16_f16(fc, fa[0], fa[1], fa[2], fa[3], fb[0], fb[1]);
  c[threadIdx.x] = fc[0] + fc[1] + fc[2] + fc[3];
}

extern "C" __global__ void transpose(const u32* in, u32* out) {
  out[threadIdx.x] = ptx::movmatrix_trans(in[threadIdx.x]);
}

// in u16 [32, 8]: four 8 x 8 matrices; out u32 [2, 32, 4]: fragments, plain and transposed.
extern "C" __global__ void load_fragments(const u16* in, u32* out, u32 offset) {
  __shared__ __align__(16) u16 rows[33 * 8];
  for (u32 i = 0; i < 8; i++) rows[threadIdx.x * 8 + i] = in[threadIdx.x * 8 + i];
  __syncwarp();
  const u16* row = rows + threadIdx.x * 8 + offset;
  u32 r[4];
  ptx::ldmatrix_x4(r, row);
  for (u32 i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = r[i];
  ptx::ldmatrix_x4_trans(r, row);
  for (u32 i = 0; i < 4; i++) out[128 + threadIdx.x * 4 + i] = r[i];
}
