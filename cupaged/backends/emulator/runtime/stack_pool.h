// Stacks for CUDA threads. Mapping memory and protecting guard pages is slow, so stacks outlive launches
// in a pool of the whole process.
#pragma once
#include <stddef.h>

#include <vector>

namespace cupaged_emulator {

struct Stack {
  char* low;   // the page below is a guard page
  char* high;  // 64-byte aligned
};

// The stacks that one OS thread uses during one launch; they go back to the pool at the end.
class StackSet {
 public:
  // usable_bytes: of each stack, a multiple of the page size.
  explicit StackSet(size_t usable_bytes) : usable_bytes_(usable_bytes) {}
  ~StackSet();
  StackSet(const StackSet&) = delete;
  StackSet& operator=(const StackSet&) = delete;

  // Low is null where no memory is left.
  Stack take();
  void give_back(Stack stack) { free_.push_back(stack); }

 private:
  struct Chunk {
    char* memory;
    size_t usable_bytes;
  };
  static std::vector<Chunk>& pooled_chunks();
  static Chunk map_chunk(size_t usable_bytes);
  bool add_chunk();

  size_t usable_bytes_;
  std::vector<Chunk> chunks_;
  std::vector<Stack> free_;
};

}  // namespace cupaged_emulator
