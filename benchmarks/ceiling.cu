// Read and copy ceilings: nothing but wide loads (and stores), many in flight. Macros: THREADS a block,
// VECTORS 16-byte loads a thread has in flight, STREAMING 0 for loads and stores without a hint,
// STAGE_BYTES of a bulk copy. Every size is a multiple of what a block moves in one step.
#include "ptx.cuh"

#ifndef THREADS
#define THREADS 256
#endif
#ifndef VECTORS
#define VECTORS 4
#endif
#ifndef STAGE_BYTES
#define STAGE_BYTES 8192
#endif
#ifndef STREAMING
#define STREAMING 1
#endif
constexpr u32 STAGES = 4;

DEVICE uint4 load_16(const uint4* pointer) {
  return STREAMING ? ptx::load_streaming_16(pointer) : *pointer;
}

DEVICE void store_16(uint4* pointer, uint4 v) {
#if defined(CUPAGED_EMULATOR) || !STREAMING
  *pointer = v;
#else
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
#endif
}

// Steps of THREADS * VECTORS vectors, grid-stride: a grid of one block a step never comes round.
extern "C" __global__ void __launch_bounds__(THREADS)
    read_all(const uint4* data, u64 vectors, u32* sink) {
  const u64 step = static_cast<u64>(gridDim.x) * THREADS * VECTORS;
  u32 mix = 0;
  for (u64 i = static_cast<u64>(blockIdx.x) * THREADS * VECTORS + threadIdx.x; i < vectors; i += step) {
    uint4 v[VECTORS];
  UNROLL for (u32 k = 0; k < VECTORS; k++) v[k] = load_16(data + i + k * THREADS);
    UNROLL for (u32 k = 0; k < VECTORS; k++) mix ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  if (mix == 0x12345678u) *sink = mix;  // never, but the compiler cannot know
}

extern "C" __global__ void __launch_bounds__(THREADS) copy_all(const uint4* data, uint4* target, u64 vectors) {
  const u64 step = static_cast<u64>(gridDim.x) * THREADS * VECTORS;
  for (u64 i = static_cast<u64>(blockIdx.x) * THREADS * VECTORS + threadIdx.x; i < vectors; i += step) {
    uint4 v[VECTORS];
    UNROLL for (u32 k = 0; k < VECTORS; k++) v[k] = load_16(data + i + k * THREADS);
    UNROLL for (u32 k = 0; k < VECTORS; k++) store_16(target + i + k * THREADS, v[k]);
  }
}

// Bulk copies into a ring in shared memory, one warp a block; no byte is looked at. The grid is whole steps.
extern "C" __global__ void __launch_bounds__(32) read_bulk(const uint4* data, u64 vectors, u32* sink) {
  __shared__ __align__(128) unsigned char ring[STAGES * STAGE_BYTES];
  __shared__ __align__(8) u64 full[STAGES];
  if (threadIdx.x != 0) return;
  for (u32 s = 0; s < STAGES; s++) ptx::mbarrier_init(full + s, 1);
  ptx::mbarrier_init_fence();
  const unsigned char* bytes = reinterpret_cast<const unsigned char*>(data);
  const u64 chunks = vectors * 16 / STAGE_BYTES;
  const u64 mine = chunks > blockIdx.x ? (chunks - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
  for (u64 i = 0; i < mine + STAGES; i++) {
    const u32 stage = static_cast<u32>(i % STAGES);
    if (i >= STAGES) ptx::mbarrier_wait_parity(full + stage, static_cast<u32>(i / STAGES - 1) & 1);
    if (i < mine) {
      ptx::mbarrier_arrive_expect_tx(full + stage, STAGE_BYTES);
      ptx::bulk_copy_evict_first(ring + stage * STAGE_BYTES,
                                 bytes + (blockIdx.x + i * gridDim.x) * static_cast<u64>(STAGE_BYTES), STAGE_BYTES,
                                 full + stage);
    }
  }
  if (ring[0] == 1 && ring[1] == 2 && vectors == 0) *sink = ring[2];  // never
}
