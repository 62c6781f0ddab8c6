// The threads of a launch and which of them runs.
//
// Every CUDA thread is a fiber: it runs until it waits (in a collective, at a barrier, in a spin) and
// then continues the next one directly. What each lane of a warp does is kept in bit masks, so waking a
// warp costs one instruction. An OS thread (Worker) runs one block after another, or, in a cooperative
// launch, all blocks of the grid in turns.
#pragma once
#include <stdint.h>

#include <vector>

#include "../include/emulator/interface.h"
#include "async_copy.h"
#include "context_switch.h"
#include "report.h"
#include "shared_memory.h"
#include "stack_pool.h"
#ifdef CUPAGED_EMULATOR_CHECK
#include "check/state.h"
#endif

namespace cupaged_emulator {

constexpr unsigned WARP_LANES = 32;
constexpr unsigned MAX_BLOCK_THREADS = 1024;

struct Block;
struct Warp;

// A warp-wide operation. The last lane to arrive runs it for all: arguments[lane] is what each gave.
struct Collective {
  const char* name;
  void (*run)(uint32_t lanes, void* const* arguments);  // null: only a barrier
};

struct Fiber : ThreadView {
  Warp* warp = nullptr;
  Block* home = nullptr;
  bool started = false;
  Context context;
  Stack stack{nullptr, nullptr};
  // What a yielding thread spins on, for reports.
  const char* spin_name = nullptr;
  const void* spin_address = nullptr;
  // What it looked at last without waiting, and how often in a row it went on where others might have
  // run.
  const void* polled = nullptr;
  unsigned unyielded = 0;
  ThreadCopies copies;
#ifdef CUPAGED_EMULATOR_CHECK
  check::ThreadState check;
#endif

  uint32_t bit() const { return 1u << lane; }
};

// Lanes that met, or wait to meet, in one collective.
struct Meeting {
  uint32_t mask = 0;
  uint32_t arrived = 0;  // 0: free
  const Collective* collective = nullptr;
};

struct Warp {
  unsigned index = 0;
  uint32_t existing = 0;  // lanes that the block has
  uint32_t alive = 0;     // of those, not exited
  uint32_t ready = 0;
  uint32_t yielded = 0;  // ready again in the block's next turn
  uint32_t at_barrier = 0;
  Meeting whole;  // of all existing lanes: by far the most frequent
  Meeting parts[WARP_LANES];
  unsigned num_parts = 0;            // entries of `parts` in use, some of them free
  void* arguments[WARP_LANES] = {};  // a lane waits in one meeting at a time
};

struct BlockBarrier {
  unsigned arrived = 0;
  BarrierVote kind = BarrierVote::none;
  unsigned votes = 0;
  int result = 0;  // of the last completed one
};

struct Worker;

struct Block : BlockView {
  Worker* worker = nullptr;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  unsigned alive = 0;
  uint32_t ready_warps = 0;
  uint32_t yielded_warps = 0;
  unsigned current_warp = 0;
  BlockBarrier barrier;
  std::vector<BulkCopy> bulk_copies;        // in flight
  std::vector<CopyArrivals> copy_arrivals;  // by barrier
  DynamicShared dynamic;
  SharedImage image;  // static shared memory while another block runs (cooperative launches)
#ifdef CUPAGED_EMULATOR_CHECK
  check::BlockState check;
#endif

  // Makes the fibers; the same block object is started once for every block index.
  void create(Worker& owner, dim3 dim, dim3 grid, size_t dynamic_bytes);
  void start(uint3 index);
  void wake(Warp& warp, uint32_t lanes) {
    warp.ready |= lanes;
    ready_warps |= 1u << warp.index;
  }
  // Next fiber to run, taken out of the ready ones; null when the block's turn is over.
  Fiber* take_ready();
  // Makes yielded threads ready again; false where there are none.
  bool next_turn();
};

enum class Schedule : int { fifo = 0, reverse = 1, random = 2 };

// One OS thread's part in a launch.
struct Worker {
  void (*entry)(void* const*) = nullptr;
  void* const* parameters = nullptr;
  Schedule schedule = Schedule::fifo;
  uint64_t random_state = 1;
  StaticShared static_shared;
  StackSet stacks;
  Context main;
  Report report;
  uint64_t progress = 0;  // counts events without which a launch hangs

  explicit Worker(size_t stack_bytes) : stacks(stack_bytes) {}
  bool failed() const { return report.kind != FaultKind::none; }
  uint64_t random();
  bool coin() { return (random() >> 32) & 1u; }
  // Runs the block's ready threads until all wait, yielded or exited, or one of them failed.
  void run_turn(Block& block);
};

inline Fiber& running() { return *static_cast<Fiber*>(current); }

// In functions that kernels call: keeps the place of the call for reports.
#ifdef CUPAGED_EMULATOR_CHECK
#define CUPAGED_NOTE_SITE() (running().check.site = __builtin_return_address(0))
#else
#define CUPAGED_NOTE_SITE() static_cast<void>(0)
#endif

// The current fiber, whose state says why it waits, gives way to the next one.
void suspend(Fiber& self);
// As above, never to be continued: after a fault.
[[noreturn]] void abandon();
// Under the random schedule, a thread that completed a collective lets others go first, or not.
void maybe_step_back(Fiber& self);

// Called when a lane has exited: completes what only it was missing from.
void complete_after_exit(Block& block, Warp& warp);

}  // namespace cupaged_emulator
