#include "clock.h"

#include <algorithm>

namespace cupaged_emulator {
namespace check {

void BlockClock::raise(unsigned index, Time time) {
  if (index >= entries.size()) entries.resize(index + 1);
  entries[index] = std::max(entries[index], time);
}

bool BlockClock::knows(unsigned first, uint32_t lanes, Time time) const {
  for (uint32_t left = lanes; left != 0; left &= left - 1)
    if (at(first + static_cast<unsigned>(__builtin_ctz(left))) < time) return false;
  return true;
}

const BlockClock* Clock::of(uint32_t block) const {
  if (parts.size() == 1) return parts[0].block == block ? parts[0].known.get() : nullptr;
  const auto found =
      std::lower_bound(parts.begin(), parts.end(), block,
                       [](const Part& part, uint32_t wanted) { return part.block < wanted; });
  return found != parts.end() && found->block == block ? found->known.get() : nullptr;
}

namespace {

bool includes(const BlockClock& whole, const BlockClock& part) {
  if (whole.all_threads < part.all_threads) return false;
  for (unsigned i = 0; i < part.entries.size(); i++)
    if (whole.at(i) < part.entries[i]) return false;
  return true;
}

Ref<BlockClock> join(const Ref<BlockClock>& a, const Ref<BlockClock>& b) {
  if (a == b || includes(*a, *b)) return a;
  if (includes(*b, *a)) return b;
  Ref<BlockClock> both(new BlockClock);
  const bool a_longer = a->entries.size() >= b->entries.size();
  const BlockClock &longer = a_longer ? *a : *b, &shorter = a_longer ? *b : *a;
  both->all_threads = std::max(a->all_threads, b->all_threads);
  both->entries = longer.entries;
  for (size_t i = 0; i < shorter.entries.size(); i++)
    both->entries[i] = std::max(both->entries[i], shorter.entries[i]);
  return both;
}

ClockRef join_parts(const ClockRef& a, const ClockRef& b) {
  ClockRef both(new Clock);
  bool is_a = true, is_b = true;
  size_t i = 0, j = 0;
  while (i < a->parts.size() || j < b->parts.size()) {
    const Clock::Part* from_a = i < a->parts.size() ? &a->parts[i] : nullptr;
    const Clock::Part* from_b = j < b->parts.size() ? &b->parts[j] : nullptr;
    if (from_a != nullptr && from_b != nullptr && from_a->block != from_b->block)
      (from_a->block < from_b->block ? from_b : from_a) = nullptr;
    Ref<BlockClock> known;
    if (from_a == nullptr || from_b == nullptr) {
      known = from_a != nullptr ? from_a->known : from_b->known;
    } else {
      known = join(from_a->known, from_b->known);
    }
    is_a = is_a && from_a != nullptr && known == from_a->known;
    is_b = is_b && from_b != nullptr && known == from_b->known;
    both->parts.push_back({(from_a != nullptr ? from_a : from_b)->block, std::move(known)});
    i += from_a != nullptr;
    j += from_b != nullptr;
  }
  return is_a ? a : is_b ? b : both;
}

// The lanes of a warp join the same two clocks one after the other.
struct LastJoin {
  ClockRef a, b, result;
};
LastJoin last_join;

}  // namespace

ClockRef join(const ClockRef& a, const ClockRef& b) {
  if (!b || a == b) return a;
  if (!a) return b;
  if (!(last_join.a == a && last_join.b == b)) {
    ClockRef result = join_parts(a, b);
    last_join = {a, b, std::move(result)};
  }
  return last_join.result;
}

void forget_last_join() { last_join = {}; }

}  // namespace check
}  // namespace cupaged_emulator
