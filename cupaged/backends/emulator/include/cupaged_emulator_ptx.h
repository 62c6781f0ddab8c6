// Bodies for the wrappers of kernels/ptx.cuh: same names, same namespace. Included by that file, after
// platform.cuh. Hardware E4M3 conversion and comparison of magnitudes are left out, so that kernels use
// their own software paths.
#pragma once
#include "emulator/half.h"
#include "emulator/hooks.h"

namespace ptx {

// ---- integer and half-precision arithmetic

DEVICE u32 prmt(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
DEVICE u32 bit_select(u32 a, u32 b, u32 mask) { return (a & mask) | (b & ~mask); }

DEVICE u32 mul_f16x2(u32 a, u32 b) {
  using namespace cupaged_emulator;
  const u16 low = float_to_half(half_to_float(static_cast<u16>(a)) * half_to_float(static_cast<u16>(b)));
  const u16 high =
      float_to_half(half_to_float(static_cast<u16>(a >> 16)) * half_to_float(static_cast<u16>(b >> 16)));
  return low | (static_cast<u32>(high) << 16);
}

DEVICE u32 pack_f16x2(float low, float high) {
  return cupaged_emulator::float_to_half(low) |
         (static_cast<u32>(cupaged_emulator::float_to_half(high)) << 16);
}

DEVICE u32 pack_bf16x2(float low, float high) {
  return cupaged_emulator::float_to_bfloat(low) |
         (static_cast<u32>(cupaged_emulator::float_to_bfloat(high)) << 16);
}

DEVICE float log2_approx(float x) { return __builtin_log2f(x); }
DEVICE float reciprocal_approx(float x) { return 1.0f / x; }
// Below 2^-126 the device flushes to zero.
DEVICE float exp2_approx(float x) { return x < -126.0f ? 0.0f : __builtin_exp2f(x); }

// ---- tensor cores and matrix loads

DEVICE void mma_m16n8k16_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const u32 a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  cupaged_emulator::matrix_multiply(cupaged_emulator::Half::f16, c, a, b);
}

DEVICE void mma_m16n8k16_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const u32 a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  cupaged_emulator::matrix_multiply(cupaged_emulator::Half::bf16, c, a, b);
}

DEVICE u32 movmatrix_trans(u32 fragment) { return cupaged_emulator::matrix_transpose(fragment); }

DEVICE void ldmatrix_x4(u32 (&r)[4], const void* shared_row) {
  cupaged_emulator::load_matrix_x4(r, shared_row, false);
}
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], const void* shared_row) {
  cupaged_emulator::load_matrix_x4(r, shared_row, true);
}

// ---- asynchronous copies

DEVICE void cp_async_16(void* shared, const void* global) {
  cupaged_emulator::copy_async(shared, global, 16);
}
template <int BYTES>
DEVICE void cp_async_small(void* shared, const void* global) {
  static_assert(BYTES == 4 || BYTES == 8, "cp.async copies 4, 8 or 16 bytes");
  cupaged_emulator::copy_async(shared, global, BYTES);
}
DEVICE void cp_async_commit() { cupaged_emulator::copy_async_commit(); }
template <int PENDING>
DEVICE void cp_async_wait() {
  cupaged_emulator::copy_async_wait(PENDING);
}

DEVICE uint64_t* mbarrier_word(u64* barrier) { return reinterpret_cast<uint64_t*>(barrier); }

DEVICE void mbarrier_init(u64* barrier, u32 arrivals) {
  cupaged_emulator::mbarrier_init(mbarrier_word(barrier), arrivals);
}
DEVICE void mbarrier_init_fence() { cupaged_emulator::note_fence(cupaged_emulator::Scope::block); }
DEVICE void mbarrier_arrive(u64* barrier) {
  cupaged_emulator::mbarrier_arrive(mbarrier_word(barrier), 0);
}
DEVICE void cp_async_mbarrier_arrive_noinc(u64* barrier) {
  cupaged_emulator::copy_async_arrive(mbarrier_word(barrier));
}
DEVICE void mbarrier_arrive_expect_tx(u64* barrier, u32 bytes) {
  cupaged_emulator::mbarrier_arrive(mbarrier_word(barrier), bytes);
}
DEVICE bool mbarrier_try_wait_parity(u64* barrier, u32 parity) {
  return cupaged_emulator::mbarrier_try_wait(mbarrier_word(barrier), parity);
}
DEVICE void mbarrier_wait_parity(u64* barrier, u32 parity) {
  while (!mbarrier_try_wait_parity(barrier, parity)) {}
}
DEVICE void bulk_copy(void* shared, const void* global, u32 bytes, u64* barrier) {
  cupaged_emulator::bulk_copy(shared, global, bytes, mbarrier_word(barrier));
}
DEVICE void bulk_copy_evict_first(void* shared, const void* global, u32 bytes, u64* barrier) {
  bulk_copy(shared, global, bytes, barrier);
}

DEVICE void bulk_prefetch_l2(const void* global, u32 bytes) {
  cupaged_emulator::prefetch_bulk(global, bytes);
}

// Launches run one after another.
DEVICE void grid_dependency_wait() {}
DEVICE void grid_launch_dependents() {}

// ---- ordering between blocks

DEVICE u32 load_acquire(const u32* pointer) {
  using namespace cupaged_emulator;
  yield("load_acquire", pointer, false);
  note_atomic(pointer, sizeof(u32), Access::atomic_read, Order::acquire);
  return __atomic_load_n(pointer, __ATOMIC_ACQUIRE);
}

DEVICE u32 load_relaxed(const u32* pointer) {
  using namespace cupaged_emulator;
  yield("load_relaxed", pointer, false);
  note_atomic(pointer, sizeof(u32), Access::atomic_read, Order::relaxed);
  return __atomic_load_n(pointer, __ATOMIC_RELAXED);
}

DEVICE void store_release(u32* pointer, u32 value) {
  using namespace cupaged_emulator;
  note_atomic(pointer, sizeof(u32), Access::atomic_write, Order::release);
  __atomic_store_n(pointer, value, __ATOMIC_RELEASE);
  yield("store_release", pointer, true);
}

DEVICE u32 atomic_add_acq_rel(u32* pointer, u32 value) {
  using namespace cupaged_emulator;
  return read_modify_write("atomic_add_acq_rel", pointer, Order::acquire_release,
                           [=](u32 old) { return old + value; });
}

DEVICE u32 atomic_inc_acq_rel(u32* pointer, u32 limit) {
  using namespace cupaged_emulator;
  return read_modify_write("atomic_inc_acq_rel", pointer, Order::acquire_release,
                           [=](u32 old) { return old >= limit ? 0u : old + 1u; });
}

// ---- loads with cache hints

DEVICE uint4 load_streaming_16(const void* pointer) { return *static_cast<const uint4*>(pointer); }
DEVICE uint4 load_now_16(const void* pointer) { return *static_cast<const uint4*>(pointer); }

// Moves nothing; check mode sees that the address is one of the launch's.
DEVICE void prefetch_l2(const void* global) { cupaged_emulator::prefetch(global); }

// A delay tunes when a GPU's requests go out; there is nothing to tune here.
DEVICE void delay_cycles(u32 cycles) { static_cast<void>(cycles); }

DEVICE void spin_pause() { cupaged_emulator::yield("spin_pause", nullptr, false); }

}  // namespace ptx
