// The token of one row: the rule of src/pilotfish/sampling.py, token for token. Compiled once per path.
//
// What decides is whole numbers, comparisons and double arithmetic in the order of sampling.py, without contraction;
// floats only dismiss tokens that can not win. The loops over kTokens are plain so that compilers vectorise them.
//
// Nothing is sorted and nothing is stored. Filters keep the top of one order, so a `Top` says all about them. Where
// the nucleus ends is never looked for: the winner of a race over more tokens either lies in the nucleus, and has then
// won that race too, or the tokens before it are the next to race. That takes 1 + log(1 / p) races on average.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace pilotfish::PF_PATH {

constexpr int kTokens = 64;  // tokens looked at together
#if defined(PF_AVX512)
constexpr int kTogether = 32;  // numbers that the registers hold on their way to a weight
#else
constexpr int kTogether = 16;
#endif
constexpr float kInfinity = __builtin_inff();
constexpr uint64_t kGamma = 0x9E3779B97F4A7C15;
constexpr double kLn2 = 0x1.62e42fefa39efp-1, kLn2High = 0x1.62e42feep-1, kLn2Low = 0x1.a39ef35793c76p-33;

// The likeliest tokens: all above `logit`, and of those equal to it the ids below `end`.
struct Top {
  float logit;
  int end;
};

// The row and what to do with it.
struct Row {
  const float* x;
  int n;
  double highest;
  double temperature;
};

inline uint64_t bits_of_double(double x) {
  uint64_t bits;
  memcpy(&bits, &x, 8);
  return bits;
}

inline double double_of_bits(uint64_t bits) {
  double x;
  memcpy(&x, &bits, 8);
  return x;
}

// Whole numbers in the order of the floats, -0 just below 0, and back. NaN lies beyond the infinities.
inline int32_t place_of(float x) {
  const int32_t bits = static_cast<int32_t>(float_bits(x));
  return bits ^ (bits >> 31 & 0x7fffffff);
}

inline float float_at(int32_t place) { return bits_float(static_cast<uint32_t>(place ^ (place >> 31 & 0x7fffffff))); }

inline double score_of(const Row& row, float logit) {
  return (static_cast<double>(logit) - row.highest) / row.temperature;
}

// Natural logarithm of a positive normal number: sampling._log.
inline double natural_log(double x) {
  const uint64_t bits = bits_of_double(x);
  const int64_t exponent = static_cast<int64_t>(bits - bits_of_double(0x1.6a09e667f3bcdp-1)) >> 52;
  const double f = double_of_bits(bits - (static_cast<uint64_t>(exponent) << 52)) - 1.0;
  const double s = f / (f + 2.0), z = s * s;
  double series = 1.0 / 17.0;
  for (int k = 15; k >= 3; k -= 2) series = series * z + 1.0 / k;
  const double n = static_cast<double>(exponent), twice = s + s;
  return n * kLn2High + (n * kLn2Low + (twice + twice * (z * series)));
}

// round(2^40 e^score) of kTokens scores from -64 to 0: sampling._weights. Adding 1.5 * 2^52 or 2^52 rounds to a whole
// number. A few vectors go through each step together: one at a time, processors wait for the chain of steps.
inline void weigh(const double* scores, uint64_t* weights) {
  constexpr double kPowerOf2[] = {0x1.41fbbc11c4bd0p-13,
                                  0x1.5f3e530815329p-10,
                                  0x1.3b2d4cf1dc324p-7,
                                  0x1.c6aee88e6a27bp-5,
                                  0x1.ebfbdc3c3035cp-3,
                                  0x1.62e430af272cfp-1,
                                  1.0};
  for (int first = 0; first < kTokens; first += kTogether) {
    double f[kTogether], scale[kTogether], power[kTogether];
    for (int j = 0; j < kTogether; ++j) {
      const double t = scores[first + j] * 0x1.71547652b82fep+0, shifted = t + 0x1.8p52;
      f[j] = t - (shifted - 0x1.8p52);
      scale[j] = double_of_bits((bits_of_double(shifted) << 52) + bits_of_double(0x1p40));
      power[j] = kPowerOf2[0];
    }
    PF_UNROLL
    for (int k = 1; k < 7; ++k)
      for (int j = 0; j < kTogether; ++j) power[j] = power[j] * f[j] + kPowerOf2[k];
    for (int j = 0; j < kTogether; ++j)
      weights[first + j] = bits_of_double(power[j] * scale[j] + 0x1p52) - bits_of_double(0x1p52);
  }
}

// Output `index` of the SplitMix64 stream at `start`, where `step` is (index + 1) * kGamma: sampling._splitmix64.
inline uint64_t splitmix64(uint64_t start, uint64_t step) {
  uint64_t z = start + step;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return z ^ z >> 31;
}

inline double gumbel_of(uint64_t bits) {
  return -natural_log(-natural_log((static_cast<double>(static_cast<int64_t>(bits >> 12)) + 0.5) * 0x1p-52));
}

// kTokens logits from `first` on; beyond the row -inf, which is never kept.
inline const float* logits_at(const Row& row, int first, float* padded) {
  if (row.n - first >= kTokens) return row.x + first;
  for (int j = 0; j < kTokens; ++j) padded[j] = first + j < row.n ? row.x[first + j] : -kInfinity;
  return padded;
}

// The highest logit, 0 for -0; whether it is finite and nothing is NaN.
inline bool find_highest(const float* x, int n, float* highest) {
  int32_t most = INT32_MIN, least = INT32_MAX;
  for (int i = 0; i < n; ++i) {
    const int32_t place = place_of(x[i]);
    most = place > most ? place : most;
    least = place < least ? place : least;
  }
  *highest = float_at(most) + 0.0f;
  return least >= place_of(-kInfinity) && most > place_of(-kInfinity) && most < place_of(kInfinity);
}

inline int count_from(const Row& row, float logit) {
  int count = 0;
  for (int i = 0; i < row.n; ++i) count += row.x[i] >= logit;
  return count;
}

// The id of the token after the first `skipped` of those with this finite logit.
inline int id_of(const Row& row, float logit, int skipped) {
  for (int first = 0;; first += kTokens) {
    float padded[kTokens];
    const float* x = logits_at(row, first, padded);
    int equal = 0;
    for (int j = 0; j < kTokens; ++j) equal += x[j] == logit;
    if (equal <= skipped) {
      skipped -= equal;
      continue;
    }
    for (int j = 0;; ++j)
      if (x[j] == logit && skipped-- == 0) return first + j;
  }
}

// The lowest float in (low, high] for which `excess` is not positive, as it is for high, or one for which it is 0.
template <typename Excess>
inline float lowest(float low, float high, Excess excess) {
  int64_t below = place_of(low), found = place_of(high);
  while (found - below > 1) {
    const int64_t middle = (below + found) >> 1;
    const int sign = excess(float_at(static_cast<int32_t>(middle)));
    (sign > 0 ? below : found) = middle;
    if (sign == 0) break;
  }
  return float_at(static_cast<int32_t>(found));
}

// The tokens whose score is at least `least`, itself above -inf.
inline Top above_score(const Row& row, double least) {
  const float highest = static_cast<float>(row.highest);
  return {lowest(-kInfinity, highest, [&](float logit) { return score_of(row, logit) >= least ? -1 : 1; }), row.n};
}

// The first k tokens of a top that has more, those of equal logits by ascending id.
inline Top first_of(const Row& row, Top top, int k) {
  const float beyond = float_at(place_of(static_cast<float>(row.highest)) + 1);
  const float logit = lowest(top.logit, beyond, [&](float from) { return count_from(row, from) - k; });
  const int missing = k - count_from(row, logit);
  if (missing == 0) return {logit, row.n};
  const float next = float_at(place_of(logit) - 1);  // more tokens than are missing have this logit
  return {next, id_of(row, next, missing)};
}

// The sum of the weights of a top, and of those of its tokens that come before `token`.
struct Masses {
  uint64_t all;
  uint64_t before;
};

inline Masses masses_of(const Row& row, Top top, int token) {
  uint64_t all[kTokens] = {}, before[kTokens] = {};
  const float logit = row.x[token];
  for (int first = 0; first < row.n; first += kTokens) {
    float padded[kTokens], kept[kTokens];
    int32_t ahead[kTokens];
    const float* x = logits_at(row, first, padded);
    int any = 0;
    for (int j = 0; j < kTokens; ++j) {
      const int in = (x[j] > top.logit) | ((x[j] == top.logit) & (first + j < top.end));
      kept[j] = in ? x[j] : -kInfinity;
      ahead[j] = -((x[j] > logit) | ((x[j] == logit) & (first + j < token)));
      any |= in;
    }
    if (!any) continue;
    double scores[kTokens];  // in memory: compilers would branch for the bound, whose weight is 0, and not vectorise
    for (int j = 0; j < kTokens; ++j) {
      const double score = score_of(row, kept[j]);
      scores[j] = score > -64.0 ? score : -64.0;
    }
    uint64_t weights[kTokens];
    weigh(scores, weights);
    for (int j = 0; j < kTokens; ++j) {
      all[j] += weights[j];
      before[j] += weights[j] & static_cast<uint64_t>(static_cast<int64_t>(ahead[j]));
    }
  }
  for (int j = 1; j < kTokens; ++j) {
    all[0] += all[j];
    before[0] += before[j];
  }
  return {all[0], before[0]};
}

// The token of a top whose score + noise is greatest, of equal ones the lowest id. `likeliest` is the first of the top.
inline int race(const Row& row, Top top, uint64_t key, int likeliest) {
  uint64_t steps[kTokens];
  for (int j = 0; j < kTokens; ++j) steps[j] = static_cast<uint64_t>(j + 1) * kGamma;
  // Upper bounds in floats: of the score, the slope a little too flat; and of the noise, with t = 1 - u,
  //   -log(-log(u)) <= -log(t) <= ln2 * (127 - bits of the float t / 2^23)
  // as a float's bits are its exponent and a secant of the logarithm. t is cut to 31 bits and counted in 2^-31. What
  // rounding does to the sum, where it matters, is far below kSlack.
  constexpr float kSlack = 1e-3f, kNoiseSlope = static_cast<float>(-kLn2 * 0x1p-23);
  constexpr float kNoiseAtZero = static_cast<float>(kLn2 * (127 + 31)) + kSlack;
  const double inverse = (1.0 - 0x1p-20) / row.temperature;
  const float slope = inverse < 1e38 ? static_cast<float>(inverse) : 1e38f;
  const float highest = static_cast<float>(row.highest);
  int winner = likeliest;
  double best = gumbel_of(splitmix64(key, static_cast<uint64_t>(likeliest + 1) * kGamma));
  float needed = static_cast<float>(best);
  for (int first = 0; first < row.n; first += kTokens) {
    float padded[kTokens], bound[kTokens];
    const float* x = logits_at(row, first, padded);
    int any = 0;
    for (int j = 0; j < kTokens; ++j) any |= x[j] >= top.logit;
    if (!any) continue;
    const uint64_t start = key + static_cast<uint64_t>(first) * kGamma;
    int32_t t[kTokens];
    for (int j = 0; j < kTokens; ++j) t[j] = static_cast<int32_t>(~splitmix64(start, steps[j]) >> 33);
    any = 0;
    for (int j = 0; j < kTokens; ++j) {
      const int32_t bits = static_cast<int32_t>(float_bits(static_cast<float>(t[j])));
      bound[j] = (x[j] - highest) * slope + (kNoiseAtZero + kNoiseSlope * static_cast<float>(bits));
      any |= (bound[j] >= needed) & (x[j] >= top.logit);
    }
    if (!any) continue;
    for (int j = 0; j < kTokens; ++j) {
      const int token = first + j;
      if (bound[j] < needed || x[j] < top.logit || (x[j] == top.logit && token >= top.end)) continue;
      const double sum = score_of(row, x[j]) + gumbel_of(splitmix64(start, steps[j]));
      if (sum < best || (sum == best && token > winner)) continue;
      winner = token;
      best = sum;
      needed = static_cast<float>(best);
    }
  }
  return winner;
}

inline int sample(const float* logits, int n, const Sampling& rule) {
  float highest;
  if (!find_highest(logits, n, &highest)) return -1;
  const Row row{logits, n, highest, rule.temperature};
  const int likeliest = id_of(row, highest, 0);
  if (rule.temperature == 0.0) return likeliest;
  Top top = above_score(row, rule.min_p >= 0x1p-1022 ? natural_log(rule.min_p) : -0x1.fffffffffffffp1023);
  if (rule.top_k && count_from(row, top.logit) > rule.top_k) top = first_of(row, top, rule.top_k);
  const uint64_t key = splitmix64(splitmix64(rule.seed, kGamma), (rule.position + 1) * kGamma);
  int token = race(row, top, key, likeliest);
  if (rule.top_p == 1.0) return token;
  // The nucleus is the shortest top that holds enough; a token is in it if those before it hold less.
  const Top weighty = above_score(row, -29.0);  // e^-29 rounds to a weight of 0
  Masses masses = masses_of(row, top.logit >= weighty.logit ? top : weighty, token);
  const double share = rule.top_p * static_cast<double>(masses.all);
  uint64_t enough = static_cast<uint64_t>(share);
  enough += static_cast<double>(enough) < share;
  enough = enough < masses.all ? enough : masses.all;
  while (masses.before >= enough) {
    top = {logits[token], token};
    token = race(row, top, key, likeliest);
    masses = masses_of(row, top, token);
  }
  return token;
}

}  // namespace pilotfish::PF_PATH
