// Upkeep of a paged pool: tokens of a sequence read back as numbers, and blocks copied. No compile-time
// constants: these kernels wait for memory, and one compilation serves every shape.
#include "cache/dequantise.cuh"
#include "cache/geometry.cuh"
#include "numeric/f32.cuh"

// What a gather reads: one pool, through one sequence's list of blocks.
struct GatherProblem {
  const u8* pool;
  const i32* block_ids;  // [ceil(seq_len / block_size)]
  const float* scales;   // [num_kv_heads], or null: `scale` for all heads
  u32 seq_len;
  u32 num_kv_heads;
  u32 head_dim;
  u32 block_size;
  float scale;
  u32 num_blocks;  // an id outside [0, num_blocks) makes its tokens NaN
  PoolGeometry geometry;
};

struct FloatRows {
  float* output;

  DEVICE void store(u64 element, const float (&values)[READ_GROUP]) const {
    float4* words = reinterpret_cast<float4*>(output + element);
    UNROLL for (int i = 0; i < READ_GROUP / 4; i++)
      words[i] = make_float4(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]);
  }
};

struct Bf16Rows {
  bf16_bits* output;

  DEVICE void store(u64 element, const float (&values)[READ_GROUP]) const {
    uint4* words = reinterpret_cast<uint4*>(output + element);
    UNROLL for (int half = 0; half < 2; half++) {
      const float* v = values + 8 * half;
      words[half] = make_uint4(floats_to_bf16x2(v[0], v[1]), floats_to_bf16x2(v[2], v[3]),
                               floats_to_bf16x2(v[4], v[5]), floats_to_bf16x2(v[6], v[7]));
    }
  }
};

// A thread takes 16 values of one (token, KV head); output [seq_len, num_kv_heads, head_dim].
template <class Values, class Rows>
DEVICE void gather(const GatherProblem& problem, const Rows& rows) {
  const u64 index = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const u32 groups = problem.head_dim / READ_GROUP;
  const u32 groups_per_token = problem.num_kv_heads * groups;
  const u64 position = index / groups_per_token;
  if (position >= problem.seq_len) return;
  const u32 in_token = static_cast<u32>(index % groups_per_token);
  const u32 head = in_token / groups, group = in_token % groups;
  const u32 token = static_cast<u32>(position % problem.block_size);
  const u32 block = static_cast<u32>(problem.block_ids[position / problem.block_size]);

  float values[READ_GROUP];
  if (block < problem.num_blocks) {
    const u8* start = problem.pool + block * problem.geometry.block_stride;
    Values::read(start + data_offset(problem.geometry, token, head) + group * Values::DATA_BYTES,
                 start + scale_offset(problem.geometry, token, head) + group,
                 problem.scales == nullptr ? problem.scale : problem.scales[head], values);
  } else {
    UNROLL for (int i = 0; i < READ_GROUP; i++) values[i] = quiet_nan();
  }
  rows.store(index * READ_GROUP, values);
}

// Cache formats by number, as cupaged/ops/blocks.py gives them.
enum CacheFormat : u32 { CACHE_BF16 = 0, CACHE_FP8 = 1, CACHE_NVFP4 = 2 };

template <class Rows>
DEVICE void gather_format(u32 format, const GatherProblem& problem, const Rows& rows) {
  if (format == CACHE_BF16) gather<Bf16Values>(problem, rows);
  if (format == CACHE_FP8) gather<Fp8Values>(problem, rows);
  if (format == CACHE_NVFP4) gather<Nvfp4Values>(problem, rows);
}

extern "C" __global__ void __launch_bounds__(256)
    gather_tokens_f32(const u8* pool, const i32* block_ids, const float* scales, float* output,
                      u32 seq_len, u32 num_kv_heads, u32 head_dim, u32 block_size, u32 cache_format,
                      float scale, u64 block_stride_bytes, u64 token_stride_bytes,
                      u64 head_stride_bytes, u64 data_section_bytes, u64 scale_token_stride_bytes,
                      u64 scale_head_stride_bytes, u32 num_blocks) {
  gather_format(cache_format,
                {pool, block_ids, scales, seq_len, num_kv_heads, head_dim, block_size, scale, num_blocks,
                 PoolGeometry{block_stride_bytes, token_stride_bytes, head_stride_bytes,
                              data_section_bytes, scale_token_stride_bytes, scale_head_stride_bytes}},
                FloatRows{output});
}

extern "C" __global__ void __launch_bounds__(256)
    gather_tokens_bf16(const u8* pool, const i32* block_ids, const float* scales, bf16_bits* output,
                       u32 seq_len, u32 num_kv_heads, u32 head_dim, u32 block_size, u32 cache_format,
                       float scale, u64 block_stride_bytes, u64 token_stride_bytes,
                       u64 head_stride_bytes, u64 data_section_bytes, u64 scale_token_stride_bytes,
                       u64 scale_head_stride_bytes, u32 num_blocks) {
  gather_format(cache_format,
                {pool, block_ids, scales, seq_len, num_kv_heads, head_dim, block_size, scale, num_blocks,
                 PoolGeometry{block_stride_bytes, token_stride_bytes, head_stride_bytes,
                              data_section_bytes, scale_token_stride_bytes, scale_head_stride_bytes}},
                Bf16Rows{output});
}

// `bytes` from 16-byte aligned places, by threads `thread`, `thread + threads`, ...
DEVICE void copy_bytes(const u8* source, u8* target, u64 bytes, u64 thread, u64 threads) {
  const u64 words = bytes / sizeof(uint4);
  for (u64 i = thread; i < words; i += threads)
    reinterpret_cast<uint4*>(target)[i] = reinterpret_cast<const uint4*>(source)[i];
  for (u64 i = words * sizeof(uint4) + thread; i < bytes; i += threads) target[i] = source[i];
}

// Copies the blocks of pairs [num_pairs, 2] (source, target), K and V; bytes between a block's sections and
// between blocks stay as they are. A pair with an id outside either pool is left out, and so is a tensor
// whose source is null. Either pool may be pinned host memory. Grid: (num_pairs, parts of a block, K and V).
extern "C" __global__ void __launch_bounds__(256)
    copy_cache_blocks(const u8* k_source, const u8* v_source, u8* k_target, u8* v_target,
                      const i32* pairs, u32 num_pairs, u64 data_bytes, u64 scale_bytes,
                      u64 source_stride_bytes, u64 source_section_bytes, u64 target_stride_bytes,
                      u64 target_section_bytes, u32 num_source_blocks, u32 num_target_blocks) {
  const u8* source = blockIdx.z == 0 ? k_source : v_source;
  u8* target = blockIdx.z == 0 ? k_target : v_target;
  const u32 from = static_cast<u32>(pairs[2 * static_cast<u64>(blockIdx.x)]);
  const u32 to = static_cast<u32>(pairs[2 * static_cast<u64>(blockIdx.x) + 1]);
  if (source == nullptr || from >= num_source_blocks || to >= num_target_blocks) return;
  source += from * source_stride_bytes;
  target += to * target_stride_bytes;
  const u64 thread = static_cast<u64>(blockIdx.y) * blockDim.x + threadIdx.x;
  const u64 threads = static_cast<u64>(gridDim.y) * blockDim.x;
  copy_bytes(source, target, data_bytes, thread, threads);
  copy_bytes(source + source_section_bytes, target + target_section_bytes, scale_bytes, thread, threads);
}
