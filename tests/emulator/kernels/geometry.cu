#include "platform.cuh"

// out i32 [threads of the grid, 6]: thread and block index of each thread.
extern "C" __global__ void __launch_bounds__(64, 2) indices(i32* out, u64* dims) {
  const u32 block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const u32 thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  i32* row = out + 6 * (static_cast<u64>(block) * blockDim.x * blockDim.y * blockDim.z + thread);
  row[0] = threadIdx.x, row[1] = threadIdx.y, row[2] = threadIdx.z;
  row[3] = blockIdx.x, row[4] = blockIdx.y, row[5] = blockIdx.z;
  if (block == 0 && thread == 0) {
    dims[0] = gridDim.x, dims[1] = gridDim.y, dims[2] = gridDim.z;
    dims[3] = blockDim.x, dims[4] = blockDim.y, dims[5] = blockDim.z;
  }
}

// Every parameter kind arrives as it was sent.
extern "C" __global__ void parameters(double* out, u32 a, i32 b, u64 c, i64 d, float e,
                                      const u32* __restrict__ f) {
  out[0] = a, out[1] = b, out[2] = static_cast<double>(c), out[3] = static_cast<double>(d), out[4] = e;
  out[5] = *f;
}

extern "C" __global__ void sizes(u32* out) {
  out[0] = alignof(uchar4), out[1] = alignof(short2), out[2] = alignof(int3), out[3] = alignof(float2);
  out[4] = alignof(uint4), out[5] = alignof(longlong2), out[6] = sizeof(float3),
  out[7] = sizeof(double4);
  __shared__ __align__(128) u8 aligned[3];
  out[8] = static_cast<u32>(reinterpret_cast<u64>(aligned) % 128);
  DYNAMIC_SHARED(u8, dynamic);
  out[9] = static_cast<u32>(reinterpret_cast<u64>(dynamic) % 128);
}

// Fresh shared memory, before anything is written: every word of both kinds.
extern "C" __global__ void untouched_shared(u32* out) {
  __shared__ u32 fixed[32];
  DYNAMIC_SHARED(u32, dynamic);
  out[64 * blockIdx.x + threadIdx.x] = fixed[threadIdx.x];
  out[64 * blockIdx.x + 32 + threadIdx.x] = dynamic[threadIdx.x];
  fixed[threadIdx.x] = dynamic[threadIdx.x] = 1;
}

extern "C" __global__ void nothing() {}

extern "C" __global__ void count_threads(u32* out) {
  if (threadIdx.x == 0) atomicAdd(out, blockDim.x);
}
