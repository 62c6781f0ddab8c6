// Fixed-width names used by every kernel. They are also what the host reads parameter kinds from:
// a kernel parameter is a pointer, or one of u32, i32, u64, i64, float.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

// BF16 values travel as raw 16-bit patterns: the kernels use no toolkit header.
typedef u16 bf16_bits;
