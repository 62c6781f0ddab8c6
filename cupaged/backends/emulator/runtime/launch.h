// What Python asks for.
#pragma once
#include <stdint.h>

#include "shared_memory.h"

namespace cupaged_emulator {

namespace check {
struct Setup;
}

// Filled in by cupaged/backends/emulator/library.py: fixed layout.
struct LaunchRequest {
  void (*entry)(void* const* parameters);
  void* const* parameters;
  const SharedLayout* shared;
  uint64_t dynamic_shared_bytes;
  uint64_t stack_bytes;
  uint64_t seed;
  uint32_t grid[3];
  uint32_t block[3];
  int32_t schedule;
  int32_t workers;
  int32_t cooperative;
  const check::Setup* setup;  // null in fast mode
};

inline uint64_t volume(const uint32_t (&dims)[3]) {
  return static_cast<uint64_t>(dims[0]) * dims[1] * dims[2];
}

}  // namespace cupaged_emulator
