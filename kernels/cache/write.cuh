// Writing new tokens into a paged cache: one thread takes Store::VALUES consecutive values of one
// (token, KV head), of K and of V: 8, one load of 16 bytes, where they are only copied, 16 where they
// are converted. A format says how they are stored.
#pragma once
#include "ptx.cuh"

constexpr int SCALE_GROUP = 16;  // values that share a scale, in formats that have them

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
  u64 num_slots;      // slots outside [0, num_slots) are dropped
  u64 block_stride;   // bytes between blocks
  u64 scale_section;  // bytes from a block's start to its scales (formats that have them)
  bool heads_first;  // rows of a block in the order [num_kv_heads, block_size], else the other way round
};

// 2 * PAIRS BF16 values, all asked for at once.
template <int PAIRS>
DEVICE void load_group(const bf16_bits* source, u32 (&pairs)[PAIRS]) {
  UNROLL for (int i = 0; i < PAIRS; i += 4) {
    const uint4 four = ptx::load_now_16(source + 2 * i);
    pairs[i] = four.x, pairs[i + 1] = four.y, pairs[i + 2] = four.z, pairs[i + 3] = four.w;
  }
}

// A scale for the whole tensor, or one for each KV head.
struct WriteScale {
  float tensor;
  const float* heads;  // [num_kv_heads], or null

  DEVICE float of(u32 head) const { return heads == nullptr ? tensor : heads[head]; }
};

// In 32 bits where that is enough, which takes a quarter of the instructions.
DEVICE u64 quotient_of(u64 dividend, u32 divisor) {
  return dividend >> 32 == 0 ? static_cast<u32>(dividend) / divisor : dividend / divisor;
}

// Store::store(pairs, head, data, scales) writes one group of a KV head; Store::DATA_BYTES is what its
// codes take.
template <class Store, int HEAD_DIM, int BLOCK_SIZE>
DEVICE void write_tokens(const WriteProblem& problem, const Store& key_store, const Store& value_store) {
  constexpr u32 GROUPS = HEAD_DIM / Store::VALUES;
  const u64 index = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const u32 groups_per_token = problem.num_kv_heads * GROUPS;
  const u64 token = quotient_of(index, groups_per_token);
  if (token >= problem.num_tokens) return;
  const u32 in_token = static_cast<u32>(index - token * groups_per_token);

  // K, V and the slot are asked for together: waiting for the slot first would double the latency.
  const i64 slot = problem.slot_mapping[token];
  u32 keys[Store::VALUES / 2], values[Store::VALUES / 2];
  if (problem.key != nullptr)
    load_group(problem.key + token * problem.key_stride + in_token * Store::VALUES, keys);
  if (problem.value != nullptr)
    load_group(problem.value + token * problem.value_stride + in_token * Store::VALUES, values);
  if (slot < 0 || static_cast<u64>(slot) >= problem.num_slots) return;

  const u32 head = in_token / GROUPS, group = in_token % GROUPS;
  const u64 block = static_cast<u64>(slot) / BLOCK_SIZE;
  const u32 offset = static_cast<u32>(static_cast<u64>(slot) % BLOCK_SIZE);
  const u64 row = problem.heads_first ? static_cast<u64>(head) * BLOCK_SIZE + offset
                                      : static_cast<u64>(offset) * problem.num_kv_heads + head;
  const u64 start = block * problem.block_stride, in_block = row * GROUPS + group;
  const u64 data = start + in_block * Store::DATA_BYTES;
  const u64 scales = start + problem.scale_section + in_block;  // where VALUES is SCALE_GROUP
  if (problem.key != nullptr)
    key_store.store(keys, head, problem.k_cache + data, problem.k_cache + scales);
  if (problem.value != nullptr)
    value_store.store(values, head, problem.v_cache + data, problem.v_cache + scales);
}
