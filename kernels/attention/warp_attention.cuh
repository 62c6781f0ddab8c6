// The main loop of every decode kernel: one warp, one KV head, tiles of up to 8 query rows, tiles of 16
// tokens. What is read and converted of K and V serves all of the warp's tiles of query rows.
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

// What an attention is made of. Element: of q. ROW_TILES: tiles of 8 query rows a warp. SOFT_CAP: scores
// pass through cap * tanh(score / cap).
template <class Element_, class KeyFormat_, class ValueFormat_, class Reference_, int ROW_TILES_ = 1,
          bool SOFT_CAP_ = false>
struct AttentionTypes {
  using Element = Element_;
  using KeyFormat = KeyFormat_;
  using ValueFormat = ValueFormat_;
  using Reference = Reference_;
  static constexpr int ROW_TILES = ROW_TILES_;
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

// Each of a lane's columns has a range of its own within the common one.
template <int ROW_TILES>
struct RowMask {
  TokenRange range;
  TokenRange row[2 * ROW_TILES];

  DEVICE bool live(int k, u32 position) const { return row[k].contains(position); }
};

template <class Types>
struct WarpAttention {
  using KeyFormat = typename Types::KeyFormat;
  using ValueFormat = typename Types::ValueFormat;
  using Reference = typename Types::Reference;
  static constexpr int ROW_TILES = Types::ROW_TILES;
  static constexpr int COLUMNS = 2 * ROW_TILES;  // of a lane
  static constexpr int PRODUCTS = Types::PRODUCTS;
  using Row = QueryRow<typename Types::Element, typename KeyFormat::Key>;

  Lane lane;
  QueryTiles<typename Types::Element, KeyFormat, ROW_TILES> query;
  float score_factor[COLUMNS];  // scores to log2 units
  float soft_cap;               // log2 units
  float inverse_cap;
  SoftmaxState
      state[COLUMNS];  // of row lane.column(k); `sum` only over this lane's tokens until finish()
  float output[ROW_TILES][PRODUCTS][4];

  // row_of(t): this lane's row of q of tile t.
  template <class RowOf>
  DEVICE void begin(RowOf row_of, ScoreRule rule) {
    lane = Lane::current();
    UNROLL for (int t = 0; t < ROW_TILES; t++) make_query_tile(query, t, row_of(t), lane);
    // Neither 0 nor infinite, and nor is its inverse.
    soft_cap = fminf(fmaxf(rule.soft_cap * LOG2_E, FLOAT_MIN), FLOAT_MAX);
    inverse_cap = Types::SOFT_CAP ? 1.0f / soft_cap : 0.0f;
    UNROLL for (int k = 0; k < COLUMNS; k++) {
      // Kept finite: an infinite factor would turn a score of zero into NaN.
      const float factor = rule.scale * query.restore[k] * (LOG2_E * KeyFormat::OPERAND_SHIFT);
      score_factor[k] = fminf(fmaxf(factor, -FLOAT_MAX), FLOAT_MAX);
      state[k] = SoftmaxState::empty();
    }
    UNROLL for (int t = 0; t < ROW_TILES; t++) {
      UNROLL for (int p = 0; p < PRODUCTS; p++)
        output[t][p][0] = output[t][p][1] = output[t][p][2] = output[t][p][3] = 0.0f;
    }
  }

  // Folds in TILES tiles at once: more independent work for the scheduler than one tile gives. `source`
  // says where tile n begins (position(n)) and where this lane's rows of it lie (keys(n), values(n)).
  // MASKED: some tokens may not count. `between` runs after the last use of K, before the first of V.
  template <int TILES, bool MASKED, class Source, class Mask, class Between>
  DEVICE void fold(const Source& source, const Mask& mask, Between between) {
    float scores[TILES][ROW_TILES][4];  // log2 units
    UNROLL for (int n = 0; n < TILES; n++) {
      if (MASKED && source.position(n) >= mask.range.end) {  // nothing of this tile counts
        UNROLL for (int i = 0; i < 4 * ROW_TILES; i++) scores[n][i / 4][i % 4] = negative_infinity();
        continue;
      }
      const KeyRows keys = source.keys(n);
      score_tile(scores[n], keys);
      UNROLL for (int t = 0; t < ROW_TILES; t++) {
        UNROLL for (int i = 0; i < 4; i++) {
          if (!keys.valid[i / 2]) scores[n][t][i] = quiet_nan();
          const u32 position = source.position(n) + lane.key_token() + 8 * (i / 2);
          if (MASKED && !mask.live(2 * t + i % 2, position)) scores[n][t][i] = negative_infinity();
        }
      }
    }
    follow(scores);
    between();

    UNROLL for (int n = 0; n < TILES; n++) {
      if (MASKED && source.position(n) >= mask.range.end) continue;
      u32 weights[ROW_TILES][2];
      UNROLL for (int t = 0; t < ROW_TILES; t++) weigh(weights[t], scores[n][t], state + 2 * t);

      bool dead[4] = {false, false, false, false};
      if (MASKED) {
        UNROLL for (int j = 0; j < 4; j++)
          dead[j] = !mask.range.contains(source.position(n) + lane.value_token(j));
      }
      const ValueRows values = source.values(n);
      ValueFormat::accumulate(output, values.row, lane.row, dead, weights);
    }
  }

  // Sums complete over the warp's tokens: all lanes of a column hold the same state.
  DEVICE void finish() {
    UNROLL for (int k = 0; k < COLUMNS; k++) {
      UNROLL for (int offset = 4; offset < 32; offset *= 2)
        state[k].sum += __shfl_xor_sync(FULL_WARP, state[k].sum, offset);
    }
  }

  // Makes the results of all rows NaN.
  DEVICE void poison() {
    UNROLL for (int k = 0; k < COLUMNS; k++) state[k].sum = quiet_nan();
  }

 private:
  // Rounded before the reference is taken off: in one fused operation, equal scores beyond 2^27 would differ
  // from their own maximum by more than F16 holds.
  DEVICE void score_tile(float (&scores)[ROW_TILES][4], const KeyRows& keys) const {
    UNROLL for (int i = 0; i < 4 * ROW_TILES; i++) scores[i / 4][i % 4] = 0.0f;
    KeyFormat::score(scores, keys.row[0], keys.row[1], lane.quad, query.fragment);
    if constexpr (decltype(query)::HAS_REST)
      KeyFormat::score(scores, keys.row[0], keys.row[1], lane.quad, query.rest);
    UNROLL for (int i = 0; i < 4 * ROW_TILES; i++) {
      float& score = scores[i / 4][i % 4];
      score = __fmul_rn(score, score_factor[2 * (i / 4) + i % 2]);
      if constexpr (Types::SOFT_CAP) score = soft_capped(score, soft_cap, inverse_cap);
    }
  }

  // Weights of one tile of query rows as the B operand; `columns` are its two states.
  static DEVICE void weigh(u32 (&weights)[2], const float (&scores)[4], SoftmaxState* columns) {
    float w[4];
    UNROLL for (int i = 0; i < 4; i++) w[i] = ptx::exp2_approx(scores[i] - columns[i % 2].reference);
    columns[0].sum += w[0] + w[2];
    columns[1].sum += w[1] + w[3];
    weights[0] = ptx::movmatrix_trans(ValueFormat::pack_weights(w[0], w[1]));
    weights[1] = ptx::movmatrix_trans(ValueFormat::pack_weights(w[2], w[3]));
  }

  // Moves the references where the new scores demand it.
  template <int TILES>
  DEVICE void follow(const float (&scores)[TILES][ROW_TILES][4]) {
    float largest[COLUMNS];
    bool grew = false;
    UNROLL for (int k = 0; k < COLUMNS; k++) {
      const int t = k / 2, i = k % 2;
      largest[k] = fmaxf(scores[0][t][i], scores[0][t][i + 2]);
      UNROLL for (int n = 1; n < TILES; n++)
        largest[k] = fmaxf(largest[k], fmaxf(scores[n][t][i], scores[n][t][i + 2]));
      grew |= largest[k] - Reference::HEADROOM - state[k].reference > Reference::GROWTH;
    }
    if (!__any_sync(FULL_WARP, grew)) return;
    UNROLL for (int k = 0; k < COLUMNS; k++) {
      UNROLL for (int offset = 4; offset < 32; offset *= 2)
        largest[k] = fmaxf(largest[k], __shfl_xor_sync(FULL_WARP, largest[k], offset));
      const float factor = state[k].move_to(fmaxf(largest[k] - Reference::HEADROOM, state[k].reference));
      UNROLL for (int p = 0; p < PRODUCTS; p++) {
        float(&o)[4] = output[k / 2][p];
        o[k % 2] *= factor, o[k % 2 + 2] *= factor;
      }
    }
  }
};
