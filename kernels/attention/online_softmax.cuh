// The one online-softmax state, shared by the tile loop, the merges of warps and splits, and finalize.
//
// For a set of tokens with scores s (log2 units: natural scores times log2(e)) a state holds
//   reference m: any finite number near the largest s,
//   sum l      = sum of 2^(s - m),
// and beside it the caller keeps o = sum of 2^(s - m) v. States over disjoint token sets merge by
// moving both to the larger reference. An empty set is m = EMPTY_REFERENCE, l = 0, o = 0: finite, so
// that no -inf minus -inf can arise; outside the kernels it is written as -inf.
#pragma once
#include "ptx.cuh"

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
constexpr float EMPTY_REFERENCE = -3.0e38f;

DEVICE float negative_infinity() { return __uint_as_float(0xff800000u); }
DEVICE float quiet_nan() { return __uint_as_float(0x7fc00000u); }

struct SoftmaxState {
  float reference;
  float sum;

  static DEVICE SoftmaxState empty() { return {EMPTY_REFERENCE, 0.0f}; }

  // A state read from memory, where m is in natural units and -inf when empty.
  static DEVICE SoftmaxState from_natural(float m, float l) {
    return {fmaxf(m * LOG2_E, EMPTY_REFERENCE), l};
  }

  DEVICE float natural_reference() const {
    return reference == EMPTY_REFERENCE ? negative_infinity() : reference * LN_2;
  }

  // Moves to `target` (not below the present reference) and returns the factor that the caller's
  // o must be multiplied by.
  DEVICE float move_to(float target) {
    const float factor = ptx::exp2_approx(reference - target);
    reference = target;
    sum *= factor;
    return factor;
  }

  // Takes in another state; the caller's o becomes own * factors.x + other's o * factors.y.
  DEVICE float2 merge(SoftmaxState other) {
    const float target = fmaxf(reference, other.reference);
    const float own_factor = move_to(target);
    const float other_factor = other.move_to(target);
    sum += other.sum;
    return make_float2(own_factor, other_factor);
  }

  // What o is multiplied by in the end: 0 for an empty set, NaN where a NaN came in.
  DEVICE float normalizer() const { return sum == 0.0f ? 0.0f : 1.0f / sum; }
};
