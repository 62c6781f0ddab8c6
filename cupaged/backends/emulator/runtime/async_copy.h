// Copies from global to shared memory that a kernel starts and waits for later. Fifo and reverse
// schedules let them land as late as the program allows, with 0xFF bytes at their target until then; the
// random schedule lets each land at once or late.
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
  }
  void add(void* shared, const void* global, unsigned bytes) {
    pending_.push_back({shared, global, bytes, open_group_});
  }
  void commit() { open_group_++; }
  // Lets all groups land but the `allowed` most recent committed ones.
  void wait(unsigned allowed);

 private:
  struct Copy {
    void* shared;
    const void* global;
    unsigned bytes;
    unsigned group;
  };
  std::vector<Copy> pending_;
  unsigned open_group_ = 0;
};

// A bulk copy in flight; its bytes are due on `barrier`.
struct BulkCopy {
  void* shared;
  const void* global;
  uint32_t bytes;
  uint64_t* barrier;
  Fiber* issuer;
};

// Reports copies that a block left in flight; false where there are some.
bool all_copies_landed(Block& block);

// One line about a barrier that somebody waits for, into `text`.
void describe_mbarrier(const Block& block, const uint64_t* barrier, char* text, size_t size);

}  // namespace cupaged_emulator
