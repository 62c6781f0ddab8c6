// The launch that is being checked, one at a time in the process: its buffers and its time.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <string>
#include <vector>

#include "state.h"

namespace cupaged_emulator {

struct Block;
struct Worker;

namespace check {

// Memory that a pointer parameter stands for. Filled in by cupaged/backends/emulator/check_setup.py.
struct BufferRange {
  uint64_t address;
  uint64_t bytes;
  const char* name;  // of the parameter
  int64_t writable;  // 0: a pointer to const
};

// What a launch says about itself. Filled in by check_setup.py: fixed layout.
struct Setup {
  const BufferRange* buffers;
  uint64_t num_buffers;
  // The packed parameters, which the kernel's entry reads.
  uint64_t parameters;
  uint64_t parameter_bytes;
  uint64_t parameter_pointers;  // the array of pointers to them
  uint64_t parameter_pointer_bytes;
};

// A stretch of global memory of one kind.
struct Segment {
  uintptr_t first, end;
  Granule* granules;  // null where nothing may write
};

// Where an access goes.
struct Target {
  uintptr_t end;  // the memory that begins there is another's
  Granule*
      granules;  // of the 8 bytes that hold the access's first, or null for memory that is only read
  Space* space;
};

class Session {
 public:
  uint32_t next_generation() { return ++generation_; }
  Time now() const { return time_; }
  // A later time than all before.
  Time tick() { return ++time_; }

  // entry: a function of the kernel's module. granules: for shared memory, of all resident blocks.
  void begin(const Setup& setup, const void* entry, uint32_t threads_of_block, size_t shared_granules);
  void end();
  void add_block(Block& block);
  // The block's shared memory is as if never touched.
  void restart_block(Block& block);

  OwnerLayout owners() const { return owners_; }
  uint32_t site_of(const void* code) const;
  const void* module_base() const { return reinterpret_cast<const void*>(module_first_); }
  Locations& locations() { return locations_; }

  // The global memory at an address; false where there is none.
  bool find(uintptr_t address, Target* target);
  // Memory that a kernel may touch unseen: its parameters, its constants and variables.
  bool is_exempt(uintptr_t address, size_t bytes, bool write) const;

  // "parameter 'x' + 12 bytes" and the like.
  std::string name_of(const Block& block, uintptr_t address) const;
  // Which memory an address misses, and by how much.
  std::string nearest_to(const Block& block, uintptr_t address, size_t bytes) const;

 private:
  void cut_into_segments(const Setup& setup);
  void locate_module(const void* entry);

  uint32_t generation_ = 0;
  Time time_ = 0;
  OwnerLayout owners_;
  ShadowArena arena_;
  Space global_;
  Locations locations_;
  Setup setup_ = {};
  std::vector<BufferRange> buffers_;
  std::vector<Segment> segments_;
  size_t last_segment_ = 0;
  const void* module_entry_ = nullptr;
  uintptr_t module_first_ = 0, module_end_ = 0;
};

extern Session session;

}  // namespace check
}  // namespace cupaged_emulator
