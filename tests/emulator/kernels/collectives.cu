#include "platform.cuh"

template <class T>
DEVICE T shuffle(i32 kind, u32 mask, T value, i32 operand, i32 width) {
  if (kind == 0) return __shfl_sync(mask, value, operand, width);
  if (kind == 1) return __shfl_up_sync(mask, value, operand, width);
  if (kind == 2) return __shfl_down_sync(mask, value, operand, width);
  return __shfl_xor_sync(mask, value, operand, width);
}

// Lanes of masks[lane] shuffle among each other; masks[lane] 0 takes no part.
template <class T>
DEVICE void shuffle_once(const T* in, T* out, const i32* operands, const u32* masks, i32 kind,
                         i32 width) {
  const u32 i = threadIdx.x, lane = i % 32;
  if (masks[lane] == 0u) return;
  out[i] = shuffle(kind, masks[lane], in[i], operands[i], width);
}

extern "C" __global__ void shuffle_u32(const u32* in, u32* out, const i32* operands, const u32* masks,
                                       i32 kind, i32 width) {
  shuffle_once(in, out, operands, masks, kind, width);
}
extern "C" __global__ void shuffle_u64(const u64* in, u64* out, const i32* operands, const u32* masks,
                                       i32 kind, i32 width) {
  shuffle_once(in, out, operands, masks, kind, width);
}
extern "C" __global__ void shuffle_f32(const float* in, float* out, const i32* operands,
                                       const u32* masks, i32 kind, i32 width) {
  shuffle_once(in, out, operands, masks, kind, width);
}

// out u32 [threads, 3]: ballot, any, all.
extern "C" __global__ void votes(const i32* predicates, u32* out, const u32* masks) {
  const u32 i = threadIdx.x, mask = masks[i % 32];
  if (mask == 0u) return;
  out[3 * i] = __ballot_sync(mask, predicates[i]);
  out[3 * i + 1] = static_cast<u32>(__any_sync(mask, predicates[i]));
  out[3 * i + 2] = static_cast<u32>(__all_sync(mask, predicates[i]));
}

// out i32 [threads, 3]: or, and, count over the block.
extern "C" __global__ void block_votes(const i32* predicates, i32* out) {
  const u32 i = threadIdx.x;
  out[3 * i] = __syncthreads_or(predicates[i]);
  out[3 * i + 1] = __syncthreads_and(predicates[i]);
  out[3 * i + 2] = __syncthreads_count(predicates[i]);
}

// Overlapping masks with the same lowest lane: half the warp first meets alone.
extern "C" __global__ void nested_masks(u32* out) {
  const u32 lane = threadIdx.x;
  u32 value = lane;
  if (lane < 16) value = __shfl_xor_sync(0x0000ffffu, value, 1);
  out[lane] = __shfl_xor_sync(FULL_WARP, value, 16);
}

// Threads that have left do not take part in later barriers or full masks.
extern "C" __global__ void early_exit(u32* out) {
  if (threadIdx.x % 32 >= 20) return;
  __syncthreads();
  out[threadIdx.x] = __ballot_sync(FULL_WARP, 1);
}

extern "C" __global__ void active(u32* out) {
  if (threadIdx.x % 2 == 0) {
    out[threadIdx.x] = __activemask();
    __syncwarp(0x55555555u);
  }
  __syncwarp();
}

// Rotates values through shared memory `rounds` times; SPEC_BROKEN leaves out one barrier.
extern "C" __global__ void rotate(float* values, u32 rounds) {
  __shared__ float buffer[1024];
  float own = values[threadIdx.x];
  for (u32 i = 0; i < rounds; i++) {
    buffer[threadIdx.x] = own;
#if SPEC_BROKEN != 1
    __syncthreads();
#endif
    own = buffer[(threadIdx.x + 1) % blockDim.x];
#if SPEC_BROKEN != 2
    __syncthreads();
#endif
  }
  values[threadIdx.x] = own;
}
