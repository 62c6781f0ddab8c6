// Kernels with a mistake to choose: `fault` 0 is right. Comments "here: name" mark the lines that
// reports must name.
#include "ptx.cuh"

constexpr u32 THREADS = 64;

// Rotates THREADS values through shared memory, several times. fault 1: no barrier between write and
// read; 2: none between read and the next write.
extern "C" __global__ void rotate(const float* in, float* out, u32 rounds, u32 fault) {
  __shared__ float cells[THREADS];
  const u32 i = threadIdx.x;
  float value = in[i];
  cells[i] = 0.0f;
  __syncthreads();
  for (u32 round = 0; round < rounds; round++) {
    cells[i] = value;  // here: rotate write
    if (fault != 1) __syncthreads();
    value = cells[(i + 37) % THREADS];  // here: rotate read
    if (fault != 2) __syncthreads();
  }
  out[i] = value;
}

// Neighbours exchange values. fault 1: nothing orders them; 2: only a shuffle does; 3: half of the lanes
// synchronise with the wrong half.
extern "C" __global__ void swap_neighbours(const u32* in, u32* out, u32 fault) {
  __shared__ u32 cells[32];
  const u32 i = threadIdx.x;
  cells[i] = 0;
  __syncwarp();
  cells[i] = in[i];  // here: swap write
  if (fault == 0) __syncwarp();
  if (fault == 2) __shfl_xor_sync(FULL_WARP, i, 1);
  if (fault == 3) __syncwarp(i % 2 == 0 ? 0x55555555u : 0xaaaaaaaau);
  out[i] = cells[i ^ 1];  // here: swap read
}

// Groups of lanes meet among themselves, and need no more.
extern "C" __global__ void meet_in_parts(u32* out) {
  __shared__ u32 cells[32];
  const u32 i = threadIdx.x, first = i / 8 * 8;
  for (u32 round = 0; round < 4; round++) {
    cells[i] = i + round;
    __syncwarp(0xffu << first);
    out[i] = cells[first + (i + 1) % 8];
    __syncwarp(0xffu << first);
  }
}

// fault 1: the last thread forgets to write its cell.
extern "C" __global__ void read_written(u32* out, u32 fault) {
  __shared__ u32 cells[THREADS];
  DYNAMIC_SHARED(u8, bytes);
  const u32 i = threadIdx.x;
  if (fault != 1 || i != THREADS - 1) cells[i] = i;
  if (fault != 2 || i != 5) bytes[i] = static_cast<u8>(i);
  __syncthreads();
  if (i == 0) {
    u32 sum = 0;
    for (u32 k = 0; k < THREADS; k++) sum += cells[k];  // here: cells sum
    for (u32 k = 0; k < THREADS; k++) sum += bytes[k];  // here: bytes sum
    out[blockIdx.x] = sum;
  }
}

// Threads of several warps write neighbouring bytes: no race. fault 1: two of them the same byte.
extern "C" __global__ void pack_bytes(u8* out, u32 fault) {
  __shared__ __align__(8) u8 packed[2 * THREADS];
  const u32 i = threadIdx.x;
  const u32 at = fault == 1 && i == 40 ? 7 : (i % 8) * (THREADS / 8) + i / 8;
  packed[at] = static_cast<u8>(i);              // here: pack shared
  out[blockIdx.x * THREADS + at] = packed[at];  // here: pack global
  __syncthreads();
  const u32 next = (at + 1) % THREADS;
  packed[THREADS + next] = packed[next];
}

// All lanes of all warps read what one thread writes, in turns. fault 1: it writes too early.
extern "C" __global__ void publish(u32* out, u32 rounds, u32 fault) {
  __shared__ u32 cell;
  u32 sum = 0;
  for (u32 round = 0; round < rounds; round++) {
    if (threadIdx.x == round % blockDim.x) cell = round;  // here: publish write
    __syncthreads();
    sum += cell;  // here: publish read
    if (fault != 1) __syncthreads();
  }
  out[threadIdx.x] = sum;
}

// Every thread adds to a cell of shared memory. fault 1: one adds with a plain addition; 2: nobody has
// set the cell to zero; 3: the sum is read before the others are done.
extern "C" __global__ void add_up(u32* out, u32 fault) {
  __shared__ u32 sum;
  if (threadIdx.x == 0 && fault != 2) sum = 0;
  __syncthreads();
  if (fault == 1 && threadIdx.x == 33) {
    sum += 1;  // here: add plainly
  } else {
    atomicAdd(&sum, 1u);  // here: add atomically
  }
  if (fault != 3) __syncthreads();
  if (threadIdx.x == 0) out[0] = sum;  // here: add read
}
