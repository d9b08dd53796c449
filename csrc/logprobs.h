// Log-probabilities of one row: the rule of src/pilotfish/sampling.py, bit for bit. Compiled once per path.
//
// The weights are whole numbers, so that their sum knows no order; loops are plain, as in sampler.h.
#pragma once

#include "kernels.h"
#include "sampler.h"

namespace pilotfish::PF_PATH {

// The ids of the `count` highest logits, descending, of equal ones the lowest ids; count from 1 to n. False where there
// is a NaN.
inline bool find_likeliest(const float* logits, int n, int count, int32_t* ids) {
  const Row row{logits, n, 0.0, 1.0};
  int found = 0;
  float least = -kInfinity;  // once `count` are found, a later one must be higher
  for (int first = 0; first < n; first += kTokens) {
    float padded[kTokens];
    const float* x = logits_at(row, first, padded);
    int any = found < count;
    for (int j = 0; j < kTokens; ++j) any |= !(x[j] <= least);
    if (!any) continue;
    for (int j = 0; j < kTokens && first + j < n; ++j) {
      if (x[j] != x[j]) return false;
      if (found == count && x[j] <= least) continue;
      if (found < count) ++found;
      int place = found - 1;
      for (; place > 0 && logits[ids[place - 1]] < x[j]; --place) ids[place] = ids[place - 1];
      ids[place] = first + j;
      if (found == count) least = logits[ids[count - 1]];
    }
  }
  return true;
}

// The sum of the weights of a row at temperature 1.
inline uint64_t mass_of(const float* logits, int n, float highest) {
  const Row row{logits, n, highest, 1.0};
  uint64_t sums[kTokens] = {};
  for (int first = 0; first < n; first += kTokens) {
    float padded[kTokens];
    const float* x = logits_at(row, first, padded);
    int any = 0, all = 1;
    for (int j = 0; j < kTokens; ++j) {
      any |= x[j] - highest > -29.0f;  // e^-29 rounds to a weight of 0
      all &= x[j] - highest > -63.0f;
    }
    if (!any) continue;
    double scores[kTokens];
    for (int j = 0; j < kTokens; ++j) scores[j] = static_cast<double>(x[j]) - row.highest;
    if (!all)
      for (int j = 0; j < kTokens; ++j) scores[j] = scores[j] > -64.0 ? scores[j] : -64.0;
    uint64_t weights[kTokens];
    weigh(scores, weights);
    for (int j = 0; j < kTokens; ++j) sums[j] += weights[j];
  }
  for (int j = 1; j < kTokens; ++j) sums[0] += sums[j];
  return sums[0];
}

inline bool log_probabilities(const float* logits, int n, int count, double* normaliser, int32_t* ids) {
  int32_t likeliest;
  if (count == 0) ids = &likeliest;
  if (!find_likeliest(logits, n, count > 0 ? count : 1, ids)) return false;
  const float highest = logits[ids[0]];
  if (!(highest - highest == 0.0f)) return false;
  *normaliser = highest + natural_log(static_cast<double>(mass_of(logits, n, highest)) * 0x1p-40);
  return true;
}

}  // namespace pilotfish::PF_PATH
