"""Cache formats on the host: encoding, decoding, layouts, and paged reads and writes.

Everything here is NumPy and ml_dtypes, agrees byte for byte with the device writers, and needs no GPU.
"""

from cupaged.formats.bf16 import as_float32, decode_bf16, encode_bf16
from cupaged.formats.fp8 import E4M3_MAX, checked_scale, checked_scales, decode_e4m3, encode_e4m3
from cupaged.formats.layout import (
    BF16,
    FORMATS,
    FP8,
    NVFP4,
    CacheFormat,
    CacheLayout,
    ElementStrides,
    cache_format,
    paged_strides,
    scratch_strides,
)
from cupaged.formats.nvfp4 import (
    E2M1_MAX,
    NVFP4_GROUP,
    decode_e2m1,
    dequantize_nvfp4,
    encode_e2m1,
    pack_nibbles,
    quantize_nvfp4,
    unpack_nibbles,
)
from cupaged.formats.paging import block_sections, gather_tokens, pool_num_blocks, write_tokens

__all__ = [
    "BF16",
    "E2M1_MAX",
    "E4M3_MAX",
    "FORMATS",
    "FP8",
    "NVFP4",
    "NVFP4_GROUP",
    "CacheFormat",
    "CacheLayout",
    "ElementStrides",
    "as_float32",
    "block_sections",
    "cache_format",
    "checked_scale",
    "checked_scales",
    "decode_bf16",
    "decode_e2m1",
    "decode_e4m3",
    "dequantize_nvfp4",
    "encode_bf16",
    "encode_e2m1",
    "encode_e4m3",
    "gather_tokens",
    "pack_nibbles",
    "paged_strides",
    "pool_num_blocks",
    "quantize_nvfp4",
    "scratch_strides",
    "unpack_nibbles",
    "write_tokens",
]
