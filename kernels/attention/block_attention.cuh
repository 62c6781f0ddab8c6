// One block works on one KV head of one sequence: HEAD_TILES groups of 8 query heads times TOKEN_WARPS
// warps that take alternate tiles, so that every K/V row is fetched from memory once for all heads of
// the group (the warps of other head tiles find it in L1).
#pragma once
#include "attention/warp_attention.cuh"
#include "cache/page_walk.cuh"

template <int HEAD_DIM, int GQA_RATIO, int TOKEN_WARPS>
struct BlockShape {
  static constexpr int HEAD_TILES = (GQA_RATIO + TILE_HEADS - 1) / TILE_HEADS;
  static constexpr int WARPS = HEAD_TILES * TOKEN_WARPS;
  static constexpr int THREADS = WARPS * 32;
  static_assert((TOKEN_WARPS & (TOKEN_WARPS - 1)) == 0, "token warps merge in a tree");

  static DEVICE int warp() { return static_cast<int>(threadIdx.x / WARP_SIZE); }
  static DEVICE int head_tile() { return warp() % HEAD_TILES; }
  static DEVICE int token_warp() { return warp() / HEAD_TILES; }
  // Warps with the same group work on the same heads.
  static DEVICE int merge_group() { return head_tile(); }
  // Query heads of this warp's tile.
  static DEVICE int heads() { return smaller(TILE_HEADS, GQA_RATIO - head_tile() * TILE_HEADS); }
};

// Part `index` of `parts` of a range: contiguous, cut between tiles.
DEVICE TokenRange split_range(TokenRange whole, u32 index, u32 parts) {
  const u32 first = whole.begin / TILE_TOKENS;
  const u64 tiles = (whole.end + TILE_TOKENS - 1) / TILE_TOKENS - first;
  const u32 from = first + static_cast<u32>(tiles * index / parts);
  const u32 to = first + static_cast<u32>(tiles * (index + 1u) / parts);
  return {max(whole.begin, from * TILE_TOKENS), min(whole.end, to * TILE_TOKENS)};
}

// Runs this warp's share of the range. State complete over the warp afterwards.
template <class Shape, int BLOCK_SIZE, class Warp>
DEVICE void attend(Warp& warp, const PageWalk<BLOCK_SIZE>& walk, TokenRange range, int token_warps) {
  if (!range.empty()) {
    const u32 step = TILE_TOKENS * token_warps;
    u32 tile = range.begin / TILE_TOKENS * TILE_TOKENS + TILE_TOKENS * Shape::token_warp();
    const auto nothing = [] {};
    for (; tile < range.end; tile += step) {
      const PooledTile<BLOCK_SIZE> source = {walk, warp.lane, tile, range};
      if (tile >= range.begin && tile + TILE_TOKENS <= range.end) {
        warp.template fold<1, false>(source, range, nothing);
      } else {
        warp.template fold<1, true>(source, range, nothing);
      }
    }
  }
  warp.finish();
}

// Merges the token warps of each head tile into token warp 0, in a fixed order: the result is the same
// bits every time. All threads of the block must call it. PRODUCTS_AT_ONCE trades shared memory against
// barriers.
template <class Shape, int TOKEN_WARPS, int PRODUCTS_AT_ONCE, class Warp>
DEVICE void merge_token_warps(Warp& warp) {
  if constexpr (TOKEN_WARPS > 1) {
    constexpr int SLOTS = TOKEN_WARPS / 2 * (Shape::WARPS / TOKEN_WARPS);
    __shared__ float4 outputs[SLOTS][PRODUCTS_AT_ONCE][WARP_SIZE];
    __shared__ float4 states[SLOTS][WARP_SIZE];
    const int lane = static_cast<int>(threadIdx.x % WARP_SIZE), position = Shape::token_warp();
  UNROLL for (int half = TOKEN_WARPS / 2; half > 0; half /= 2) {
      const int slot = position % half + half * Shape::merge_group();
      const bool gives = position >= half && position < 2 * half, takes = position < half;
      if (gives)
        states[slot][lane] = make_float4(warp.state[0].reference, warp.state[1].reference,
                                         warp.state[0].sum, warp.state[1].sum);
      float2 factor[2] = {};
      UNROLL for (int first = 0; first < Warp::PRODUCTS; first += PRODUCTS_AT_ONCE) {
        if (gives) {
          UNROLL for (int p = 0; p < PRODUCTS_AT_ONCE; p++) {
            const float(&o)[4] = warp.output[first + p];
            outputs[slot][p][lane] = make_float4(o[0], o[1], o[2], o[3]);
          }
        }
        __syncthreads();
        if (takes) {
          if (first == 0) {
            const float4 other = states[slot][lane];
            factor[0] = warp.state[0].merge({other.x, other.z});
            factor[1] = warp.state[1].merge({other.y, other.w});
          }
          UNROLL for (int p = 0; p < PRODUCTS_AT_ONCE; p++) {
            const float4 o = outputs[slot][p][lane];
            float(&own)[4] = warp.output[first + p];
            own[0] = own[0] * factor[0].x + o.x * factor[0].y;
            own[1] = own[1] * factor[1].x + o.y * factor[1].y;
            own[2] = own[2] * factor[0].x + o.z * factor[0].y;
            own[3] = own[3] * factor[1].x + o.w * factor[1].y;
          }
        }
        __syncthreads();
      }
    }
  }
}

// Calls visit(head, k, dim, values) for every query head of the tile this lane holds, with four
// consecutive dims from `dim` on; head is in accumulator column k of the lane.
template <class Format, class Warp, class Visit>
DEVICE void visit_output(const Warp& warp, int heads, Visit visit) {
  using Dims = typename Format::Dims;
  UNROLL for (int k = 0; k < 2; k++) {
    const int head = 2 * warp.lane.quad + k;
    if (head >= heads) continue;
    UNROLL for (int p = 0; p < Warp::PRODUCTS; p += 2) {
      const int dim = Dims::chunk_start(warp.lane.row, p / Dims::PRODUCTS_PER_CHUNK) +
                      2 * (p % Dims::PRODUCTS_PER_CHUNK);
      visit(head, k, dim,
            make_float4(warp.output[p][k], warp.output[p][k + 2], warp.output[p + 1][k],
                        warp.output[p + 1][k + 2]));
    }
  }
}

// Four values times a factor, as BF16, to 8-byte aligned memory.
DEVICE void store_bf16x4(bf16_bits* target, float4 v, float factor) {
  *reinterpret_cast<uint2*>(target) = make_uint2(ptx::pack_bf16x2(v.x * factor, v.y * factor),
                                                 ptx::pack_bf16x2(v.z * factor, v.w * factor));
}
