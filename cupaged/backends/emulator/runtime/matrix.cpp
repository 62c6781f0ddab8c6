// Warp-wide matrix instructions. In a fragment of 8 x 8 halves, lane 4r + c holds row r, columns 2c and
// 2c + 1 in one word: the words of lanes 0..31 in order are the matrix in row-major order.
#include <string.h>

#include "../include/emulator/half.h"
#include "../include/emulator/hooks.h"
#include "collectives.h"

namespace cupaged_emulator {
namespace {

constexpr uint32_t ALL_LANES = 0xffffffffu;
constexpr unsigned TILE = 8, TILE_HALVES = TILE * TILE;
constexpr unsigned ROWS = 16, DEPTH = 16, COLUMNS = 8;  // of m16n8k16

struct MultiplyArgument {
  float* accumulator;
  const uint32_t* a;
  const uint32_t* b;
};

// Word `index` of every lane's a (or b), as floats.
template <float TO_FLOAT(uint16_t)>
void gather_tile(void* const* arguments, const uint32_t* MultiplyArgument::* operand, unsigned index,
                 float* tile) {
  uint16_t halves[TILE_HALVES];
  for (unsigned lane = 0; lane < WARP_LANES; lane++)
    memcpy(halves + 2 * lane, static_cast<const MultiplyArgument*>(arguments[lane])->*operand + index,
           4);
  for (unsigned i = 0; i < TILE_HALVES; i++) tile[i] = TO_FLOAT(halves[i]);
}

// Products of two halves are exact in double; their sums are rounded once, to float, at the end (all but
// exactly: a double's own roundings are 2^29 times finer).
template <float TO_FLOAT(uint16_t)>
void run_multiply(uint32_t, void* const* arguments) {
  // Tiles in the order of the fragment's words: rows 0-7 and 8-15 of columns 0-7, then of 8-15.
  float a[4][TILE_HALVES];
  for (unsigned i = 0; i < 4; i++) gather_tile<TO_FLOAT>(arguments, &MultiplyArgument::a, i, a[i]);
  // b's fragment is its transpose: lane 4r + c holds column r.
  float b_transposed[2][TILE_HALVES];
  for (unsigned i = 0; i < 2; i++)
    gather_tile<TO_FLOAT>(arguments, &MultiplyArgument::b, i, b_transposed[i]);
  double b[DEPTH][COLUMNS];
  for (unsigned k = 0; k < DEPTH; k++)
    for (unsigned n = 0; n < COLUMNS; n++)
      b[k][n] = static_cast<double>(b_transposed[k / TILE][n * TILE + k % TILE]);

  for (unsigned row = 0; row < ROWS; row++) {
    const unsigned first_word = row / TILE, first_lane = row % TILE * 4;
    double sums[COLUMNS];
    for (unsigned c = 0; c < 4; c++) {
      const float* from = static_cast<const MultiplyArgument*>(arguments[first_lane + c])->accumulator;
      sums[2 * c] = static_cast<double>(from[2 * first_word]);
      sums[2 * c + 1] = static_cast<double>(from[2 * first_word + 1]);
    }
    for (unsigned k = 0; k < DEPTH; k++) {
      const double factor =
          static_cast<double>(a[first_word + 2 * (k / TILE)][row % TILE * TILE + k % TILE]);
      for (unsigned n = 0; n < COLUMNS; n++) sums[n] += factor * b[k][n];
    }
    for (unsigned c = 0; c < 4; c++) {
      float* to = static_cast<const MultiplyArgument*>(arguments[first_lane + c])->accumulator;
      to[2 * first_word] = static_cast<float>(sums[2 * c]);
      to[2 * first_word + 1] = static_cast<float>(sums[2 * c + 1]);
    }
  }
}

// The fragment word of one lane, from a matrix of 8 rows of 8 halves.
uint32_t fragment_word(const uint16_t (&matrix)[TILE][TILE], unsigned lane, bool transposed) {
  const unsigned row = lane / 4, column = lane % 4 * 2;
  const uint32_t low = transposed ? matrix[column][row] : matrix[row][column];
  const uint32_t high = transposed ? matrix[column + 1][row] : matrix[row][column + 1];
  return low | (high << 16);
}

void run_transpose(uint32_t, void* const* arguments) {
  uint16_t matrix[TILE][TILE];
  for (unsigned lane = 0; lane < WARP_LANES; lane++)
    memcpy(&matrix[lane / 4][lane % 4 * 2], arguments[lane], sizeof(uint32_t));
  for (unsigned lane = 0; lane < WARP_LANES; lane++)
    *static_cast<uint32_t*>(arguments[lane]) = fragment_word(matrix, lane, true);
}

struct LoadArgument {
  uint32_t* fragments;
  const void* row;
};

// Lanes 8i .. 8i + 7 give the rows of matrix i.
template <bool TRANSPOSED>
void run_load(uint32_t, void* const* arguments) {
  for (unsigned i = 0; i < 4; i++) {
    uint16_t matrix[TILE][TILE];
    for (unsigned row = 0; row < TILE; row++)
      memcpy(matrix[row], static_cast<const LoadArgument*>(arguments[i * TILE + row])->row,
             sizeof(matrix[row]));
    for (unsigned lane = 0; lane < WARP_LANES; lane++)
      static_cast<const LoadArgument*>(arguments[lane])->fragments[i] =
          fragment_word(matrix, lane, TRANSPOSED);
  }
}

// In the order of Half.
const Collective MULTIPLY[] = {{"mma.m16n8k16.f16", run_multiply<half_to_float>},
                               {"mma.m16n8k16.bf16", run_multiply<bfloat_to_float>}};
const Collective TRANSPOSE = {"movmatrix.trans", run_transpose};
const Collective LOAD = {"ldmatrix.x4", run_load<false>};
const Collective LOAD_TRANSPOSED = {"ldmatrix.x4.trans", run_load<true>};

// Matrix instructions are for whole warps: exited lanes leave their operands undefined.
void meet_whole_warp(const Collective& collective, void* argument) {
  const uint32_t alive = running().warp->alive;
  if (alive != ALL_LANES)
    fault(FaultKind::warp_mismatch, "%s needs all 32 lanes of the warp, but only 0x%08x have not exited",
          collective.name, alive);
  meet(ALL_LANES, collective, argument);
}

}  // namespace

void matrix_multiply(Half format, float* accumulator, const uint32_t* a, const uint32_t* b) {
  CUPAGED_NOTE_SITE();
  MultiplyArgument argument{accumulator, a, b};
  meet_whole_warp(MULTIPLY[static_cast<int>(format)], &argument);
}

uint32_t matrix_transpose(uint32_t fragment) {
  CUPAGED_NOTE_SITE();
  meet_whole_warp(TRANSPOSE, &fragment);
  return fragment;
}

void load_matrix_x4(uint32_t* fragments, const void* row, bool transposed) {
  CUPAGED_NOTE_SITE();
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0)
    fault(FaultKind::misaligned, "ldmatrix: row address %p is not 16-byte aligned", row);
  note_access(row, 16, Access::read);
  LoadArgument argument{fragments, row};
  meet_whole_warp(transposed ? LOAD_TRANSPOSED : LOAD, &argument);
}

}  // namespace cupaged_emulator
