// Which lane holds what in the warp-wide matrix products of decode attention.
//
// A warp works on 16 tokens of one KV head and up to 8 query heads. With r = lane / 4 and c = lane % 4:
//
//   scores   S[16 tokens x 8 heads] = K Q^T     (mma m16n8k16, K is the A operand, Q the B operand)
//   output   O[dims x 8 heads]     += V^T P     (V^T is A, 16 dims a product; P = weights is B)
//
// Rows of S are tokens, columns are heads: lane (r, c) holds rows r and r + 8, columns 2c and 2c + 1.
// Rows of O are dims with the same columns, so running maxima and sums, one a column, stay in the lanes
// that need them. movmatrix turns S (rows over lanes r) into the B operand of V^T P.
//
// Row rho of S is token token_of_row(rho) of the tile. The order is chosen so that the four V tokens
// of a lane are c, c + 4, c + 8, c + 12: constant distances.
#pragma once
#include "platform.cuh"

constexpr int TILE_TOKENS = 16;
constexpr int TILE_HEADS = 8;

DEVICE constexpr int token_of_row(int row) { return ((row >> 1) & 3) + 4 * (row & 1) + 8 * (row >> 3); }

struct Lane {
  int row;   // r: the head of its Q fragment, the dims of its V fragment
  int quad;  // c: the chunk of its K fragment, the head pair of its accumulators

  static DEVICE Lane current() {
    const int lane = static_cast<int>(threadIdx.x % WARP_SIZE);
    return {lane / 4, lane % 4};
  }
  // Tokens (within the tile) of this lane's two K rows: key_token() and key_token() + 8.
  DEVICE int key_token() const { return token_of_row(row); }
  // The query row of its accumulator column k: two columns of each tile of 8 query rows.
  DEVICE int column(int k) const { return TILE_HEADS * (k / 2) + 2 * quad + k % 2; }
  // Token of its V fragment j = 0..3.
  DEVICE int value_token(int j) const { return quad + 4 * j; }
};

// One cached row: a token's values for one KV head, and its scales in formats that have them.
struct CacheRow {
  const u8* data;
  const u8* scales;
};

// One lane's rows of a tile: two of K, four of V. A key row that is not valid (its block is outside the
// pool) turns its scores, and with them the whole result, into NaN.
struct KeyRows {
  CacheRow row[2];
  bool valid[2];
};
struct ValueRows {
  CacheRow row[4];
};

// A part [begin, end) of a sequence's tokens.
struct TokenRange {
  u32 begin;
  u32 end;

  DEVICE bool empty() const { return begin >= end; }
  DEVICE bool contains(u32 position) const { return position >= begin && position < end; }
};

// Largest power of two that divides n.
DEVICE constexpr int power_of_two_divisor(int n) { return n & -n; }
DEVICE constexpr int smaller(int a, int b) { return a < b ? a : b; }
DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }

// Dims of K that the lanes of a row's quads read: chunks c, c + 4, ... of CHUNK consecutive dims. Where
// they do not come out even, the last round has lanes without a chunk: they hold zeros.
template <int HEAD_DIM, int CHUNK>
struct KeyDims {
  static constexpr int IN_ROW = HEAD_DIM / CHUNK;      // chunks
  static constexpr int ROUNDS = (IN_ROW + 3) / 4;      // chunks a lane reads
  static constexpr int PRODUCTS = ROUNDS * CHUNK / 4;  // of the score
  static constexpr int WORDS = ROUNDS * CHUNK / 2;     // 16-bit pairs of q that a lane owns
  static_assert(HEAD_DIM % CHUNK == 0, "whole chunks");

  static DEVICE int start(int quad, int round) { return CHUNK * (quad + 4 * round); }
  static DEVICE bool exists(int quad, int round) { return IN_ROW % 4 == 0 || quad + 4 * round < IN_ROW; }
};

// Dims of V that lane row r holds: chunks r, r + 8, ... of CHUNK consecutive dims. Within a chunk, dims
// 2p and 2p + 1 are rows r and r + 8 of product p. O's rows follow the same order.
template <int HEAD_DIM, int CHUNK>
struct ValueDims {
  static constexpr int IN_ROW = HEAD_DIM / CHUNK;
  static constexpr int ROUNDS = (IN_ROW + 7) / 8;
  static constexpr int PRODUCTS_PER_ROUND = CHUNK / 2;
  static constexpr int PRODUCTS = ROUNDS * PRODUCTS_PER_ROUND;
  static_assert(HEAD_DIM % CHUNK == 0 && CHUNK % 4 == 0, "whole chunks, results in fours");

  static DEVICE int start(int row, int round) { return CHUNK * (row + 8 * round); }
  static DEVICE bool exists(int row, int round) { return IN_ROW % 8 == 0 || row + 8 * round < IN_ROW; }
};

template <int WORDS>
struct Words {
  u32 word[WORDS];
};

// WORDS * 4 bytes, aligned to as much.
template <int WORDS>
DEVICE Words<WORDS> load_words(const u8* pointer) {
  static_assert(WORDS == 1 || WORDS == 2 || WORDS == 4, "one load instruction");
  Words<WORDS> result;
  if constexpr (WORDS == 4) {
    const uint4 v = *reinterpret_cast<const uint4*>(pointer);
    result.word[0] = v.x, result.word[1] = v.y, result.word[2] = v.z, result.word[3] = v.w;
  } else if constexpr (WORDS == 2) {
    const uint2 v = *reinterpret_cast<const uint2*>(pointer);
    result.word[0] = v.x, result.word[1] = v.y;
  } else {
    result.word[0] = *reinterpret_cast<const u32*>(pointer);
  }
  return result;
}

// The same, or zeros.
template <int WORDS>
DEVICE Words<WORDS> load_words_if(bool exists, const u8* pointer) {
  Words<WORDS> result = {};
  if (exists) result = load_words<WORDS>(pointer);
  return result;
}

// A dead token's V must not reach a product, where 0 times NaN would be NaN.
template <int WORDS>
DEVICE void zero_if(bool dead, Words<WORDS>& words) {
  UNROLL for (int i = 0; i < WORDS; i++) words.word[i] = dead ? 0u : words.word[i];
}
