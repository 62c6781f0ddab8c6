// The one online-softmax state, shared by the tile loop, the merges of warps and splits, and finalize.
//
// For a set of tokens with scores s (log2 units: natural scores times log2(e)) a state holds
//   reference m: any finite number near the largest s,
//   sum l      = sum of 2^(s - m),
// and beside it the caller keeps o = sum of 2^(s - m) v. States over disjoint token sets merge by
// moving both to the larger reference. An empty set is m = EMPTY_REFERENCE, l = 0, o = 0: finite, so
// that no -inf minus -inf can arise; outside the kernels it is written as -inf.
#pragma once
#include "numeric/f32.cuh"
#include "ptx.cuh"

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
constexpr float EMPTY_REFERENCE = -3.0e38f;

// Within 1e-7 of tanh(x), absolutely.
DEVICE float tanh_of(float x) {
  return 1.0f - 2.0f * ptx::reciprocal_approx(ptx::exp2_approx(2.0f * LOG2_E * x) + 1.0f);
}

// cap * tanh(score / cap), within 1e-6 of itself: where the score is a small part of the cap, by the
// series of tanh(x) / x, for tanh_of is good absolutely only.
DEVICE float soft_capped(float score, float cap, float inverse_cap) {
  const float x = score * inverse_cap, square = x * x;
  const float series =
      1.0f + square * (-1.0f / 3.0f + square * (2.0f / 15.0f + square * (-17.0f / 315.0f +
                                                                         square * (62.0f / 2835.0f))));
  return x > -0.25f && x < 0.25f ? score * series : cap * tanh_of(x);
}

struct SoftmaxState {
  float reference;
  float sum;

  static DEVICE SoftmaxState empty() { return {EMPTY_REFERENCE, 0.0f}; }

  // A score that has weight and no value: natural units. The reference is set so far below it. -inf is
  // none.
  static DEVICE SoftmaxState of_sink(float score, float below = 0.0f) {
    const float reference = score * LOG2_E - below;
    if (reference <= EMPTY_REFERENCE) return empty();
    return {reference > FLOAT_MAX ? FLOAT_MAX : reference, ptx::exp2_approx(below)};  // NaN stays
  }

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

  // Log2 of the sum of 2^s; -inf for an empty set.
  DEVICE float log2_sum() const { return reference + ptx::log2_approx(sum); }

  // What o is multiplied by in the end: 0 for an empty set, NaN where a NaN came in.
  DEVICE float normalizer() const { return sum == 0.0f ? 0.0f : ptx::reciprocal_approx(sum); }
};
