// Read and copy ceilings: nothing but wide loads (and stores), several in flight a thread.
#include "ptx.cuh"

constexpr u32 THREADS = 256;
constexpr u32 VECTORS = 4;  // 16-byte loads in flight

extern "C" __global__ void __launch_bounds__(THREADS) read_all(const uint4* data, u64 vectors, u32* sink) {
  const u64 step = static_cast<u64>(gridDim.x) * THREADS * VECTORS;
  u32 mix = 0;
  for (u64 i = static_cast<u64>(blockIdx.x) * THREADS * VECTORS + threadIdx.x; i < vectors; i += step) {
    uint4 v[VECTORS];
    UNROLL for (u32 k = 0; k < VECTORS; k++) v[k] = ptx::load_streaming_16(data + i + k * THREADS);
    UNROLL for (u32 k = 0; k < VECTORS; k++) mix ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  if (mix == 0x12345678u) *sink = mix;  // never, but the compiler cannot know
}

extern "C" __global__ void __launch_bounds__(THREADS) copy_all(const uint4* data, uint4* target, u64 vectors) {
  const u64 step = static_cast<u64>(gridDim.x) * THREADS * VECTORS;
  for (u64 i = static_cast<u64>(blockIdx.x) * THREADS * VECTORS + threadIdx.x; i < vectors; i += step) {
    uint4 v[VECTORS];
    UNROLL for (u32 k = 0; k < VECTORS; k++) v[k] = ptx::load_streaming_16(data + i + k * THREADS);
    UNROLL for (u32 k = 0; k < VECTORS; k++) target[i + k * THREADS] = v[k];
  }
}
