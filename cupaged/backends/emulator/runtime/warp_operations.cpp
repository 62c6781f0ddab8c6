// Shuffles and votes.
#include "collectives.h"

namespace cupaged_emulator {
namespace {

struct ShuffleArgument {
  uint64_t value;
  uint64_t result;
  unsigned source;
};

constexpr uint64_t UNDEFINED_VALUE = ~0ull;  // a NaN, seen as a float

void run_shuffle(uint32_t lanes, void* const* arguments) {
  for (uint32_t left = lanes; left != 0; left &= left - 1) {
    auto& own = *static_cast<ShuffleArgument*>(arguments[__builtin_ctz(left)]);
    const bool there = (lanes >> own.source) & 1u;
    own.result =
        there ? static_cast<const ShuffleArgument*>(arguments[own.source])->value : UNDEFINED_VALUE;
  }
}

struct VoteArgument {
  bool predicate;
  uint32_t result;
};

uint32_t ballot(uint32_t lanes, void* const* arguments) {
  uint32_t result = 0;
  for (uint32_t left = lanes; left != 0; left &= left - 1) {
    const int lane = __builtin_ctz(left);
    result |= static_cast<uint32_t>(static_cast<const VoteArgument*>(arguments[lane])->predicate)
              << lane;
  }
  return result;
}

void give_all(uint32_t lanes, void* const* arguments, uint32_t result) {
  for (uint32_t left = lanes; left != 0; left &= left - 1)
    static_cast<VoteArgument*>(arguments[__builtin_ctz(left)])->result = result;
}

void run_ballot(uint32_t lanes, void* const* arguments) {
  give_all(lanes, arguments, ballot(lanes, arguments));
}
void run_any(uint32_t lanes, void* const* arguments) {
  give_all(lanes, arguments, ballot(lanes, arguments) != 0);
}
void run_all(uint32_t lanes, void* const* arguments) {
  give_all(lanes, arguments, ballot(lanes, arguments) == lanes);
}

// In the order of the enumerators.
const Collective SHUFFLES[] = {{"__shfl_sync", run_shuffle},
                               {"__shfl_up_sync", run_shuffle},
                               {"__shfl_down_sync", run_shuffle},
                               {"__shfl_xor_sync", run_shuffle}};
const Collective VOTES[] = {
    {"__ballot_sync", run_ballot}, {"__any_sync", run_any}, {"__all_sync", run_all}};

}  // namespace

uint64_t warp_shuffle(Shuffle kind, uint32_t mask, uint64_t value, unsigned source) {
  CUPAGED_NOTE_SITE();
  ShuffleArgument argument{value, 0, source};
  meet(mask, SHUFFLES[static_cast<int>(kind)], &argument);
  return argument.result;
}

uint32_t warp_vote(Vote kind, uint32_t mask, bool predicate) {
  CUPAGED_NOTE_SITE();
  VoteArgument argument{predicate, 0};
  meet(mask, VOTES[static_cast<int>(kind)], &argument);
  return argument.result;
}

}  // namespace cupaged_emulator
