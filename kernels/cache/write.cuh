// Writing new tokens into a paged cache: one thread takes 16 consecutive values of one (token, KV head),
// first of K, then of V. A format says how 16 values are stored.
#pragma once
#include "cache/geometry.cuh"
#include "numeric/bf16.cuh"

constexpr int WRITE_GROUP = 16;

// key, value BF16 [num_tokens, num_kv_heads, HEAD_DIM], key_stride / value_stride elements between
// tokens, null: that pool is not written; slot_mapping i64 [num_tokens]: slot = block * block_size +
// offset.
struct WriteProblem {
  const bf16_bits* key;
  const bf16_bits* value;
  u8* k_cache;
  u8* v_cache;
  const i64* slot_mapping;
  u32 num_tokens;
  u32 num_kv_heads;
  u32 key_stride;
  u32 value_stride;
  u64 num_slots;  // slots outside [0, num_slots) are dropped
  PoolGeometry geometry;
};

// Rows of a block in the order [block_size, num_kv_heads] or, heads first, [num_kv_heads, block_size],
// in the data section and in that of the scales (formats that have them).
DEVICE PoolGeometry write_geometry(u64 block_stride, u64 scale_section, u32 num_kv_heads, u32 block_size,
                                   u32 row_bytes, u32 scale_bytes, bool heads_first) {
  const u64 token_rows = heads_first ? 1 : num_kv_heads, head_rows = heads_first ? block_size : 1;
  return {block_stride,  token_rows * row_bytes,   head_rows * row_bytes,
          scale_section, token_rows * scale_bytes, head_rows * scale_bytes};
}

// 16 BF16 values as 8 words.
DEVICE void load_group(const bf16_bits* source, u32 (&pairs)[8]) {
  const uint4 low = *reinterpret_cast<const uint4*>(source);
  const uint4 high = *reinterpret_cast<const uint4*>(source + 8);
  pairs[0] = low.x, pairs[1] = low.y, pairs[2] = low.z, pairs[3] = low.w;
  pairs[4] = high.x, pairs[5] = high.y, pairs[6] = high.z, pairs[7] = high.w;
}

// A scale for the whole tensor, or one for each KV head.
struct WriteScale {
  float tensor;
  const float* heads;  // [num_kv_heads], or null

  DEVICE float of(u32 head) const { return heads == nullptr ? tensor : heads[head]; }
};

DEVICE float group_value(const u32 (&pairs)[8], int i) {
  return i % 2 == 0 ? bf16x2_low(pairs[i / 2]) : bf16x2_high(pairs[i / 2]);
}

// Store::store(pairs, head, data, scales) writes one group of a KV head; Store::DATA_BYTES is what its
// codes take.
template <class Store, int HEAD_DIM, int BLOCK_SIZE>
DEVICE void write_tokens(const WriteProblem& problem, const Store& key_store, const Store& value_store) {
  constexpr u32 GROUPS = HEAD_DIM / WRITE_GROUP;
  const u64 index = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const u32 groups_per_token = problem.num_kv_heads * GROUPS;
  const u64 token = index / groups_per_token;
  if (token >= problem.num_tokens) return;
  const i64 slot = problem.slot_mapping[token];
  if (slot < 0 || static_cast<u64>(slot) >= problem.num_slots) return;

  const u32 in_token = static_cast<u32>(index % groups_per_token);
  const u32 head = in_token / GROUPS, group = in_token % GROUPS;
  const u64 block = static_cast<u64>(slot) / BLOCK_SIZE;
  const u32 offset = static_cast<u32>(static_cast<u64>(slot) % BLOCK_SIZE);
  const PoolGeometry& geometry = problem.geometry;
  const u64 data =
      block * geometry.block_stride + data_offset(geometry, offset, head) + group * Store::DATA_BYTES;
  const u64 scales = block * geometry.block_stride + scale_offset(geometry, offset, head) + group;

  const u32 element = head * HEAD_DIM + group * WRITE_GROUP;
  u32 pairs[8];
  if (problem.key != nullptr) {
    load_group(problem.key + token * problem.key_stride + element, pairs);
    key_store.store(pairs, head, problem.k_cache + data, problem.k_cache + scales);
  }
  if (problem.value != nullptr) {
    load_group(problem.value + token * problem.value_stride + element, pairs);
    value_store.store(pairs, head, problem.v_cache + data, problem.v_cache + scales);
  }
}
