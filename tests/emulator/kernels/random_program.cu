// Runs a random program: what each thread does in each step is data.
#include "ptx.cuh"

constexpr u32 CELL_BYTES = 64;

template <class T>
DEVICE u32 access(u8* cells, u32 at, bool write) {
  T* cell = reinterpret_cast<T*>(cells + at);
  if (write) {
    *cell = 0;
    return 0;
  }
  return static_cast<u32>(*cell);
}

// program u32 [steps, blockDim.x]: kind + (offset << 8) + (log2 of bytes << 16). Kinds: 0 nothing, 1
// read, 2 write, 3 atomic update of 4 bytes, 4 __syncthreads, 5 __syncwarp. masks u32 [steps,
// blockDim.x]: of 5.
extern "C" __global__ void run_program(const u32* program, const u32* masks, u32* out, u32 steps) {
  __shared__ __align__(8) u8 cells[CELL_BYTES];
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < CELL_BYTES; i++) cells[i] = 0;
  }
  __syncthreads();
  u32 sum = 0;
  for (u32 step = 0; step < steps; step++) {
    const u32 command = program[step * blockDim.x + threadIdx.x];
    const u32 kind = command & 0xffu, at = command >> 8 & 0xffu, bytes = 1u << (command >> 16);
    if (kind == 1 || kind == 2) {
      if (bytes == 1) sum += access<u8>(cells, at, kind == 2);
      if (bytes == 2) sum += access<u16>(cells, at, kind == 2);
      if (bytes == 4) sum += access<u32>(cells, at, kind == 2);
      if (bytes == 8) sum += access<u64>(cells, at, kind == 2);
    }
    if (kind == 3) atomicAdd(reinterpret_cast<u32*>(cells + at), 1u);
    if (kind == 4) __syncthreads();
    if (kind == 5) __syncwarp(masks[step * blockDim.x + threadIdx.x]);
  }
  out[threadIdx.x] = sum;
}
