#include "session.h"

#include <link.h>
#include <stdio.h>

#include <algorithm>

#include "../scheduler.h"

namespace cupaged_emulator {
namespace check {

Session session;

namespace {

// Granules that overlap a stretch of memory.
size_t granules_of(uintptr_t first, size_t bytes) {
  return bytes == 0 ? 0 : (first + bytes - 1) / 8 - first / 8 + 1;
}

struct ModuleSearch {
  uintptr_t inside, first, end;
};

int match_module(dl_phdr_info* info, size_t, void* search_address) {
  ModuleSearch& search = *static_cast<ModuleSearch*>(search_address);
  uintptr_t first = ~uintptr_t{0}, end = 0;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type != PT_LOAD) continue;
    first = std::min<uintptr_t>(first, info->dlpi_addr + header.p_vaddr);
    end = std::max<uintptr_t>(end, info->dlpi_addr + header.p_vaddr + header.p_memsz);
  }
  if (search.inside < first || search.inside >= end) return 0;
  // Debuggers count from the load address, which is where the first segment of a library begins.
  search.first = info->dlpi_addr;
  search.end = end;
  return 1;
}

std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string text(const char* format, ...) {
  char buffer[300];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(buffer, sizeof(buffer), format, arguments);
  va_end(arguments);
  return buffer;
}

}  // namespace

void Session::begin(const Setup& setup, const void* entry, uint32_t threads_of_block,
                    size_t shared_granules) {
  owners_.warps = (threads_of_block + WARP_LANES - 1) / WARP_LANES;
  time_ = 0;
  global_.generation = next_generation();
  global_.overflows.clear();
  locations_.clear();
  setup_ = setup;
  buffers_.assign(setup.buffers, setup.buffers + setup.num_buffers);
  locate_module(entry);
  cut_into_segments(setup);
  size_t granules = shared_granules;
  for (const Segment& segment : segments_)
    if (segment.granules != nullptr) granules += granules_of(segment.first, segment.end - segment.first);
  arena_.reset(granules);
  for (Segment& segment : segments_)
    if (segment.granules != nullptr)
      segment.granules = arena_.take(granules_of(segment.first, segment.end - segment.first));
}

void Session::end() {
  arena_.trim();
  locations_.clear();
  forget_last_join();
}

// Where buffers overlap (views of one allocation), a byte may be written if any of them may be.
void Session::cut_into_segments(const Setup& setup) {
  static Granule wanted;  // marks, until there is memory, the segments that need some
  std::vector<uintptr_t> cuts;
  for (uint64_t i = 0; i < setup.num_buffers; i++) {
    cuts.push_back(setup.buffers[i].address);
    cuts.push_back(setup.buffers[i].address + setup.buffers[i].bytes);
  }
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  segments_.clear();
  last_segment_ = 0;
  for (size_t i = 0; i + 1 < cuts.size(); i++) {
    bool covered = false, writable = false;
    for (const BufferRange& buffer : buffers_) {
      if (cuts[i] < buffer.address || cuts[i] >= buffer.address + buffer.bytes) continue;
      covered = true;
      writable |= buffer.writable != 0;
    }
    if (!covered) continue;
    Granule* const mark = writable ? &wanted : nullptr;
    if (!segments_.empty() && segments_.back().end == cuts[i] && segments_.back().granules == mark) {
      segments_.back().end = cuts[i + 1];
    } else {
      segments_.push_back({cuts[i], cuts[i + 1], mark});
    }
  }
}

void Session::locate_module(const void* entry) {
  if (entry == module_entry_) return;
  ModuleSearch search{reinterpret_cast<uintptr_t>(entry), 0, 0};
  dl_iterate_phdr(match_module, &search);
  module_entry_ = entry;
  module_first_ = search.first;
  module_end_ = search.end;
}

uint32_t Session::site_of(const void* code) const {
  const uintptr_t address = reinterpret_cast<uintptr_t>(code);
  return address >= module_first_ && address < module_end_
             ? static_cast<uint32_t>(address - module_first_)
             : 0;
}

void Session::add_block(Block& block) {
  const StaticShared& fixed = block.worker->static_shared;
  block.check.shared.is_shared = true;
  block.check.static_granules =
      arena_.take(granules_of(reinterpret_cast<uintptr_t>(fixed.data()), fixed.bytes()));
  block.check.dynamic_granules = arena_.take((block.dynamic_shared_bytes + 7) / 8);
}

void Session::restart_block(Block& block) {
  BlockState& state = block.check;
  const uint3 index = block.block_index;
  state.number = index.x + block.grid_dim.x * (index.y + block.grid_dim.y * index.z);
  state.shared.generation = next_generation();
  state.shared.overflows.clear();
  state.mbarriers.clear();
  state.locations.clear();
}

bool Session::find(uintptr_t address, Target* target) {
  if (last_segment_ >= segments_.size() || address < segments_[last_segment_].first ||
      address >= segments_[last_segment_].end) {
    const auto after = std::upper_bound(
        segments_.begin(), segments_.end(), address,
        [](uintptr_t wanted, const Segment& segment) { return wanted < segment.first; });
    if (after == segments_.begin() || address >= (after - 1)->end) return false;
    last_segment_ = static_cast<size_t>(after - 1 - segments_.begin());
  }
  const Segment& segment = segments_[last_segment_];
  target->end = segment.end;
  target->granules =
      segment.granules == nullptr ? nullptr : segment.granules + (address / 8 - segment.first / 8);
  target->space = &global_;
  return true;
}

bool Session::is_exempt(uintptr_t address, size_t bytes, bool write) const {
  const auto inside = [=](uintptr_t first, size_t size) {
    return address - first < size && bytes <= size - (address - first);
  };
  if (inside(module_first_, module_end_ - module_first_)) return true;
  return !write && (inside(setup_.parameters, setup_.parameter_bytes) ||
                    inside(setup_.parameter_pointers, setup_.parameter_pointer_bytes));
}

// ---- text

std::string Session::name_of(const Block& block, uintptr_t address) const {
  const uintptr_t dynamic = reinterpret_cast<uintptr_t>(block.dynamic_shared);
  const StaticShared& fixed = block.worker->static_shared;
  const uintptr_t fixed_first = reinterpret_cast<uintptr_t>(fixed.data());
  if (address - dynamic < block.dynamic_shared_bytes)
    return text("dynamic shared memory at byte %zu", static_cast<size_t>(address - dynamic));
  if (address - fixed_first < fixed.bytes())
    return text("static shared memory at byte %zu", static_cast<size_t>(address - fixed_first));
  for (const BufferRange& buffer : buffers_)
    if (address - buffer.address < buffer.bytes)
      return text("parameter '%s' at byte %zu", buffer.name,
                  static_cast<size_t>(address - buffer.address));
  return text("address %p", reinterpret_cast<void*>(address));
}

std::string Session::nearest_to(const Block& block, uintptr_t address, size_t bytes) const {
  struct Candidate {
    std::string name;
    uintptr_t first;
    size_t bytes;
  };
  std::vector<Candidate> candidates;
  for (const BufferRange& buffer : buffers_)
    candidates.push_back({text("parameter '%s'", buffer.name), buffer.address, buffer.bytes});
  const StaticShared& fixed = block.worker->static_shared;
  candidates.push_back(
      {"static shared memory", reinterpret_cast<uintptr_t>(fixed.data()), fixed.bytes()});
  if (block.dynamic_shared_bytes != 0)
    candidates.push_back({"dynamic shared memory", reinterpret_cast<uintptr_t>(block.dynamic_shared),
                          block.dynamic_shared_bytes});
  const Candidate* nearest = nullptr;
  uintptr_t least = ~uintptr_t{0};
  for (const Candidate& candidate : candidates) {
    const uintptr_t end = candidate.first + candidate.bytes;
    const uintptr_t distance =
        address >= candidate.first ? address + bytes - end : candidate.first - address;
    if (distance < least) least = distance, nearest = &candidate;
  }
  const uintptr_t end = nearest->first + nearest->bytes;
  if (address < nearest->first)
    return text("%zu bytes before %s (%zu bytes)", static_cast<size_t>(nearest->first - address),
                nearest->name.c_str(), nearest->bytes);
  if (address < end)
    return text("the last %zu of them past the end of %s (%zu bytes)",
                static_cast<size_t>(address + bytes - end), nearest->name.c_str(), nearest->bytes);
  return text("%zu bytes past the end of %s (%zu bytes)", static_cast<size_t>(address - end),
              nearest->name.c_str(), nearest->bytes);
}

}  // namespace check
}  // namespace cupaged_emulator
