// The main loop of every decode kernel: one warp, one KV head, up to 8 query heads, tiles of 16 tokens.
#pragma once
#include "attention/fragments.cuh"
#include "attention/online_softmax.cuh"
#include "attention/query.cuh"

// How the running reference follows the scores.
// Lazy: it is moved only when a score outgrows it by 2^8, and is set 2^4 below the largest score then,
// so that small weights keep their bits in F16. Exact: it is always the largest score so far.
struct LazyReference {
  static constexpr float HEADROOM = 4.0f;
  static constexpr float GROWTH = 8.0f;
};
struct ExactReference {
  static constexpr float HEADROOM = 0.0f;
  static constexpr float GROWTH = 0.0f;
};

template <class Format, int HEAD_DIM, class Reference>
struct WarpAttention {
  static constexpr int PRODUCTS = HEAD_DIM / 16;

  Lane lane;
  QueryTile<HEAD_DIM> query;
  float score_factor[2];  // scores to log2 units, for heads 2c and 2c + 1
  SoftmaxState state[2];  // of heads 2c, 2c + 1; `sum` only over this lane's tokens until finish()
  float output[PRODUCTS][4];

  // log2_scale: softmax scale times log2(e), times whatever K's operands lack.
  DEVICE void begin(const QueryRow<HEAD_DIM>& row, float log2_scale) {
    lane = Lane::current();
    query = make_query_tile<Format>(row, lane);
    UNROLL for (int k = 0; k < 2; k++) {
      score_factor[k] = log2_scale * Format::OPERAND_SHIFT * query.restore[k];
      state[k] = SoftmaxState::empty();
    }
    UNROLL for (int p = 0; p < PRODUCTS; p++)
      output[p][0] = output[p][1] = output[p][2] = output[p][3] = 0.0f;
  }

  // Folds in TILES tiles at once: more independent work for the scheduler than one tile gives. `source`
  // says where tile n begins (position(n)) and where this lane's rows of it lie (keys(n), values(n)).
  // Tokens outside the range do not count; MASKED: there may be some. `between` runs after the last use of
  // K, before the first of V.
  template <int TILES, bool MASKED, class Source, class Between>
  DEVICE void fold(const Source& source, TokenRange range, Between between) {
    const auto live = [=](u32 position) { return position >= range.begin && position < range.end; };
    float scores[TILES][4];
    UNROLL for (int n = 0; n < TILES; n++) {
      if (MASKED && source.position(n) >= range.end) {  // nothing of this tile counts
        UNROLL for (int i = 0; i < 4; i++) scores[n][i] = negative_infinity();
        continue;
      }
      const KeyRows keys = source.keys(n);
      UNROLL for (int i = 0; i < 4; i++) scores[n][i] = 0.0f;
      Format::score(scores[n], keys.row[0], keys.row[1], lane.quad, query.fragment);
      UNROLL for (int i = 0; i < 2; i++) {
        if (!keys.valid[i]) scores[n][2 * i] = scores[n][2 * i + 1] = quiet_nan();
        if (MASKED && !live(source.position(n) + lane.key_token() + 8 * i))
          scores[n][2 * i] = scores[n][2 * i + 1] = negative_infinity();
      }
    }
    follow(scores);
    between();

    UNROLL for (int n = 0; n < TILES; n++) {
      if (MASKED && source.position(n) >= range.end) continue;
      float weights[4];
      UNROLL for (int i = 0; i < 4; i++)
        weights[i] = ptx::exp2_approx(fmaf(scores[n][i], score_factor[i & 1], -state[i & 1].reference));
      state[0].sum += weights[0] + weights[2];
      state[1].sum += weights[1] + weights[3];
      const u32 weights0 = ptx::movmatrix_trans(Format::pack_weights(weights[0], weights[1]));
      const u32 weights1 = ptx::movmatrix_trans(Format::pack_weights(weights[2], weights[3]));

      bool dead[4] = {false, false, false, false};
      if (MASKED) {
        UNROLL for (int j = 0; j < 4; j++) dead[j] = !live(source.position(n) + lane.value_token(j));
      }
      const ValueRows values = source.values(n);
      Format::accumulate(output, values.row, lane.row, dead, weights0, weights1);
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
  // Moves the references where the new scores demand it.
  template <int TILES>
  DEVICE void follow(const float (&scores)[TILES][4]) {
    float largest[2];
    bool grew = false;
    UNROLL for (int k = 0; k < 2; k++) {
      float score = fmaxf(scores[0][k], scores[0][k + 2]);
      UNROLL for (int n = 1; n < TILES; n++) score = fmaxf(score, fmaxf(scores[n][k], scores[n][k + 2]));
      largest[k] = score * score_factor[k];
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
