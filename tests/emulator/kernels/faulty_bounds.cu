// Kernels with a mistake to choose: `fault` 0 is right. Comments "here: name" mark the lines that
// reports must name.
#include "ptx.cuh"

// fault 1: one element past the end; 2: one before the beginning; 3: an atomic past the end; 4: half of
// a vector past the end.
extern "C" __global__ void store(u32* out, u32 count, u32 fault) {
  const u32 i = threadIdx.x;
  u32* const cell = fault == 1 ? out + 1 + i : fault == 2 && i == 3 ? out - 1 : out + i;
  if (i < count && fault != 4) *cell = i;                // here: store
  if (fault == 3 && i == 0) atomicAdd(out + count, 1u);  // here: store atomic
  if (fault == 4 && i == 0)
    *reinterpret_cast<uint2*>(out + count - 1) = make_uint2(1, 2);  // here: store wide
}

// Adds up the blocks' numbers of one row of a table i32 [rows, columns]. fault 1: one column too many.
extern "C" __global__ void read_table(const i32* table, i32* out, u32 columns, u32 fault) {
  i32 sum = 0;
  for (u32 column = 0; column < columns + (fault == 1); column++)
    sum += table[blockIdx.x * columns + column];  // here: table
  out[blockIdx.x] = sum;
}

// fault 1: writes what it was given to read only.
extern "C" __global__ void copy(const u32* in, u32* out, u32 fault) {
  out[threadIdx.x] = in[threadIdx.x];
  if (fault == 1) const_cast<u32*>(in)[threadIdx.x] = 0;  // here: const write
}

// fault 1: an index outside a static array; 2: outside dynamic memory; 3: outside all static memory, by
// a pointer.
extern "C" __global__ void index_shared(u32* out, u32 fault) {
  __shared__ u32 cells[32];
  DYNAMIC_SHARED(u32, more);
  const u32 i = threadIdx.x;
  cells[fault == 1 && i == 31 ? 32 : i] = i;  // here: index array
  more[fault == 2 && i == 31 ? 32 : i] = i;   // here: index dynamic
  u32* pointer = cells;
  if (fault == 3) pointer -= 64;
  pointer[i] = i;  // here: index pointer
  __syncthreads();
  out[i] = cells[31 - i] + more[31 - i];
}

// fault 1: at an odd multiple of 4 bytes; 2: the same for an atomic; 3: no array at all.
extern "C" __global__ void load_vector(const float* in, float4* out, u64* counter, u32 fault) {
  const float* from = fault == 3 ? nullptr : in + 4 * threadIdx.x + (fault == 1);
  out[threadIdx.x] = *reinterpret_cast<const float4*>(from);  // here: vector
  u64* const cell = reinterpret_cast<u64*>(reinterpret_cast<u8*>(counter) + (fault == 2 ? 4 : 0));
  atomicAdd(cell, u64{1});  // here: vector atomic
}

extern "C" __global__ void divide(u32* out, u32 divisor) {
  out[threadIdx.x] = 100 / (divisor + threadIdx.x);  // here: divide
}

struct Wide {
  u32 values[40];
};

// A copy too long for registers. fault 1: the source is too short by one element.
extern "C" __global__ void copy_struct(const Wide* in, Wide* out, u32 fault) {
  const u32* from = reinterpret_cast<const u32*>(in) + fault;
  *out = *reinterpret_cast<const Wide*>(from);  // here: struct
}

// Asks for lines to be cached before it reads them. fault 1: a line past the end; 2: one of shared
// memory; 3: too many bytes; 4: a size that is no multiple of 16; 5: no such address.
extern "C" __global__ void fetch_ahead(const u32* in, u32* out, u32 count, u32 fault) {
  __shared__ u32 cells[32];
  const u32 i = threadIdx.x;
  cells[i] = i;
  const u32* line = fault == 2 ? cells : fault == 5 ? nullptr : in + (fault == 1 ? count : 0);
  ptx::prefetch_l2(line + i);  // here: prefetch line
  const u32 bytes = 4 * count + (fault == 3 ? 16 : 0) - (fault == 4 ? 8 : 0);
  if (i == 0) ptx::bulk_prefetch_l2(in, bytes);  // here: prefetch bulk
  __syncwarp();
  out[i] = in[i] + cells[i];
}
