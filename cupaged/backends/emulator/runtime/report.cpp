#include "report.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <string>

#include "scheduler.h"
#ifdef CUPAGED_EMULATOR_CHECK
#include "check/session.h"
#endif

namespace cupaged_emulator {
namespace {

constexpr size_t MAX_REPORTED_BLOCKS = 8, MAX_REPORTED_WARPS = 4;

void append(std::string& text, const char* format, ...) __attribute__((format(printf, 2, 3)));
void append(std::string& text, const char* format, ...) {
  char part[256];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(part, sizeof(part), format, arguments);
  va_end(arguments);
  text += part;
}

void describe_meeting(const Warp& warp, const Meeting& meeting, std::string& text) {
  if (meeting.arrived == 0) return;
  append(text, "; 0x%08x wait in %s(mask 0x%08x) for 0x%08x", meeting.arrived, meeting.collective->name,
         meeting.mask, meeting.mask & warp.alive & ~meeting.arrived);
}

// Lanes that spin on the same thing, together.
void describe_spinning(const Block& block, const Warp& warp, std::string& text) {
  uint32_t left = 0;
  for (uint32_t rest = warp.yielded | warp.ready; rest != 0; rest &= rest - 1) {
    const Fiber& fiber =
        block.fibers[warp.index * WARP_LANES + static_cast<unsigned>(__builtin_ctz(rest))];
    if (fiber.spin_name != nullptr) left |= fiber.bit();
  }
  while (left != 0) {
    const Fiber& first =
        block.fibers[warp.index * WARP_LANES + static_cast<unsigned>(__builtin_ctz(left))];
    uint32_t same = 0;
    for (uint32_t rest = left; rest != 0; rest &= rest - 1) {
      const Fiber& other =
          block.fibers[warp.index * WARP_LANES + static_cast<unsigned>(__builtin_ctz(rest))];
      if (other.spin_name == first.spin_name && other.spin_address == first.spin_address)
        same |= other.bit();
    }
    left &= ~same;
    if (strcmp(first.spin_name, "mbarrier.try_wait") == 0) {
      char barrier[200];
      describe_mbarrier(block, static_cast<const uint64_t*>(first.spin_address), barrier,
                        sizeof(barrier));
      append(text, "; 0x%08x wait for %s", same, barrier);
    } else {
      append(text, "; 0x%08x spin in %s(%p)", same, first.spin_name, first.spin_address);
    }
  }
}

void describe_block(const Block& block, std::string& text) {
  append(text, "\n  block (%u, %u, %u):", block.block_index.x, block.block_index.y, block.block_index.z);
  size_t shown = 0, hidden = 0;
  for (const Warp& warp : block.warps) {
    if (warp.alive == 0) continue;
    if (shown == MAX_REPORTED_WARPS) {
      hidden++;
      continue;
    }
    shown++;
    append(text, "\n    warp %u: lanes alive 0x%08x", warp.index, warp.alive);
    if (warp.alive != warp.existing) append(text, "; exited 0x%08x", warp.existing & ~warp.alive);
    if (warp.at_barrier != 0) append(text, "; 0x%08x wait in __syncthreads", warp.at_barrier);
    describe_meeting(warp, warp.whole, text);
    for (unsigned i = 0; i < warp.num_parts; i++) describe_meeting(warp, warp.parts[i], text);
    describe_spinning(block, warp, text);
  }
  if (hidden != 0) append(text, "\n    and %zu more warps", hidden);
}

const Fiber* first_alive(const Block& block) {
  for (const Fiber& fiber : block.fibers)
    if (fiber.warp->alive & fiber.bit()) return &fiber;
  return nullptr;
}

}  // namespace

void Report::set(FaultKind fault, const Fiber* at, const char* format, ...) {
  if (kind != FaultKind::none) return;
  kind = fault;
  if (at != nullptr) {
    set_block(*at->home);
    has_thread = 1;
    thread[0] = at->thread_index.x;
    thread[1] = at->thread_index.y;
    thread[2] = at->thread_index.z;
#ifdef CUPAGED_EMULATOR_CHECK
    place = check::session.site_of(at->check.site);
#endif
  }
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof(message), format, arguments);
  va_end(arguments);
}

void Report::set_block(const Block& at) {
  has_block = 1;
  block[0] = at.block_index.x;
  block[1] = at.block_index.y;
  block[2] = at.block_index.z;
}

void report_deadlock(Worker& worker, Block* const* blocks, size_t count, const char* reason) {
  std::string text = reason;
  const Fiber* culprit = nullptr;
  size_t shown = 0, waiting = 0;
  for (size_t i = 0; i < count; i++) {
    const Block& block = *blocks[i];
    if (block.alive == 0) continue;
    if (culprit == nullptr) culprit = first_alive(block);
    waiting++;
    if (shown == MAX_REPORTED_BLOCKS) continue;
    shown++;
    describe_block(block, text);
  }
  if (waiting > shown) append(text, "\n  and %zu more blocks", waiting - shown);
  worker.report.set(FaultKind::deadlock, culprit, "%s", text.c_str());
}

}  // namespace cupaged_emulator
