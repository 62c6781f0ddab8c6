// Thin wrappers over the PTX instructions that the kernels use. They take pointers, never u32 shared
// addresses, so that the CPU emulator can give each a body of its own (same names, same namespace).
#pragma once
#include "platform.cuh"

#ifdef CUPAGED_EMULATOR
#include "cupaged_emulator_ptx.h"
#else

namespace ptx {

DEVICE u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// ---- integer and half-precision arithmetic ------------------------------------------------------

// Byte permute: result byte i is byte (selector >> 4i) & 7 of the eight bytes {b, a}.
DEVICE u32 prmt(u32 a, u32 b, u32 selector) {
  u32 result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
}

// (a & mask) | (b & ~mask) in one instruction.
DEVICE u32 bit_select(u32 a, u32 b, u32 mask) {
  u32 result;
  asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(result) : "r"(a), "r"(b), "r"(mask));
  return result;
}

DEVICE u32 mul_f16x2(u32 a, u32 b) {
  u32 result;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// Two floats to f16x2, round to nearest even; `low` in the low half.
DEVICE u32 pack_f16x2(float low, float high) {
  u32 result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

// Two floats to bf16x2, round to nearest even; `low` in the low half.
DEVICE u32 pack_bf16x2(float low, float high) {
  u32 result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

#if __CUDA_ARCH__ >= 860
#define CUPAGED_HARDWARE_MAGNITUDES 1
// Halves with the larger magnitude of a and b and the product of their signs; a NaN in either is a NaN.
DEVICE u32 max_magnitude_bf16x2(u32 a, u32 b) {
  u32 result;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// The same with the smaller magnitude.
DEVICE u32 min_magnitude_bf16x2(u32 a, u32 b) {
  u32 result;
  asm("min.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// The same for f16x2.
DEVICE u32 min_magnitude_f16x2(u32 a, u32 b) {
  u32 result;
  asm("min.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
#endif

#if __CUDA_ARCH__ >= 890
#define CUPAGED_HARDWARE_E4M3 1
// Four floats to E4M3, the first in the lowest byte: round to nearest even, saturating; NaN becomes
// 0x7F.
DEVICE u32 floats_to_e4m3x4(float a, float b, float c, float d) {
  u32 result;
  asm("{ .reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high}; }"
      : "=r"(result)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return result;
}

// Two E4M3 codes to f16x2 (exact); the low byte becomes the low half.
DEVICE u32 e4m3x2_to_f16x2(u32 codes) {
  u32 result;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(static_cast<u16>(codes)));
  return result;
}
#endif

// 2^x, about 2 ulp, subnormal results flushed to zero.
DEVICE float exp2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// log2(x), within 2^-22 absolutely; -inf for 0.
DEVICE float log2_approx(float x) {
  float result;
  asm("lg2.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 1 / x within 1 ulp.
DEVICE float reciprocal_approx(float x) {
  float result;
  asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// ---- tensor cores and matrix loads --------------------------------------------------------------

// c[16 x 8] += a[16 x 16] * b[16 x 8]; fragments as the PTX manual lays them out.
DEVICE void mma_m16n8k16_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

DEVICE void mma_m16n8k16_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Transpose an 8 x 8 matrix of 16-bit values held one row a quad, in fragment layout.
DEVICE u32 movmatrix_trans(u32 fragment) {
  u32 result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(fragment));
  return result;
}

DEVICE void ldmatrix_x4(u32 (&r)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared_row))
               : "memory");
}

DEVICE void ldmatrix_x4_trans(u32 (&r)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared_row))
               : "memory");
}

// ---- asynchronous copies ------------------------------------------------------------------------

// 16 bytes global to shared, both 16-byte aligned, bypassing L1.
DEVICE void cp_async_16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global)
               : "memory");
}

// BYTES is 4 or 8: for scale rows too short for cp_async_16.
template <int BYTES>
DEVICE void cp_async_small(void* shared, const void* global) {
  static_assert(BYTES == 4 || BYTES == 8, "cp.async copies 4, 8 or 16 bytes");
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(shared)), "l"(global),
               "n"(BYTES)
               : "memory");
}

DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most PENDING of this thread's most recent groups are in flight.
template <int PENDING>
DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- mbarriers, and copies that complete on them --------------------------------------------------

DEVICE void mbarrier_init(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

// Makes mbarrier_init visible to the copy engine, where there is one; the block still needs a
// __syncthreads.
DEVICE void mbarrier_init_fence() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

DEVICE void mbarrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// True once the phase of the given parity has completed. From sm_90 on the thread may sleep meanwhile.
DEVICE bool mbarrier_try_wait_parity(u64* barrier, u32 parity) {
#if __CUDA_ARCH__ >= 900
#define CUPAGED_MBARRIER_WAIT "mbarrier.try_wait.parity"
#else
#define CUPAGED_MBARRIER_WAIT "mbarrier.test_wait.parity"
#endif
  u32 done;
  asm volatile("{ .reg .pred p; " CUPAGED_MBARRIER_WAIT
               ".shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
#undef CUPAGED_MBARRIER_WAIT
  return done != 0;
}

DEVICE void mbarrier_wait_parity(u64* barrier, u32 parity) {
  while (!mbarrier_try_wait_parity(barrier, parity)) {}
}

// Arrives once all cp.async copies that this thread has issued so far have landed, whatever their
// groups. It is one of the arrivals that mbarrier_init counted. Who waits for the phase sees the copies,
// but not what the thread wrote by itself: that takes an mbarrier_arrive.
DEVICE void cp_async_mbarrier_arrive_noinc(u64* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

#if __CUDA_ARCH__ >= 900
// Arrive once and add `bytes` to what the current phase still waits for.
DEVICE void mbarrier_arrive_expect_tx(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

// One-dimensional bulk copy global to shared; completes `bytes` on the barrier. Source and size must
// be multiples of 16 bytes; keep the destination 128-byte aligned (a misaligned one is 15 to 19 %
// slower).
DEVICE void bulk_copy(void* shared, const void* global, u32 bytes, u64* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// The same for data that is read once: it leaves L2 first.
DEVICE void bulk_copy_evict_first(void* shared, const void* global, u32 bytes, u64* barrier) {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Fetches global memory into L2. Address and size must be multiples of 16 bytes.
DEVICE void bulk_prefetch_l2(const void* global, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

#else
// Named by code that is compiled for every architecture; the registry asks for them only where they
// exist.
DEVICE void mbarrier_arrive_expect_tx(u64* barrier, u32 bytes) {}
DEVICE void bulk_copy_evict_first(void* shared, const void* global, u32 bytes, u64* barrier) {}
#endif

// Programmatic dependent launch: wait for the kernel before / let the kernel after start. Before sm_90 a
// kernel starts when the one before has ended.
DEVICE void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void grid_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- ordering between blocks --------------------------------------------------------------------

DEVICE u32 load_acquire(const u32* pointer) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
  return value;
}

// Atomic, but orders nothing else.
DEVICE u32 load_relaxed(const u32* pointer) {
  u32 value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
  return value;
}

DEVICE void store_release(u32* pointer, u32 value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}

DEVICE u32 atomic_add_acq_rel(u32* pointer, u32 value) {
  u32 old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(pointer), "r"(value)
               : "memory");
  return old;
}

// Counts 0, 1, ..., limit, 0, ...: the last of limit + 1 arrivals leaves the counter at zero.
DEVICE u32 atomic_inc_acq_rel(u32* pointer, u32 limit) {
  u32 old;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(pointer), "r"(limit)
               : "memory");
  return old;
}

// ---- loads with cache hints -----------------------------------------------------------------------

// Read-only 16 bytes that will not be used again: keep them out of L1.
DEVICE uint4 load_streaming_16(const void* pointer) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer));
  return v;
}

// Read-only 16 bytes, asked for where it is written: the compiler does not move it behind a branch.
DEVICE uint4 load_now_16(const void* pointer) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer));
  return v;
}

// Fetches the cache line of a global address into L2.
DEVICE void prefetch_l2(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

// Returns after that many clock cycles.
DEVICE void delay_cycles(u32 cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
}

// Called inside a spin on global memory. A GPU needs no pause; the emulator runs another thread here.
DEVICE void spin_pause() {}

}  // namespace ptx
#endif
