// Vector clocks: what is known to have happened before something.
//
// Time is one number for the whole launch; every event that orders memory takes a later one. A thread
// stamps its accesses with the time of its own last such event, so lanes that synchronised together
// share a stamp. Clocks never change once they are shared: threads that learnt the same hold the same
// object, and joining the same two again costs nothing.
//
// Asynchronous copies are made by "couriers", which have places in a clock like threads: one for each
// thread's cp.async and one for each mbarrier's bulk copies. Waiting for a copy is learning about it.
#pragma once
#include <stdint.h>

#include <utility>
#include <vector>

namespace cupaged_emulator {
namespace check {

using Time = uint32_t;

struct Counted {
  uint32_t references = 0;

  Counted() = default;
  Counted(const Counted&) {}  // nobody refers to a fresh copy
  Counted& operator=(const Counted&) = delete;
};

// A pointer that counts references; check mode runs on one OS thread.
template <class T>
class Ref {
 public:
  Ref() = default;
  explicit Ref(T* object) : object_(object) { retain(); }
  Ref(const Ref& other) : object_(other.object_) { retain(); }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() {
    if (object_ != nullptr && --object_->references == 0) delete object_;
  }
  T* get() const { return object_; }
  T* operator->() const { return object_; }
  T& operator*() const { return *object_; }
  explicit operator bool() const { return object_ != nullptr; }
  bool operator==(const Ref& other) const { return object_ == other.object_; }

 private:
  void retain() {
    if (object_ != nullptr) object_->references++;
  }
  T* object_ = nullptr;
};

// Where threads and couriers of a block have their entries, for blocks of `warps` warps.
struct ClockLayout {
  static constexpr unsigned LANES = 32, MAX_MBARRIERS = 128;
  unsigned warps = 0;

  unsigned thread(unsigned warp, unsigned lane) const { return warp * LANES + lane; }
  unsigned mbarrier(unsigned number) const { return warps * LANES + number; }
  unsigned thread_copies(unsigned warp, unsigned lane) const {
    return warps * LANES + MAX_MBARRIERS + thread(warp, lane);
  }
};

// What is known of one block: of each of its threads everything up to `all_threads`, and of each entry
// everything up to its time; entries beyond the vector's end are 0.
struct BlockClock : Counted {
  Time all_threads = 0;
  std::vector<Time> entries;

  Time at(unsigned index) const { return index < entries.size() ? entries[index] : 0; }
  void raise(unsigned index, Time time);
  // True where each of these lanes' accesses at `time` is known; `first` is lane 0's entry.
  bool knows(unsigned first, uint32_t lanes, Time time) const;
};

// What is known of all blocks, in the order of their numbers.
struct Clock : Counted {
  struct Part {
    uint32_t block;
    Ref<BlockClock> known;
  };
  std::vector<Part> parts;

  const BlockClock* of(uint32_t block) const;
};

using ClockRef = Ref<Clock>;

// Both; an operand may be null. Gives back an operand where that says it all.
ClockRef join(const ClockRef& a, const ClockRef& b);
// Lets go of the clocks that `join` remembers.
void forget_last_join();

// A copy in which `change` altered what is known of `block`.
template <class Change>
ClockRef changed(const ClockRef& clock, uint32_t block, Change change) {
  ClockRef copy(new Clock(*clock));
  for (Clock::Part& part : copy->parts) {
    if (part.block != block) continue;
    part.known = Ref<BlockClock>(new BlockClock(*part.known));
    change(*part.known);
  }
  return copy;
}

}  // namespace check
}  // namespace cupaged_emulator
