// CUDA's keywords as the host compiler understands them.
#pragma once

// `inline` lets the compiler drop the entry points that nothing launches.
#define __global__ inline
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __constant__ static constexpr

// One copy for each OS thread, so that blocks can run side by side.
#define __shared__ static __thread
