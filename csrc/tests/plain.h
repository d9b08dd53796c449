// The numeric contract in plain loops: what every path must give to the bit.
#pragma once

#include <cmath>
#include <vector>

namespace pilotfish {

// simd.h, exp
inline float plain_exp(float x) {
  if (!(x > -87.3f)) x = -87.3f;
  const float n = std::nearbyint(x * 1.44269504088896341f);
  float r = std::fma(n, -0.693359375f, x);
  r = std::fma(n, 2.12194440e-4f, r);
  float p = 1.0f / 5040.0f;
  for (const float term : {1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f})
    p = std::fma(p, r, term);
  return p * std::ldexp(1.0f, static_cast<int>(n));
}

// Sixteen lanes upwards, then lane i + lane i+8, +4, +2, +1.
inline float plain_sum(const float* lanes) {
  float sums[16];
  for (int i = 0; i < 16; ++i) sums[i] = lanes[i];
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  return sums[0];
}

}  // namespace pilotfish
