#include "scheduler.h"

#include "order.h"

namespace cupaged_emulator {

// Fixed places in each OS thread: found without a call.
__thread ThreadView* current __attribute__((tls_model("initial-exec"))) = nullptr;

#ifdef CUPAGED_EMULATOR_CHECK
#define CUPAGED_OF_THREAD(TYPE, NAME, FIELD) \
  TYPE NAME() { return current->FIELD; }
CUPAGED_OF_ALL_THREADS
#undef CUPAGED_OF_THREAD
#endif

namespace {

unsigned lowest(uint32_t mask) { return static_cast<unsigned>(__builtin_ctz(mask)); }
unsigned highest(uint32_t mask) { return 31u - static_cast<unsigned>(__builtin_clz(mask)); }

// The n-th set bit, counted from 0.
unsigned nth_bit(uint32_t mask, unsigned n) {
  for (; n > 0; n--) mask &= mask - 1;
  return lowest(mask);
}

unsigned random_bit(Worker& worker, uint32_t mask) {
  const unsigned count = static_cast<unsigned>(__builtin_popcount(mask));
  return nth_bit(mask, static_cast<unsigned>((worker.random() >> 32) % count));
}

// First set bit at `from` or after it, going round.
unsigned next_bit(uint32_t mask, unsigned from) {
  const uint32_t after = mask & (~0u << from);
  return lowest(after != 0 ? after : mask);
}
// First set bit at `from` or before it, going round.
unsigned previous_bit(uint32_t mask, unsigned from) {
  const uint32_t before = mask & (~0u >> (31u - from));
  return highest(before != 0 ? before : mask);
}

void fiber_main();

// Gives a fiber that has not run yet a stack and makes it call fiber_main.
bool prepare(Fiber& fiber) {
  fiber.stack = fiber.home->worker->stacks.take();
  if (fiber.stack.low == nullptr) return false;
  fiber.context.prepare(fiber.stack.low, fiber.stack.high, fiber_main);
  fiber.started = true;
  return true;
}

void continue_fiber(Context& from, Fiber& to) {
  Worker& worker = *to.home->worker;
  if (!to.started && !prepare(to)) {
    current = nullptr;
    worker.report.set(FaultKind::launch, &to,
                      "no memory for another thread's stack (or the process has too many mappings): use "
                      "a smaller grid or stack_bytes");
    if (&from != &worker.main) Context::switch_to(from, worker.main);
    return;
  }
  current = &to;
  Context::switch_to(from, to.context);
}

void leave_block(Fiber& self) {
  Block& block = *self.home;
  Warp& warp = *self.warp;
  warp.alive &= ~self.bit();
  block.alive--;
  block.worker->progress++;
  complete_after_exit(block, warp);
}

// Runs threads, one after the other while the next one has not begun: those need no stack of their own.
void fiber_main() {
  for (;;) {
    Fiber& self = running();
    Worker& worker = *self.home->worker;
    worker.entry(worker.parameters);
    leave_block(self);
    Fiber* next = worker.failed() ? nullptr : self.home->take_ready();
    if (next != nullptr && !next->started) {
      next->stack = self.stack;
      next->started = true;
      current = next;
      continue;
    }
    worker.stacks.give_back(self.stack);
    if (next != nullptr) {
      continue_fiber(self.context, *next);
    } else {
      Context::switch_to(self.context, worker.main);
    }
    __builtin_unreachable();
  }
}

}  // namespace

uint64_t Worker::random() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

void Worker::run_turn(Block& block) {
  Fiber* first = block.take_ready();
  if (first != nullptr) continue_fiber(main, *first);
  current = nullptr;
}

void Block::create(Worker& owner, dim3 dim, dim3 grid, size_t dynamic_bytes) {
  worker = &owner;
  block_dim = dim;
  grid_dim = grid;
  dynamic.create(dynamic_bytes);
  dynamic_shared = dynamic.data();
  dynamic_shared_bytes = dynamic_bytes;
  const unsigned threads = dim.x * dim.y * dim.z;
  fibers = std::vector<Fiber>(threads);
  warps = std::vector<Warp>((threads + WARP_LANES - 1) / WARP_LANES);
  for (unsigned i = 0; i < threads; i++) {
    Fiber& fiber = fibers[i];
    fiber.thread_index = {i % dim.x, i / dim.x % dim.y, i / (dim.x * dim.y)};
    fiber.lane = i % WARP_LANES;
    fiber.block = this;
    fiber.home = this;
    fiber.warp = &warps[i / WARP_LANES];
    fiber.warp->index = i / WARP_LANES;
    fiber.warp->existing |= fiber.bit();
  }
  order::block_created(*this);
}

void Block::start(uint3 index) {
  block_index = index;
  alive = static_cast<unsigned>(fibers.size());
  barrier = BlockBarrier{};
  bulk_copies.clear();
  copy_arrivals.clear();
  ready_warps = yielded_warps = 0;
  current_warp = worker->schedule == Schedule::reverse ? static_cast<unsigned>(warps.size()) - 1 : 0;
  for (Fiber& fiber : fibers) {
    fiber.started = false;
    fiber.spin_name = nullptr;
    fiber.polled = nullptr;
    fiber.unyielded = 0;
    fiber.copies.clear();
  }
  for (Warp& warp : warps) {
    warp.alive = warp.existing;
    warp.ready = warp.yielded = warp.at_barrier = 0;
    warp.whole.arrived = 0;
    warp.num_parts = 0;
    wake(warp, warp.existing);
  }
  dynamic.poison();
  order::block_started(*this);
}

Fiber* Block::take_ready() {
  if (ready_warps == 0) return nullptr;
  unsigned lane;
  if (worker->schedule == Schedule::fifo) {
    current_warp = next_bit(ready_warps, current_warp);
    lane = lowest(warps[current_warp].ready);
  } else if (worker->schedule == Schedule::reverse) {
    current_warp = previous_bit(ready_warps, current_warp);
    lane = highest(warps[current_warp].ready);
  } else {
    current_warp = random_bit(*worker, ready_warps);
    lane = random_bit(*worker, warps[current_warp].ready);
  }
  Warp& warp = warps[current_warp];
  warp.ready &= ~(1u << lane);
  if (warp.ready == 0) ready_warps &= ~(1u << current_warp);
  return &fibers[current_warp * WARP_LANES + lane];
}

bool Block::next_turn() {
  for (uint32_t left = yielded_warps; left != 0; left &= left - 1) {
    Warp& warp = warps[lowest(left)];
    wake(warp, warp.yielded);
    warp.yielded = 0;
  }
  const bool any = yielded_warps != 0;
  yielded_warps = 0;
  return any;
}

void suspend(Fiber& self) {
  Fiber* next = self.home->take_ready();
  if (next == nullptr) {
    Context::switch_to(self.context, self.home->worker->main);
  } else if (next != &self) {
    continue_fiber(self.context, *next);
  }
}

void abandon() {
  Fiber& self = running();
  Context::switch_to(self.context, self.home->worker->main);
  __builtin_unreachable();
}

void maybe_step_back(Fiber& self) {
  Worker& worker = *self.home->worker;
  if (worker.schedule != Schedule::random || !worker.coin()) return;
  self.home->wake(*self.warp, self.bit());
  suspend(self);
}

namespace {

constexpr unsigned MOST_UNYIELDED = 16;

// A thread gives way where it looks at the same thing again, and has to. At its first look, or when it
// has changed something, it goes on: thus what needs no waiting, and should, is seen not to wait.
bool goes_on(Fiber& self, const void* address, bool progress) {
  const bool looks_again = !progress && (address == nullptr || address == self.polled);
  if (!progress) self.polled = address;
  Worker& worker = *self.home->worker;
  if (looks_again || self.unyielded == MOST_UNYIELDED ||
      (worker.schedule == Schedule::random && worker.coin())) {
    self.unyielded = 0;
    return false;
  }
  self.unyielded++;
  return true;
}

}  // namespace

void yield(const char* what, const void* address, bool progress) {
  Fiber& self = running();
  Block& block = *self.home;
  block.worker->progress += progress;
  if (goes_on(self, address, progress)) return;
  self.spin_name = what;
  self.spin_address = address;
  self.warp->yielded |= self.bit();
  block.yielded_warps |= 1u << self.warp->index;
  suspend(self);
  self.spin_name = nullptr;
}

uint64_t clock_ticks() {
  yield("clock64", nullptr, false);
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  uint64_t ticks;
  asm volatile("mrs %0, cntvct_el0" : "=r"(ticks));
  return ticks;
#else
  static uint64_t ticks = 0;
  return __atomic_add_fetch(&ticks, 1, __ATOMIC_RELAXED);
#endif
}

void trap(const char* what) {
  CUPAGED_NOTE_SITE();
  Fiber& self = running();
  self.home->worker->report.set(FaultKind::trap, &self, "%s", what);
  abandon();
}

}  // namespace cupaged_emulator
