#include "shared_memory.h"

#include <link.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <new>

namespace cupaged_emulator {
namespace {

struct Search {
  const char* anchor;
  SharedLayout* layout;
};

// Called for every loaded module: finds the one whose thread-local image, in this OS thread, holds the
// anchor.
int match_module(dl_phdr_info* info, size_t size, void* search_address) {
  if (size < offsetof(dl_phdr_info, dlpi_tls_data) + sizeof(info->dlpi_tls_data)) return 0;
  const char* image = static_cast<const char*>(info->dlpi_tls_data);
  if (image == nullptr) return 0;
  Search& search = *static_cast<Search*>(search_address);
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type != PT_TLS || search.anchor < image || search.anchor >= image + header.p_memsz)
      continue;
    search.layout->anchor_offset = static_cast<size_t>(search.anchor - image);
    search.layout->bytes = header.p_memsz;
    return 1;
  }
  return 0;
}

}  // namespace

bool locate_static_shared(void* (*anchor)(), SharedLayout* layout) {
  layout->anchor = anchor;
  Search search{static_cast<const char*>(anchor()), layout};
  return dl_iterate_phdr(match_module, &search) == 1;
}

void StaticShared::poison() { memset(data_, POISON_BYTE, bytes_); }

void SharedImage::poison(const StaticShared& shared) {
  bytes_.assign(shared.bytes(), static_cast<char>(POISON_BYTE));
}
void SharedImage::store(const StaticShared& shared) {
  memcpy(bytes_.data(), shared.data(), bytes_.size());
}
void SharedImage::restore(const StaticShared& shared) const {
  memcpy(shared.data(), bytes_.data(), bytes_.size());
}

void DynamicShared::create(size_t bytes) {
  if (bytes == 0) return;
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t usable = (bytes + page - 1) / page * page;
  mapping_bytes_ = usable + 2 * page;
  void* memory = mmap(nullptr, mapping_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<char*>(memory);
  if (mprotect(mapping_ + page, usable, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  data_ = reinterpret_cast<unsigned char*>(mapping_ + page);
  bytes_ = bytes;
}

void DynamicShared::poison() {
  if (bytes_ != 0) memset(data_, POISON_BYTE, bytes_);
}

DynamicShared::~DynamicShared() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

}  // namespace cupaged_emulator
