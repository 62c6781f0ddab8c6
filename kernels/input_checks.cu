// Checked mode (cupaged/checked.py): kernels that look for values a decode kernel or a writer must not
// be given. Each lowers *first to the smallest flat index at which its rule is broken; a thread that
// finds nothing touches nothing.
#include "cache/geometry.cuh"
#include "numeric/f32.cuh"

constexpr u32 CHECK_THREADS = 256;

// The threads of a launch share the indices 0, 1, 2, ...
DEVICE u64 first_index() { return static_cast<u64>(blockIdx.x) * CHECK_THREADS + threadIdx.x; }
DEVICE u64 index_step() { return static_cast<u64>(gridDim.x) * CHECK_THREADS; }

DEVICE void report(i64* first, u64 index) { atomicMin(first, static_cast<i64>(index)); }

// Columns [begin, end) of a table's row that a sequence of this length looks up. A bad length is another
// check's to report: here it looks up nothing beyond the table.
struct Columns {
  u32 begin, end;

  static DEVICE Columns of(i32 length, u32 width, u32 block_size, u32 sliding_window) {
    const u64 tokens = length > 0 ? static_cast<u64>(length) : 0u;
    const u64 needed = (tokens + block_size - 1) / block_size;
    const u64 left_out = sliding_window > 0 && tokens > sliding_window ? tokens - sliding_window : 0u;
    const u32 end = static_cast<u32>(needed < width ? needed : width);
    return {min(static_cast<u32>(left_out / block_size), end), end};
  }
};

// values[i] in [low, high], for i < count.
extern "C" __global__ void __launch_bounds__(256)
    input_range(const i32* values, i64* first, u32 count, i32 low, i32 high) {
  for (u64 i = first_index(); i < count; i += index_step())
    if (values[i] < low || values[i] > high) report(first, i);
}

// Slots below num_slots; negative ones are skipped by the writers, and right.
extern "C" __global__ void __launch_bounds__(256)
    input_slots(const i64* slots, i64* first, u32 num_tokens, u64 num_slots) {
  for (u64 i = first_index(); i < num_tokens; i += index_step())
    if (slots[i] >= 0 && static_cast<u64>(slots[i]) >= num_slots) report(first, i);
}

// Block ids below num_blocks in the columns that are looked up; tables [num_seqs, width], rows
// table_stride entries apart.
extern "C" __global__ void __launch_bounds__(256)
    input_blocks(const i32* tables, const i32* seq_lens, i64* first, u32 num_seqs, u32 width,
                 u32 table_stride, u32 block_size, u32 sliding_window, u32 num_blocks) {
  for (u64 seq = blockIdx.x; seq < num_seqs; seq += gridDim.x) {
    const Columns columns = Columns::of(seq_lens[seq], width, block_size, sliding_window);
    const i32* row = tables + seq * table_stride;
    for (u64 column = columns.begin + threadIdx.x; column < columns.end; column += CHECK_THREADS)
      if (static_cast<u32>(row[column]) >= num_blocks) report(first, seq * width + column);
  }
}

// 16-bit floats without NaN and infinities, whose exponents are all ones: rows of row_elems values,
// row_stride elements apart.
extern "C" __global__ void __launch_bounds__(256)
    input_finite(const u16* rows, i64* first, u32 num_rows, u32 row_elems, u64 row_stride,
                 u32 exponent) {
  for (u64 row = blockIdx.x; row < num_rows; row += gridDim.x)
    for (u64 i = threadIdx.x; i < row_elems; i += CHECK_THREADS)
      if ((rows[row * row_stride + i] & exponent) == exponent) report(first, row * row_elems + i);
}

// F32 scales that are finite and above zero.
extern "C" __global__ void __launch_bounds__(256)
    input_scales(const float* scales, i64* first, u32 count) {
  for (u64 i = first_index(); i < count; i += index_step())
    if (!(scales[i] > 0.0f && scales[i] <= FLOAT_MAX)) report(first, i);
}

// F32 scores of sinks: no NaN, no +infinity. -infinity is no sink, and allowed.
extern "C" __global__ void __launch_bounds__(256)
    input_sinks(const float* sinks, i64* first, u32 count) {
  for (u64 i = first_index(); i < count; i += index_step())
    if (!(sinks[i] <= FLOAT_MAX)) report(first, i);
}

// NVFP4 scale bytes of live tokens that are no NaN; `groups` of them a token and KV head. Index:
// [num_seqs, width * block_size, num_kv_heads, groups]. In a block the scales are [block_size,
// num_kv_heads, groups], or heads first. Blocks outside the pool are another check's to report.
extern "C" __global__ void __launch_bounds__(256)
    input_scale_bytes(const u8* pool, const i32* tables, const i32* seq_lens, i64* first, u32 num_seqs,
                      u32 width, u32 table_stride, u32 block_size, u32 sliding_window, u32 num_blocks,
                      u32 num_kv_heads, u32 groups, u32 heads_first, u64 block_stride,
                      u64 scale_section) {
  const u32 row_bytes = num_kv_heads * groups;
  for (u64 seq = blockIdx.x; seq < num_seqs; seq += gridDim.x) {
    const i64 length = seq_lens[seq];
    const Columns columns = Columns::of(static_cast<i32>(length), width, block_size, sliding_window);
    const u64 first_token =
        sliding_window > 0 && length > static_cast<i64>(sliding_window) ? length - sliding_window : 0u;
    const u64 capacity = static_cast<u64>(columns.end) * block_size;
    const u64 end = length <= 0 ? 0u : static_cast<u64>(length) < capacity ? length : capacity;
    for (u64 i = first_token * row_bytes + threadIdx.x; i < end * row_bytes; i += CHECK_THREADS) {
      const u64 token = i / row_bytes, in_block = token % block_size, in_row = i % row_bytes;
      const u32 block = static_cast<u32>(tables[seq * table_stride + token / block_size]);
      if (block >= num_blocks) continue;
      const u64 head = in_row / groups;
      const u64 at = heads_first != 0u ? (head * block_size + in_block) * groups + in_row % groups
                                       : in_block * row_bytes + in_row;
      const u8 scale = pool[block * block_stride + scale_section + at];
      if ((scale & 0x7fu) == 0x7fu) report(first, seq * width * block_size * row_bytes + i);
    }
  }
}

// The bytes at an address, low ones first, for the message.
extern "C" __global__ void __launch_bounds__(256)
    input_value(const u8* data, i64* first, u32 num_bytes) {
  if (first_index() != 0) return;
  u64 value = 0;
  for (u32 i = 0; i < num_bytes; i++) value |= static_cast<u64>(data[i]) << (8 * i);
  *first = static_cast<i64>(value);
}
