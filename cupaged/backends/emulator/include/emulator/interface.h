// What compiled kernels and the runtime library know about each other.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "vector_types.h"

#define CUPAGED_EMULATOR_API __attribute__((visibility("default")))

namespace cupaged_emulator {

// One block, as its threads see it.
struct BlockView {
  uint3 block_index;
  dim3 block_dim;
  dim3 grid_dim;
  unsigned char* dynamic_shared;  // 128-byte aligned
  size_t dynamic_shared_bytes;
};

// One CUDA thread, as it sees itself.
struct ThreadView {
  uint3 thread_index;
  unsigned lane;  // in its warp
  const BlockView* block;
};

// The thread that this OS thread runs now. A CUDA thread never moves to another OS thread.
// __thread and not thread_local: the latter would call an initialiser on every use.
extern CUPAGED_EMULATOR_API __thread ThreadView* current __attribute__((tls_model("initial-exec")));

// What threads ask about themselves.
#ifdef CUPAGED_EMULATOR_CHECK
// Calls, because check mode would take loads of `current` for the kernel's own. The answers never change
// for a thread.
#define CUPAGED_OF_THREAD(TYPE, NAME, FIELD) CUPAGED_EMULATOR_API __attribute__((const)) TYPE NAME();
#else
#define CUPAGED_OF_THREAD(TYPE, NAME, FIELD) \
  inline TYPE NAME() { return current->FIELD; }
#endif
#define CUPAGED_OF_ALL_THREADS                              \
  CUPAGED_OF_THREAD(uint3, thread_index, thread_index)      \
  CUPAGED_OF_THREAD(unsigned, lane_of_thread, lane)         \
  CUPAGED_OF_THREAD(uint3, block_index, block->block_index) \
  CUPAGED_OF_THREAD(dim3, block_dim, block->block_dim)      \
  CUPAGED_OF_THREAD(dim3, grid_dim, block->grid_dim)        \
  CUPAGED_OF_THREAD(void*, dynamic_shared, block->dynamic_shared)
CUPAGED_OF_ALL_THREADS
#undef CUPAGED_OF_THREAD

// ---- collectives: return when every thread concerned has arrived

enum class Shuffle { indexed, up, down, exchange };
enum class Vote { ballot, any, all };
enum class BarrierVote { none, any, all, count };

CUPAGED_EMULATOR_API void warp_sync(uint32_t mask);
// `source` is a lane of the caller's warp; a source that takes no part gives all ones.
CUPAGED_EMULATOR_API uint64_t warp_shuffle(Shuffle kind, uint32_t mask, uint64_t value, unsigned source);
CUPAGED_EMULATOR_API uint32_t warp_vote(Vote kind, uint32_t mask, bool predicate);
// Lanes of the caller's warp that are running or can run without waiting for the caller.
CUPAGED_EMULATOR_API uint32_t active_lanes();
// The number of threads whose predicate holds (any, all: 0 or 1).
CUPAGED_EMULATOR_API int block_barrier(BarrierVote kind, bool predicate);

// ---- warp-wide matrix instructions, all 32 lanes

enum class Half { f16, bf16 };

// accumulator (4 floats), a (4 words), b (2 words): fragments of m16n8k16.
CUPAGED_EMULATOR_API void matrix_multiply(Half format, float* accumulator, const uint32_t* a,
                                          const uint32_t* b);
CUPAGED_EMULATOR_API uint32_t matrix_transpose(uint32_t fragment);
CUPAGED_EMULATOR_API void load_matrix_x4(uint32_t* fragments, const void* row, bool transposed);

// ---- asynchronous copies

CUPAGED_EMULATOR_API void copy_async(void* shared, const void* global, unsigned bytes);
CUPAGED_EMULATOR_API void copy_async_commit();
CUPAGED_EMULATOR_API void copy_async_wait(unsigned pending_groups);
// Arrives at the barrier when the thread's copies so far have landed.
CUPAGED_EMULATOR_API void copy_async_arrive(uint64_t* barrier);

CUPAGED_EMULATOR_API void mbarrier_init(uint64_t* barrier, uint32_t arrivals);
CUPAGED_EMULATOR_API void mbarrier_arrive(uint64_t* barrier, uint32_t expected_bytes);
CUPAGED_EMULATOR_API bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity);
CUPAGED_EMULATOR_API void bulk_copy(void* shared, const void* global, uint32_t bytes, uint64_t* barrier);

// Nothing moves; in check mode the bytes must belong to the launch.
CUPAGED_EMULATOR_API void prefetch(const void* global);
CUPAGED_EMULATOR_API void prefetch_bulk(const void* global, uint32_t bytes);

// ---- scheduling

// Let other threads run, now or at the next such call. `what` and `address` name the instruction in
// reports. `progress`: memory was changed; launches in which nothing but such calls without progress
// happens are stopped.
CUPAGED_EMULATOR_API void yield(const char* what, const void* address, bool progress);
CUPAGED_EMULATOR_API uint64_t clock_ticks();
// Stops the launch with a report about the calling thread.
[[noreturn]] CUPAGED_EMULATOR_API void trap(const char* what);

}  // namespace cupaged_emulator
