// Where a token's row lies in a pool of blocks. All strides in bytes, all offsets 64-bit: pools beyond
// 2^32 bytes are normal.
#pragma once
#include "attention/fragments.cuh"

struct PoolGeometry {
  u64 block_stride;   // between blocks
  u64 token_stride;   // between tokens of a block
  u64 head_stride;    // between KV heads of a token
  u64 scale_section;  // from a block's start to its scales (formats that have them)
  u64 scale_token_stride;
  u64 scale_head_stride;
};

// NVFP4: data section [block_size, num_kv_heads, row], then scales [block_size, num_kv_heads, scale
// row].
DEVICE PoolGeometry sectioned_geometry(u64 block_stride, u64 data_section, u32 num_kv_heads,
                                       u32 row_bytes, u32 scale_bytes) {
  return {block_stride, static_cast<u64>(num_kv_heads) * row_bytes,   row_bytes,
          data_section, static_cast<u64>(num_kv_heads) * scale_bytes, scale_bytes};
}

// Offset of a row's data and scales within the block that holds it.
DEVICE u64 data_offset(const PoolGeometry& geometry, u32 token_in_block, u32 head) {
  return token_in_block * geometry.token_stride + head * geometry.head_stride;
}
DEVICE u64 scale_offset(const PoolGeometry& geometry, u32 token_in_block, u32 head) {
  return geometry.scale_section + token_in_block * geometry.scale_token_stride +
         head * geometry.scale_head_stride;
}
