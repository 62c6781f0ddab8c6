// Kernels whose blocks work together, with a mistake to choose: `fault` 0 is right. Comments "here:
// name" mark the lines that reports must name.
#include "ptx.cuh"

// fault 1: all blocks write one cell.
extern "C" __global__ void own_cells(u32* out, u32 fault) {
  out[fault == 1 ? threadIdx.x : blockIdx.x * blockDim.x + threadIdx.x] = blockIdx.x;  // here: own cell
}

// The last block to arrive adds up what all threads of all blocks left. fault 1: no barrier before a
// block arrives; 2: the arrival orders nothing; 3: fences, but the one after the arrival is missing;
// 4: fences of too narrow a scope; 5: threads fence for themselves, but the one that arrives does not.
extern "C" __global__ void last_block_sums(u32* parts, u32* counter, u32* out, u32 fault) {
  __shared__ u32 is_last;
  parts[blockIdx.x * blockDim.x + threadIdx.x] = threadIdx.x;  // here: part write
  if (fault == 5) __threadfence();
  if (fault != 1) __syncthreads();
  if (threadIdx.x == 0) {
    const u32 last = gridDim.x - 1;
    if (fault < 2) {
      is_last = ptx::atomic_inc_acq_rel(counter, last) == last;
    } else {
      if (fault == 3) __threadfence();
      if (fault == 4) __threadfence_block();
      is_last = atomicInc(counter, last) == last;
      if (fault == 4) __threadfence_block();
      if (fault == 5) __threadfence();
    }
  }
  __syncthreads();
  if (!is_last) return;
  u32 sum = 0;
  for (u32 i = threadIdx.x; i < gridDim.x * blockDim.x; i += blockDim.x)
    sum += parts[i];  // here: part read
  atomicAdd(out, sum);
}

// The same with fences and a relaxed atomic, as CUDA programs often do.
extern "C" __global__ void last_block_by_fences(u32* parts, u32* counter, u32* out) {
  __shared__ u32 is_last;
  parts[blockIdx.x * blockDim.x + threadIdx.x] = threadIdx.x;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return;
  u32 sum = 0;
  for (u32 i = threadIdx.x; i < gridDim.x * blockDim.x; i += blockDim.x) sum += parts[i];
  atomicAdd(out, sum);
}

// Co-operative: every block reads what its neighbour wrote, once all have arrived. counter u32 [1] is
// zero between launches. fault 1: nobody sets it back.
extern "C" __global__ void read_neighbour(u32* parts, u32* counters, u32* out, u32 fault) {
  parts[blockIdx.x * blockDim.x + threadIdx.x] = blockIdx.x;  // here: neighbour write
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::atomic_add_acq_rel(&counters[0], 1);
    while (ptx::load_acquire(&counters[0]) < gridDim.x) ptx::spin_pause();
  }
  __syncthreads();
  const u32 neighbour = (blockIdx.x + 1) % gridDim.x;
  out[blockIdx.x * blockDim.x + threadIdx.x] =
      parts[neighbour * blockDim.x + threadIdx.x];  // here: neighbour read
  __syncthreads();
  if (threadIdx.x == 0 && ptx::atomic_add_acq_rel(&counters[1], 1) == gridDim.x - 1) {
    if (fault != 1) counters[0] = 0;
    counters[1] = 0;
  }
}

// Thread 0 hands a value to a thread of another warp through a flag. fault 1: no fence before the flag;
// 2: none after it; 3: an ordinary flag, written while the other waits at a volatile one.
extern "C" __global__ void hand_over(volatile u32* flag, u32* data, u32 fault) {
  if (threadIdx.x == 0) {
    data[0] = 41;  // here: hand write
    if (fault != 1) __threadfence();
    if (fault == 3) {
      *const_cast<u32*>(flag) = 1;  // here: hand plain flag
    } else {
      *flag = 1;
    }
  }
  if (threadIdx.x == 32) {
    while (*flag == 0) {}  // here: hand spin
    if (fault != 2) __threadfence();
    data[1] = data[0] + 1;  // here: hand read
  }
}

// A flag that is released, and acquired. fault 1: stored without release; 2: read without acquire.
extern "C" __global__ void release_acquire(u32* flag, u32* data, u32 fault) {
  if (threadIdx.x == 0) {
    data[0] = 41;  // here: release write
    if (fault == 1) {
      atomicExch(flag, 1u);
    } else {
      ptx::store_release(flag, 1u);
    }
  }
  if (threadIdx.x == 32) {
    if (fault == 2) {
      while (atomicAdd(flag, 0u) == 0u) {}
    } else {
      while (ptx::load_acquire(flag) == 0u) ptx::spin_pause();
    }
    data[1] = data[0] + 1;  // here: acquire read
  }
}

// A flag that is released, watched without ordering, and taken over by a fence. fault 1: no fence; 2: an
// ordinary flag.
extern "C" __global__ void watch_flag(u32* flag, u32* data, u32 fault) {
  if (threadIdx.x == 0) {
    data[0] = 41;  // here: watch write
    if (fault == 2) {
      *flag = 1;  // here: watch plain flag
    } else {
      ptx::store_release(flag, 1u);
    }
  }
  if (threadIdx.x == 32) {
    while (ptx::load_relaxed(flag) == 0u) ptx::spin_pause();  // here: watch spin
    if (fault != 1) __threadfence();
    data[1] = data[0] + 1;  // here: watch read
  }
}

// A lock that threads of all blocks take in turns. fault 1: no fence after it is taken.
extern "C" __global__ void locked_sum(u32* lock, u32* total, u32 fault) {
  if (threadIdx.x % 32 != 0) return;
  while (atomicCAS(lock, 0u, 1u) != 0u) ptx::spin_pause();
  if (fault != 1) __threadfence();
  *total = *total + 1;  // here: locked
  __threadfence();
  atomicExch(lock, 0u);
}

// Each launch reads what the one before wrote.
extern "C" __global__ void shift_blocks(const u32* in, u32* out) {
  const u32 count = gridDim.x * blockDim.x, i = blockIdx.x * blockDim.x + threadIdx.x;
  out[(i + blockDim.x + 1) % count] = in[i];
}
