// Shared memory of blocks. Fresh blocks find it full of 0xFF bytes, which read as NaN.
//
// Static shared memory is the kernel module's __thread variables: each OS thread has one image of them.
// In a cooperative launch many blocks live on one OS thread: whenever another block runs, the image is
// copied out and that block's is copied in, so that addresses stay the same for all of them.
#pragma once
#include <stddef.h>

#include <vector>

namespace cupaged_emulator {

constexpr int POISON_BYTE = 0xff;

// Where a kernel module's static shared memory lies within the image that holds its anchor.
struct SharedLayout {
  void* (*anchor)() = nullptr;
  size_t anchor_offset = 0;
  size_t bytes = 0;
};

// Fills in a layout; false where the module's image cannot be found.
bool locate_static_shared(void* (*anchor)(), SharedLayout* layout);

// The calling OS thread's image.
class StaticShared {
 public:
  StaticShared() = default;
  explicit StaticShared(const SharedLayout& layout)
      : data_(static_cast<char*>(layout.anchor()) - layout.anchor_offset), bytes_(layout.bytes) {}

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  bool contains(const void* address, size_t bytes) const {
    const char* first = static_cast<const char*>(address);
    return first >= data_ && bytes <= bytes_ && first + bytes <= data_ + bytes_;
  }
  void poison();

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

// One block's copy of an image while another block has it.
class SharedImage {
 public:
  void poison(const StaticShared& shared);
  void store(const StaticShared& shared);
  void restore(const StaticShared& shared) const;

 private:
  std::vector<char> bytes_;
};

// Dynamic shared memory between two guard pages: no other memory is near it.
class DynamicShared {
 public:
  DynamicShared() = default;
  ~DynamicShared();
  DynamicShared(const DynamicShared&) = delete;
  DynamicShared& operator=(const DynamicShared&) = delete;

  void create(size_t bytes);
  unsigned char* data() const { return data_; }
  bool contains(const void* address, size_t bytes) const {
    const unsigned char* first = static_cast<const unsigned char*>(address);
    return first >= data_ && bytes <= bytes_ && first + bytes <= data_ + bytes_;
  }
  void poison();

 private:
  unsigned char* data_ = nullptr;
  size_t bytes_ = 0;
  char* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
};

}  // namespace cupaged_emulator
