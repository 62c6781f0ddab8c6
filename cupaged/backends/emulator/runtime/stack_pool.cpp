#include "stack_pool.h"

#include <sys/mman.h>
#include <unistd.h>

#include <mutex>

namespace cupaged_emulator {
namespace {

constexpr size_t STACKS_PER_CHUNK = 32;
// Stacks that begin at the same offset within a page would compete for the same few lines of the L1
// cache: each begins a little lower than the one before it.
constexpr size_t COLOUR_STEP = 320, COLOUR_SPAN = 4096;

std::mutex pool_mutex;

size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

size_t stack_pitch(size_t usable_bytes) { return page_bytes() + usable_bytes + COLOUR_SPAN; }

}  // namespace

// Never freed, so that threads that outlive static destruction can still return their stacks.
std::vector<StackSet::Chunk>& StackSet::pooled_chunks() {
  static std::vector<Chunk>& chunks = *new std::vector<Chunk>;
  return chunks;
}

StackSet::Chunk StackSet::map_chunk(size_t usable_bytes) {
  const size_t pitch = stack_pitch(usable_bytes);
  void* memory = mmap(nullptr, pitch * STACKS_PER_CHUNK, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return {nullptr, usable_bytes};
  char* bytes = static_cast<char*>(memory);
  for (size_t i = 0; i < STACKS_PER_CHUNK; i++) {
    if (mprotect(bytes + i * pitch, page_bytes(), PROT_NONE) != 0) {
      munmap(memory, pitch * STACKS_PER_CHUNK);  // the process has too many mappings
      return {nullptr, usable_bytes};
    }
  }
  return {bytes, usable_bytes};
}

bool StackSet::add_chunk() {
  Chunk chunk{nullptr, usable_bytes_};
  {
    std::lock_guard<std::mutex> lock(pool_mutex);
    auto& pooled = pooled_chunks();
    for (size_t i = 0; i < pooled.size() && chunk.memory == nullptr; i++) {
      if (pooled[i].usable_bytes != usable_bytes_) continue;
      chunk = pooled[i];
      pooled[i] = pooled.back();
      pooled.pop_back();
    }
  }
  if (chunk.memory == nullptr) chunk = map_chunk(usable_bytes_);
  if (chunk.memory == nullptr) return false;
  chunks_.push_back(chunk);
  const size_t pitch = stack_pitch(usable_bytes_);
  for (size_t i = STACKS_PER_CHUNK; i-- > 0;) {
    char* low = chunk.memory + i * pitch + page_bytes();
    const size_t colour = (i * COLOUR_STEP) % COLOUR_SPAN / 64 * 64;
    free_.push_back({low, low + usable_bytes_ + COLOUR_SPAN - colour});
  }
  return true;
}

Stack StackSet::take() {
  if (free_.empty() && !add_chunk()) return {nullptr, nullptr};
  const Stack stack = free_.back();
  free_.pop_back();
  return stack;
}

StackSet::~StackSet() {
  std::lock_guard<std::mutex> lock(pool_mutex);
  for (const Chunk& chunk : chunks_) pooled_chunks().push_back(chunk);
}

}  // namespace cupaged_emulator
