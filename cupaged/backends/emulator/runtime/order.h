// Events that order memory, as the runtime sees them. Nothing in fast mode; check mode keeps its
// happens-before relation by them (compile the runtime with CUPAGED_EMULATOR_CHECK and give them
// bodies).
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "../include/emulator/hooks.h"

namespace cupaged_emulator {

struct Block;
struct Fiber;
struct Warp;
struct BulkCopy;

namespace order {

#ifdef CUPAGED_EMULATOR_CHECK
void block_started(Block& block);
void block_finished(Block& block);
void thread_started(Fiber& fiber);
void thread_finished(Fiber& fiber);
// Every thread alive has arrived at __syncthreads.
void barrier_released(Block& block);
// These lanes met in __syncwarp (other collectives order no memory).
void lanes_synchronised(Warp& warp, uint32_t lanes);
// A copy of `fiber` begins (its target is unusable from here) and has ended.
void copy_issued(Fiber& fiber, void* shared, const void* global, size_t bytes);
void copy_landed(Fiber& issuer, void* shared, size_t bytes);
// An mbarrier's phase completed; the copies of this phase have landed.
void mbarrier_completed(Block& block, const uint64_t* barrier);
#else
inline void block_started(Block&) {}
inline void block_finished(Block&) {}
inline void thread_started(Fiber&) {}
inline void thread_finished(Fiber&) {}
inline void barrier_released(Block&) {}
inline void lanes_synchronised(Warp&, uint32_t) {}
inline void copy_issued(Fiber&, void*, const void*, size_t) {}
inline void copy_landed(Fiber&, void*, size_t) {}
inline void mbarrier_completed(Block&, const uint64_t*) {}
#endif

}  // namespace order
}  // namespace cupaged_emulator
