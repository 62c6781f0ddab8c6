#include "ptx.cuh"

#ifndef SPEC_PENDING
#define SPEC_PENDING 1
#endif

constexpr u32 STAGES = 3;
constexpr u32 THREADS = 64;

// Sums `tiles` tiles of THREADS float4 through a ring of cp.async stages. SPEC_PENDING: groups that each
// wait leaves in flight (STAGES - 2 is right).
extern "C" __global__ void cp_async_ring(const float4* in, float4* out, u32 tiles) {
  __shared__ float4 ring[STAGES][THREADS];
  const u32 i = threadIdx.x;
  const auto issue = [&](u32 tile) {
    if (tile < tiles) ptx::cp_async_16(&ring[tile % STAGES][i], in + tile * THREADS + i);
    ptx::cp_async_commit();
  };
  for (u32 tile = 0; tile < STAGES - 1; tile++) issue(tile);
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (u32 tile = 0; tile < tiles; tile++) {
    ptx::cp_async_wait<SPEC_PENDING>();
    __syncthreads();
    const float4 v = ring[tile % STAGES][(i + 1) % THREADS];
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    issue(tile + STAGES - 1);
  }
  out[i] = sum;
}

extern "C" __global__ void cp_async_small(const u8* in, u8* out) {
  __shared__ __align__(16) u8 buffer[32 * 12];
  u8* own = buffer + 12 * threadIdx.x;
  ptx::cp_async_small<4>(own, in + 12 * threadIdx.x);
  ptx::cp_async_small<4>(own + 4, in + 12 * threadIdx.x + 4);
  ptx::cp_async_commit();
  ptx::cp_async_small<4>(own + 8, in + 12 * threadIdx.x + 8);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  for (int b = 0; b < 12; b++) out[12 * threadIdx.x + b] = own[b];
}

// The same by bulk copies: thread 0 of warp 0 produces, warps 1 and 2 consume.
extern "C" __global__ void bulk_ring(const float* in, float* out, u32 tiles) {
  constexpr u32 TILE = 64;
  __shared__ __align__(128) float ring[STAGES][TILE];
  __shared__ u64 full[STAGES], empty[STAGES];
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < STAGES; s++)
      ptx::mbarrier_init(&full[s], 1), ptx::mbarrier_init(&empty[s], TILE);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (u32 tile = 0; tile < tiles; tile++) {
      const u32 s = tile % STAGES, round = tile / STAGES;
      ptx::mbarrier_wait_parity(&empty[s], (round & 1u) ^ 1u);
      ptx::mbarrier_arrive_expect_tx(&full[s], TILE * 4);
      ptx::bulk_copy(ring[s], in + tile * TILE, TILE * 2, &full[s]);
      ptx::bulk_copy_evict_first(ring[s] + TILE / 2, in + tile * TILE + TILE / 2, TILE * 2, &full[s]);
    }
  } else if (threadIdx.x >= 32) {
    const u32 i = threadIdx.x - 32;
    float sum = 0.0f;
    for (u32 tile = 0; tile < tiles; tile++) {
      const u32 s = tile % STAGES;
      ptx::mbarrier_wait_parity(&full[s], tile / STAGES & 1u);
      sum += ring[s][i];
      ptx::mbarrier_arrive(&empty[s]);
    }
    out[i] = sum;
  }
}

// One bulk copy with things to do wrong: misaligned by `offset` bytes, `expected` bytes announced,
// waited for or not, read before or after the wait.
extern "C" __global__ void one_bulk_copy(const u8* in, u8* out, u32 bytes, u32 expected, u32 offset,
                                         u32 wait, u32 read_early) {
  __shared__ __align__(128) u8 buffer[512];
  __shared__ u64 barrier;
  if (threadIdx.x == 0) ptx::mbarrier_init(&barrier, 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect_tx(&barrier, expected);
    ptx::bulk_copy(buffer + offset, in, bytes, &barrier);
  }
  __syncthreads();
  if (read_early) out[threadIdx.x] = buffer[threadIdx.x];
  __syncthreads();
  if (wait) ptx::mbarrier_wait_parity(&barrier, 0);
  if (!read_early) out[threadIdx.x] = buffer[threadIdx.x];
}

extern "C" __global__ void misused_barrier(u32 kind, u8* global) {
  __shared__ u64 barrier;
  if (kind == 0) ptx::mbarrier_arrive(&barrier);
  if (kind == 1) ptx::mbarrier_init(&barrier, 0);
  if (kind == 2) ptx::mbarrier_init(&barrier, 2), ptx::mbarrier_wait_parity(&barrier, 0);
  if (kind == 3) ptx::cp_async_16(global, global);
  if (kind == 4) ptx::mbarrier_init(&barrier, 1), ptx::bulk_copy(global, global, 16, &barrier);
  if (kind == 5) ptx::cp_async_16(&barrier, global + 8);
}
