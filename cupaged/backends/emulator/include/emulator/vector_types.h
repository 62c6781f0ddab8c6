// CUDA's vector types with CUDA's alignments, and their make_ functions.
#pragma once

#define CUPAGED_VECTOR_TYPES(NAME, ELEMENT, ALIGN1, ALIGN2, ALIGN3, ALIGN4)            \
  struct alignas(ALIGN1) NAME##1 { ELEMENT x; };                                       \
  struct alignas(ALIGN2) NAME##2 { ELEMENT x, y; };                                    \
  struct alignas(ALIGN3) NAME##3 { ELEMENT x, y, z; };                                 \
  struct alignas(ALIGN4) NAME##4 { ELEMENT x, y, z, w; };                              \
  inline NAME##1 make_##NAME##1(ELEMENT x) { return {x}; }                             \
  inline NAME##2 make_##NAME##2(ELEMENT x, ELEMENT y) { return {x, y}; }               \
  inline NAME##3 make_##NAME##3(ELEMENT x, ELEMENT y, ELEMENT z) { return {x, y, z}; } \
  inline NAME##4 make_##NAME##4(ELEMENT x, ELEMENT y, ELEMENT z, ELEMENT w) { return {x, y, z, w}; }

CUPAGED_VECTOR_TYPES(char, signed char, 1, 2, 1, 4)
CUPAGED_VECTOR_TYPES(uchar, unsigned char, 1, 2, 1, 4)
CUPAGED_VECTOR_TYPES(short, short, 2, 4, 2, 8)
CUPAGED_VECTOR_TYPES(ushort, unsigned short, 2, 4, 2, 8)
CUPAGED_VECTOR_TYPES(int, int, 4, 8, 4, 16)
CUPAGED_VECTOR_TYPES(uint, unsigned int, 4, 8, 4, 16)
CUPAGED_VECTOR_TYPES(float, float, 4, 8, 4, 16)
CUPAGED_VECTOR_TYPES(longlong, long long, 8, 16, 8, 16)
CUPAGED_VECTOR_TYPES(ulonglong, unsigned long long, 8, 16, 8, 16)
CUPAGED_VECTOR_TYPES(double, double, 8, 16, 8, 16)
#undef CUPAGED_VECTOR_TYPES

struct dim3 {
  unsigned int x, y, z;
  constexpr dim3(unsigned int x = 1, unsigned int y = 1, unsigned int z = 1) : x(x), y(y), z(z) {}
};
