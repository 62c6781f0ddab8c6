// The one fault that a launch ends with.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace cupaged_emulator {

struct Fiber;
struct Block;
struct Worker;

// Numbers are known to cupaged/backends/emulator/library.py.
enum class FaultKind : int32_t {
  none = 0,
  launch = 1,
  deadlock = 2,
  warp_mismatch = 3,
  async_copy = 4,
  misaligned = 5,
  trap = 6,
  data_race = 7,
  out_of_bounds = 8,
  uninitialised_shared = 9,
};

// Read by Python through ctypes: fixed layout.
struct Report {
  FaultKind kind = FaultKind::none;
  int32_t has_block = 0;
  int32_t has_thread = 0;
  uint32_t block[3] = {0, 0, 0};
  uint32_t thread[3] = {0, 0, 0};
  // In the kernel's code, 0 where unknown (fast mode): where the thread was, and what "@other@" in the
  // message stands for.
  uint32_t place = 0;
  uint32_t other_place = 0;
  char message[4052] = {0};

  // The first fault stays. `thread` may be null.
  void set(FaultKind fault, const Fiber* thread, const char* format, ...)
      __attribute__((format(printf, 4, 5)));
  void set_block(const Block& index);
};

// Describes who waits for what in blocks none of which can go on. `blocks`: those resident.
void report_deadlock(Worker& worker, Block* const* blocks, size_t count, const char* reason);

}  // namespace cupaged_emulator
