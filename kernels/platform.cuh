// The few spellings that differ between NVRTC and the CPU emulator.
// Together with ptx.cuh this is the only file that knows which of the two compiles it.
#pragma once
#include "types.cuh"

#ifdef CUPAGED_EMULATOR
// The emulator's own header (force-included) provides threadIdx, __shfl_sync, uint4 and so on.
// DYNAMIC_SHARED(type, name) declares the launch's dynamic shared memory.
#define DYNAMIC_SHARED(type, name) \
  type* name = reinterpret_cast<type*>(cupaged_emulator::dynamic_shared())
#else
#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(128) type name[]
#endif

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")

constexpr u32 FULL_WARP = 0xffffffffu;
constexpr u32 WARP_SIZE = 32;
