// What one specialisation of a streaming kernel is: the SPEC_ macros that the registry sets
// (cupaged/registry/ring.py), as constants.
#pragma once
#include "attention/query.cuh"
#include "platform.cuh"

#ifndef SPEC_QUERY_TOKENS
#define SPEC_QUERY_TOKENS 1  // query tokens a sequence
#endif
#ifndef SPEC_CAUSAL
#define SPEC_CAUSAL 0  // 1: the last of them is the newest token, and none sees those after it
#endif
#ifndef SPEC_SOFT_CAP
#define SPEC_SOFT_CAP 0
#endif
#ifndef SPEC_QUERY_F16
#define SPEC_QUERY_F16 0  // q and output are F16 instead of BF16
#endif
#ifndef SPEC_HEADS_FIRST
#define SPEC_HEADS_FIRST 0  // blocks are [kv_heads, tokens, d] instead of [tokens, kv_heads, d]
#endif
#ifndef SPEC_WARP_ROW_TILES
#define SPEC_WARP_ROW_TILES 1
#endif
#ifndef SPEC_LATENCY
#define SPEC_LATENCY 0  // level for small batches
#endif
#ifndef SPEC_JOINED
#define SPEC_JOINED 0  // an image's values and scales follow each other in the pool
#endif

constexpr int LATENCY_LEVELS = 4;  // the last is for the smallest batches

DEVICE constexpr int greatest_common_divisor(int a, int b) {
  return b == 0 ? a : greatest_common_divisor(b, a % b);
}
DEVICE constexpr int round_up(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
DEVICE constexpr int divide_up(int value, int divisor) { return (value + divisor - 1) / divisor; }

template <bool F16>
struct ElementOf {
  using type = Bf16Element;
};
template <>
struct ElementOf<true> {
  using type = F16Element;
};

template <class KeyFormat_, class ValueFormat_>
struct RingSpec {
  using KeyFormat = KeyFormat_;
  using ValueFormat = ValueFormat_;
  using Element = typename ElementOf<SPEC_QUERY_F16 != 0>::type;

  static constexpr int HEAD_DIM = SPEC_HEAD_DIM;
  static constexpr int NUM_KV_HEADS = SPEC_NUM_KV_HEADS;
  static constexpr int GQA_RATIO = SPEC_GQA_RATIO;
  static constexpr int QUERY_TOKENS = SPEC_QUERY_TOKENS;
  static constexpr bool CAUSAL = SPEC_CAUSAL != 0;
  static constexpr bool SOFT_CAP = SPEC_SOFT_CAP != 0;
  static constexpr int BLOCK_SIZE = SPEC_BLOCK_SIZE;
  static constexpr bool HEADS_FIRST = SPEC_HEADS_FIRST != 0;
  static constexpr bool JOINED = SPEC_JOINED != 0;

  // The block of threads.
  static constexpr int BLOCK_HEADS = SPEC_BLOCK_HEADS;            // KV heads
  static constexpr int BLOCK_HEAD_TILES = SPEC_BLOCK_HEAD_TILES;  // groups of 8 query rows of each
  static constexpr int WARP_ROW_TILES = SPEC_WARP_ROW_TILES;      // of those, what one warp has
  static constexpr int TOKEN_WARPS = SPEC_TOKEN_WARPS;            // warps that take alternate tiles
  static constexpr int STAGE_TILES = SPEC_STAGE_TILES;
  static constexpr int STAGES = SPEC_STAGES;
  static constexpr bool BULK = SPEC_BULK != 0;  // bulk copies fill the ring, otherwise cp.async
  static constexpr int FILL_DELAY = SPEC_FILL_DELAY;
  static constexpr int SEQUENCE_COST = SPEC_SEQUENCE_COST;
  static constexpr int BLOCKS_PER_SM = SPEC_BLOCKS_PER_SM;
  static constexpr bool SHORT = SPEC_LATENCY == LATENCY_LEVELS - 1;

  static constexpr int NUM_Q_HEADS = NUM_KV_HEADS * GQA_RATIO;
  static constexpr int HEAD_ROWS = GQA_RATIO * QUERY_TOKENS;  // query rows of a KV head
  static constexpr int ROWS = NUM_KV_HEADS * HEAD_ROWS;       // of a sequence
};
