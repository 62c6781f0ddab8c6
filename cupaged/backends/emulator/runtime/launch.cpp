// Launches: from a request to blocks on OS threads, and the watch over those that make no progress.
#include <stdio.h>
#include <string.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "launch.h"
#include "order.h"
#include "scheduler.h"

namespace cupaged_emulator {
namespace {

constexpr size_t MAX_SHARED_BYTES = 227 * 1024;  // static and dynamic, of a block
constexpr uint64_t MAX_RESIDENT_THREADS = CUPAGED_EMULATOR_RESIDENT_THREADS;  // by build.py
#ifdef CUPAGED_EMULATOR_CHECK
constexpr uint64_t MAX_CHECKED_THREADS = uint64_t{32} << 32;  // warps and couriers have 32-bit numbers
#endif
// A launch counts as hanging after this many turns and this much time of spins alone.
constexpr unsigned IDLE_TURNS = 5000;
constexpr auto IDLE_TIME = std::chrono::milliseconds(200);

dim3 to_dim3(const uint32_t (&dims)[3]) { return dim3(dims[0], dims[1], dims[2]); }

uint64_t greatest_common_divisor(uint64_t a, uint64_t b) {
  return b == 0 ? a : greatest_common_divisor(b, a % b);
}

uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

// What the OS threads of one launch share.
class Launch {
 public:
  Launch(const LaunchRequest& request, Report& result)
      : request_(request), result_(result), num_blocks_(volume(request.grid)) {
    if (schedule() == Schedule::random) {
      offset_ = mix(request.seed + 1) % num_blocks_;
      stride_ = mix(request.seed + 2) % num_blocks_;
      while (greatest_common_divisor(stride_, num_blocks_) != 1) stride_ = (stride_ + 1) % num_blocks_;
    }
  }

  Schedule schedule() const { return static_cast<Schedule>(request_.schedule); }
  uint64_t num_blocks() const { return num_blocks_; }
  const LaunchRequest& request() const { return request_; }

  // Ordinal of the next block to run; false when there is none left or the launch failed.
  bool next(uint64_t* position) {
    if (stopped_.load(std::memory_order_relaxed)) return false;
    *position = next_.fetch_add(1, std::memory_order_relaxed);
    return *position < num_blocks_;
  }
  bool stopped() const { return stopped_.load(std::memory_order_relaxed); }

  // The schedule's block order.
  uint3 block_index(uint64_t position) const {
    uint64_t linear = position;
    if (schedule() == Schedule::reverse) linear = num_blocks_ - 1 - position;
    if (schedule() == Schedule::random)
      linear = static_cast<uint64_t>((static_cast<unsigned __int128>(position) * stride_ + offset_) %
                                     num_blocks_);
    const uint32_t x = request_.grid[0], y = request_.grid[1];
    return {static_cast<unsigned>(linear % x), static_cast<unsigned>(linear / x % y),
            static_cast<unsigned>(linear / x / y)};
  }

  void prepare(Worker& worker) const {
    worker.entry = request_.entry;
    worker.parameters = request_.parameters;
    worker.schedule = schedule();
    worker.static_shared = StaticShared(*request_.shared);
  }
  void seed_random(Worker& worker, uint64_t position) const {
    worker.random_state = mix(mix(request_.seed) + position) | 1u;
  }

  void finish(const Report& report) {
    if (report.kind == FaultKind::none) return;
    std::lock_guard<std::mutex> lock(mutex_);
    if (result_.kind == FaultKind::none) result_ = report;
    stopped_.store(true, std::memory_order_relaxed);
  }

  // Progress made anywhere in the launch, for workers that only spin.
  std::atomic<uint64_t> progress{0};

 private:
  const LaunchRequest& request_;
  Report& result_;
  uint64_t num_blocks_;
  uint64_t offset_ = 0, stride_ = 1;
  std::atomic<uint64_t> next_{0};
  std::atomic<bool> stopped_{false};
  std::mutex mutex_;
};

// Tells a worker when its launch hangs: nothing but spins for a while.
class Watchdog {
 public:
  explicit Watchdog(Launch& launch) : launch_(launch) {}

  // Called after each turn; true where it is time to give up.
  bool hangs(uint64_t worker_progress) {
    if (worker_progress != seen_) {
      launch_.progress.fetch_add(1, std::memory_order_relaxed);
      seen_ = worker_progress;
      turns_ = 0;
      return false;
    }
    if (++turns_ == 1) restart();
    if (turns_ < IDLE_TURNS) return false;
    if (launch_.progress.load(std::memory_order_relaxed) != launch_seen_) {
      turns_ = 1;
      restart();
      return false;
    }
    return std::chrono::steady_clock::now() - since_ >= IDLE_TIME;
  }

 private:
  void restart() {
    since_ = std::chrono::steady_clock::now();
    launch_seen_ = launch_.progress.load(std::memory_order_relaxed);
  }

  Launch& launch_;
  uint64_t seen_ = ~0ull, launch_seen_ = 0;
  unsigned turns_ = 0;
  std::chrono::steady_clock::time_point since_;
};

constexpr const char* DEADLOCK = "deadlock: threads wait for each other for ever";
constexpr const char* NO_PROGRESS = "deadlock: threads only spin, and nothing changes any more";

// Runs a block from its first to its last thread, with nothing else on this OS thread.
void run_alone(Launch& launch, Worker& worker, Block& block, Watchdog& watchdog) {
  Block* const only = &block;
  while (block.alive != 0 && !worker.failed() && !launch.stopped()) {
    worker.run_turn(block);
    if (worker.failed() || block.alive == 0) break;
    if (!block.next_turn()) {
      if (block.ready_warps == 0) report_deadlock(worker, &only, 1, DEADLOCK);
    } else if (watchdog.hangs(worker.progress)) {
      report_deadlock(worker, &only, 1, NO_PROGRESS);
    }
  }
  if (block.alive == 0 && !worker.failed()) all_copies_landed(block);
}

void run_one_after_another(Launch& launch) {
  Worker worker(launch.request().stack_bytes);
  launch.prepare(worker);
  Block block;
  block.create(worker, to_dim3(launch.request().block), to_dim3(launch.request().grid),
               launch.request().dynamic_shared_bytes);
  Watchdog watchdog(launch);
  for (uint64_t position; !worker.failed() && launch.next(&position);) {
    launch.seed_random(worker, position);
    worker.static_shared.poison();
    block.start(launch.block_index(position));
    run_alone(launch, worker, block, watchdog);
  }
  launch.finish(worker.report);
}

// The blocks of a cooperative launch, in turns on one OS thread.
class ResidentBlocks {
 public:
  ResidentBlocks(Launch& launch, Worker& worker) : worker_(worker) {
    const LaunchRequest& request = launch.request();
    for (uint64_t position = 0; position < launch.num_blocks(); position++) {
      blocks_.push_back(std::make_unique<Block>());
      Block& block = *blocks_.back();
      block.create(worker, to_dim3(request.block), to_dim3(request.grid), request.dynamic_shared_bytes);
      block.start(launch.block_index(position));
      block.image.poison(worker.static_shared);
      pointers_.push_back(&block);
    }
  }

  // One turn of every block; false where none of them could run.
  bool run_round() {
    bool ran = false;
    for (Block* block : pointers_) {
      if (block->alive == 0) continue;
      block->next_turn();
      if (block->ready_warps == 0) continue;
      ran = true;
      block->image.restore(worker_.static_shared);
      worker_.run_turn(*block);
      block->image.store(worker_.static_shared);
      if (worker_.failed()) return ran;
      if (block->alive != 0) continue;
      if (!all_copies_landed(*block)) return ran;
    }
    return ran;
  }

  bool finished() const {
    for (const Block* block : pointers_)
      if (block->alive != 0) return false;
    return true;
  }
  void report(const char* reason) {
    report_deadlock(worker_, pointers_.data(), pointers_.size(), reason);
  }

 private:
  Worker& worker_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<Block*> pointers_;
};

void run_cooperatively(Launch& launch) {
  Worker worker(launch.request().stack_bytes);
  launch.prepare(worker);
  launch.seed_random(worker, 0);
  ResidentBlocks blocks(launch, worker);
  Watchdog watchdog(launch);
  while (!blocks.finished() && !worker.failed()) {
    if (!blocks.run_round()) {
      blocks.report(DEADLOCK);
    } else if (!worker.failed() && watchdog.hangs(worker.progress)) {
      blocks.report(NO_PROGRESS);
    }
  }
  launch.finish(worker.report);
}

// Lets no exception out: it would end the process where it leaves an OS thread.
void run_caught(Launch& launch, void (*run)(Launch&)) {
  try {
    const order::LaunchScope scope(launch.request());
    run(launch);
  } catch (const std::exception& error) {
    Report report;
    report.set(FaultKind::launch, nullptr, "the launch could not be set up: %s", error.what());
    launch.finish(report);
  }
}

void run_on_workers(Launch& launch) {
#ifdef CUPAGED_EMULATOR_CHECK
  constexpr uint64_t wanted = 1;  // what is known of each byte belongs to one OS thread
#else
  const uint64_t wanted = static_cast<uint64_t>(launch.request().workers);
#endif
  const uint64_t workers = wanted < launch.num_blocks() ? wanted : launch.num_blocks();
  std::vector<std::thread> threads;
  for (uint64_t i = 1; i < workers; i++)
    threads.emplace_back(run_caught, std::ref(launch), run_one_after_another);
  run_caught(launch, run_one_after_another);
  for (std::thread& thread : threads) thread.join();
}

// Null, or why the request cannot be launched.
bool refuse(const LaunchRequest& request, Report& report) {
  const uint64_t threads = volume(request.block), blocks = volume(request.grid);
  const uint64_t shared = request.shared->bytes + request.dynamic_shared_bytes;
  if (threads == 0 || threads > MAX_BLOCK_THREADS) {
    report.set(FaultKind::launch, nullptr, "a block has %llu threads, allowed are 1 to %u",
               static_cast<unsigned long long>(threads), MAX_BLOCK_THREADS);
  } else if (shared > MAX_SHARED_BYTES) {
    report.set(FaultKind::launch, nullptr,
               "static and dynamic shared memory are %llu bytes, allowed are %zu",
               static_cast<unsigned long long>(shared), MAX_SHARED_BYTES);
#ifdef CUPAGED_EMULATOR_CHECK
  } else if (blocks > MAX_CHECKED_THREADS / (2 * threads + 3 * WARP_LANES)) {
    report.set(FaultKind::launch, nullptr,
               "check mode can tell the threads of %llu blocks no more apart",
               static_cast<unsigned long long>(blocks));
#endif
  } else if (request.cooperative != 0 && blocks * threads > MAX_RESIDENT_THREADS) {
    report.set(
        FaultKind::launch, nullptr,
        "a cooperative launch of %llu blocks of %llu threads: at most %llu threads can be resident",
        static_cast<unsigned long long>(blocks), static_cast<unsigned long long>(threads),
        static_cast<unsigned long long>(MAX_RESIDENT_THREADS));
  }
  return report.kind != FaultKind::none;
}

}  // namespace
}  // namespace cupaged_emulator

extern "C" {

// Fills in `layout` for the kernel module that `anchor` belongs to; 0 where its image cannot be found.
CUPAGED_EMULATOR_API int cupaged_emulator_locate_shared(void* (*anchor)(),
                                                        cupaged_emulator::SharedLayout* layout) {
  return cupaged_emulator::locate_static_shared(anchor, layout) ? 1 : 0;
}

// Runs a launch to its end. Returns the fault's kind, 0 for none.
CUPAGED_EMULATOR_API int cupaged_emulator_launch(const cupaged_emulator::LaunchRequest* request,
                                                 cupaged_emulator::Report* report) {
  using namespace cupaged_emulator;
  *report = Report{};
  if (refuse(*request, *report) || volume(request->grid) == 0) return static_cast<int>(report->kind);
  Launch launch(*request, *report);
  if (request->cooperative != 0) {
    run_caught(launch, run_cooperatively);
  } else {
    run_on_workers(launch);
  }
  return static_cast<int>(report->kind);
}

}  // extern "C"
