// Events that order memory, as the runtime sees them. Nothing in fast mode; check mode keeps its
// happens-before relation by them.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "../include/emulator/hooks.h"

namespace cupaged_emulator {

struct Block;
struct Fiber;
struct Warp;
struct BulkCopy;
struct CopyArrival;
struct LaunchRequest;

namespace order {

#ifdef CUPAGED_EMULATOR_CHECK
// Around a launch; waits until no other launch is being checked.
class LaunchScope {
 public:
  explicit LaunchScope(const LaunchRequest& request);
  ~LaunchScope();
};
void block_created(Block& block);
void block_started(Block& block);
// Every thread alive has arrived at __syncthreads.
void barrier_released(Block& block);
// These lanes met in __syncwarp (other collectives order no memory).
void lanes_synchronised(Warp& warp, uint32_t lanes);
// cp.async: the copy's target is unusable from here until its group has been waited for.
void copy_issued(Fiber& fiber, const void* shared, const void* global, size_t bytes);
void copies_committed(Fiber& fiber);
void copies_waited_for(Fiber& fiber, unsigned allowed);
// A phase of an mbarrier orders arrivals and copies before those that wait for it.
void mbarrier_initialised(Fiber& fiber, uint64_t* barrier);
void mbarrier_arrived(Fiber& fiber, const uint64_t* barrier);
// A thread's cp.async copies so far are to arrive at the barrier; returns the time of it.
uint32_t copy_arrival_issued(Fiber& fiber, const uint64_t* barrier);
// Their arrivals: these order the copies, but nothing else that the issuing threads did.
void copies_arrived(Block& block, const uint64_t* barrier, const CopyArrival* arrivals, size_t count);
void bulk_copy_issued(Fiber& fiber, const BulkCopy& copy);
void mbarrier_completed(Block& block, const uint64_t* barrier);
void mbarrier_waited_for(Fiber& fiber, const uint64_t* barrier);
#else
struct LaunchScope {
  explicit LaunchScope(const LaunchRequest&) {}
};
inline void block_created(Block&) {}
inline void block_started(Block&) {}
inline void barrier_released(Block&) {}
inline void lanes_synchronised(Warp&, uint32_t) {}
inline void copy_issued(Fiber&, const void*, const void*, size_t) {}
inline void copies_committed(Fiber&) {}
inline void copies_waited_for(Fiber&, unsigned) {}
inline void mbarrier_initialised(Fiber&, uint64_t*) {}
inline void mbarrier_arrived(Fiber&, const uint64_t*) {}
inline uint32_t copy_arrival_issued(Fiber&, const uint64_t*) { return 0; }
inline void copies_arrived(Block&, const uint64_t*, const CopyArrival*, size_t) {}
inline void bulk_copy_issued(Fiber&, const BulkCopy&) {}
inline void mbarrier_completed(Block&, const uint64_t*) {}
inline void mbarrier_waited_for(Fiber&, const uint64_t*) {}
#endif

}  // namespace order
}  // namespace cupaged_emulator
