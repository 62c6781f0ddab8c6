// The main loop of every decode kernel: one warp, one KV head, up to 8 query rows, tiles of 16 tokens.
#pragma once
#include "attention/fragments.cuh"
#include "attention/online_softmax.cuh"
#include "attention/query.cuh"

// How the running reference follows the scores: it is moved only when a score outgrows it by 2^GROWTH,
// and is set 2^HEADROOM below the largest score then (above it where that is negative), so that the
// format holds weights 2^GROWTH larger, and small ones keep their bits.
template <class ValueFormat>
struct LazyReference {
  static constexpr float HEADROOM = ValueFormat::WEIGHT_HEADROOM;
  static constexpr float GROWTH = 7.0f;
};

// What an attention is made of. Element: of q. SOFT_CAP: scores pass through cap * tanh(score / cap).
template <class Element_, class KeyFormat_, class ValueFormat_, class Reference_, bool SOFT_CAP_ = false>
struct AttentionTypes {
  using Element = Element_;
  using KeyFormat = KeyFormat_;
  using ValueFormat = ValueFormat_;
  using Reference = Reference_;
  static constexpr bool SOFT_CAP = SOFT_CAP_;
  static constexpr int PRODUCTS = ValueFormat::Value::PRODUCTS;
};

// From products of operands to scores in log2 units.
struct ScoreRule {
  float scale;     // softmax scale times k_scale
  float soft_cap;  // natural units, where there is one
};

// All query rows attend to the same tokens.
struct CommonMask {
  TokenRange range;

  DEVICE bool live(int, u32 position) const { return range.contains(position); }
};

// Each of a lane's two rows has a range of its own within the common one.
struct RowMask {
  TokenRange range;
  TokenRange row[2];

  DEVICE bool live(int k, u32 position) const { return row[k].contains(position); }
};

template <class Types>
struct WarpAttention {
  using KeyFormat = typename Types::KeyFormat;
  using ValueFormat = typename Types::ValueFormat;
  using Reference = typename Types::Reference;
  using Row = QueryRow<typename Types::Element, typename KeyFormat::Key>;
  static constexpr int PRODUCTS = Types::PRODUCTS;

  Lane lane;
  QueryTile<typename Types::Element, KeyFormat> query;
  float score_factor[2];  // scores to log2 units, for rows 2c and 2c + 1
  float soft_cap;         // log2 units
  float inverse_cap;
  SoftmaxState state[2];  // of rows 2c, 2c + 1; `sum` only over this lane's tokens until finish()
  float output[PRODUCTS][4];

  DEVICE void begin(const Row& row, ScoreRule rule) {
    lane = Lane::current();
    query = make_query_tile<typename Types::Element, KeyFormat>(row, lane);
    // Neither 0 nor infinite, and nor is its inverse.
    soft_cap = fminf(fmaxf(rule.soft_cap * LOG2_E, FLOAT_MIN), FLOAT_MAX);
    inverse_cap = Types::SOFT_CAP ? 1.0f / soft_cap : 0.0f;
    UNROLL for (int k = 0; k < 2; k++) {
      // Kept finite: an infinite factor would turn a score of zero into NaN.
      const float factor = rule.scale * query.restore[k] * (LOG2_E * KeyFormat::OPERAND_SHIFT);
      score_factor[k] = fminf(fmaxf(factor, -FLOAT_MAX), FLOAT_MAX);
      state[k] = SoftmaxState::empty();
    }
    UNROLL for (int p = 0; p < PRODUCTS; p++)
      output[p][0] = output[p][1] = output[p][2] = output[p][3] = 0.0f;
  }

  // Folds in TILES tiles at once: more independent work for the scheduler than one tile gives. `source`
  // says where tile n begins (position(n)) and where this lane's rows of it lie (keys(n), values(n)).
  // MASKED: some tokens may not count. `between` runs after the last use of K, before the first of V.
  template <int TILES, bool MASKED, class Source, class Mask, class Between>
  DEVICE void fold(const Source& source, const Mask& mask, Between between) {
    float scores[TILES][4];  // log2 units
    UNROLL for (int n = 0; n < TILES; n++) {
      if (MASKED && source.position(n) >= mask.range.end) {  // nothing of this tile counts
        UNROLL for (int i = 0; i < 4; i++) scores[n][i] = negative_infinity();
        continue;
      }
      const KeyRows keys = source.keys(n);
      score_tile(scores[n], keys);
      UNROLL for (int i = 0; i < 4; i++) {
        if (!keys.valid[i / 2]) scores[n][i] = quiet_nan();
        if (MASKED && !mask.live(i % 2, source.position(n) + lane.key_token() + 8 * (i / 2)))
          scores[n][i] = negative_infinity();
      }
    }
    follow(scores);
    between();

    UNROLL for (int n = 0; n < TILES; n++) {
      if (MASKED && source.position(n) >= mask.range.end) continue;
      float weights[4];
      UNROLL for (int i = 0; i < 4; i++)
        weights[i] = ptx::exp2_approx(scores[n][i] - state[i % 2].reference);
      state[0].sum += weights[0] + weights[2];
      state[1].sum += weights[1] + weights[3];
      const u32 weights0 = ptx::movmatrix_trans(ValueFormat::pack_weights(weights[0], weights[1]));
      const u32 weights1 = ptx::movmatrix_trans(ValueFormat::pack_weights(weights[2], weights[3]));

      bool dead[4] = {false, false, false, false};
      if (MASKED) {
        UNROLL for (int j = 0; j < 4; j++)
          dead[j] = !mask.range.contains(source.position(n) + lane.value_token(j));
      }
      const ValueRows values = source.values(n);
      ValueFormat::accumulate(output, values.row, lane.row, dead, weights0, weights1);
    }
  }

  // Sums complete over the warp's tokens: all lanes of a column hold the same state.
  DEVICE void finish() {
    UNROLL for (int k = 0; k < 2; k++) {
      UNROLL for (int offset = 4; offset < 32; offset *= 2)
        state[k].sum += __shfl_xor_sync(FULL_WARP, state[k].sum, offset);
    }
  }

 private:
  // Rounded before the reference is taken off: in one fused operation, equal scores beyond 2^27 would differ
  // from their own maximum by more than F16 holds.
  DEVICE void score_tile(float (&scores)[4], const KeyRows& keys) const {
    UNROLL for (int i = 0; i < 4; i++) scores[i] = 0.0f;
    KeyFormat::score(scores, keys.row[0], keys.row[1], lane.quad, query.fragment);
    if constexpr (decltype(query)::HAS_REST)
      KeyFormat::score(scores, keys.row[0], keys.row[1], lane.quad, query.rest);
    UNROLL for (int i = 0; i < 4; i++) {
      scores[i] = __fmul_rn(scores[i], score_factor[i % 2]);
      if constexpr (Types::SOFT_CAP) scores[i] = soft_capped(scores[i], soft_cap, inverse_cap);
    }
  }

  // Moves the references where the new scores demand it.
  template <int TILES>
  DEVICE void follow(const float (&scores)[TILES][4]) {
    float largest[2];
    bool grew = false;
    UNROLL for (int k = 0; k < 2; k++) {
      largest[k] = fmaxf(scores[0][k], scores[0][k + 2]);
      UNROLL for (int n = 1; n < TILES; n++)
        largest[k] = fmaxf(largest[k], fmaxf(scores[n][k], scores[n][k + 2]));
      grew |= largest[k] - Reference::HEADROOM - state[k].reference > Reference::GROWTH;
    }
    if (!__any_sync(FULL_WARP, grew)) return;
    UNROLL for (int k = 0; k < 2; k++) {
      UNROLL for (int offset = 4; offset < 32; offset *= 2)
        largest[k] = fmaxf(largest[k], __shfl_xor_sync(FULL_WARP, largest[k], offset));
      const float factor = state[k].move_to(fmaxf(largest[k] - Reference::HEADROOM, state[k].reference));
      UNROLL for (int p = 0; p < PRODUCTS; p++) output[p][k] *= factor, output[p][k + 2] *= factor;
    }
  }
};
