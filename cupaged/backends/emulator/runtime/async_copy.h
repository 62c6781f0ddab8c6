// Copies from global to shared memory that a kernel starts and waits for later. Fifo and reverse
// schedules let them land as late as the program allows, with 0xFF bytes at their target until then; the
// random schedule lets each land at once or late. So it is with arrivals that wait for cp.async copies.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <vector>

namespace cupaged_emulator {

struct Fiber;
struct Block;

// One thread's cp.async copies that have not landed.
class ThreadCopies {
 public:
  void clear() {
    pending_.clear();
    open_group_ = 0;
    landed_ = 0;
  }
  void add(void* shared, const void* global, unsigned bytes) {
    pending_.push_back({shared, global, bytes, open_group_});
  }
  void commit() { open_group_++; }
  // Lets all groups land but the `allowed` most recent committed ones.
  void wait(unsigned allowed);
  // Late copies issued so far.
  uint64_t issued() const { return landed_ + pending_.size(); }
  // Lets the first `count` of all late copies land.
  void land(uint64_t count);

 private:
  struct Copy {
    void* shared;
    const void* global;
    unsigned bytes;
    unsigned group;
  };
  std::vector<Copy> pending_;
  unsigned open_group_ = 0;
  uint64_t landed_ = 0;  // late copies that are no longer pending
};

// An arrival at an mbarrier that waits for a thread's copies.
struct CopyArrival {
  Fiber* issuer;
  uint64_t copies;  // that it waits for: ThreadCopies::issued
  uint32_t time;    // in check mode
};

// Those in flight to one barrier.
struct CopyArrivals {
  uint64_t* barrier;
  std::vector<CopyArrival> in_flight;
};

// A bulk copy in flight; its bytes are due on `barrier`.
struct BulkCopy {
  void* shared;
  const void* global;
  uint32_t bytes;
  uint64_t* barrier;
  Fiber* issuer;
};

// Reports copies and arrivals that a block left in flight; false where there are some.
bool all_copies_landed(Block& block);

// One line about a barrier that somebody waits for, into `text`.
void describe_mbarrier(const Block& block, const uint64_t* barrier, char* text, size_t size);

}  // namespace cupaged_emulator
