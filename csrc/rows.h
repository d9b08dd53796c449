// Kernels that work on one row at a time: quantize, norm, gated, rope_kv, argmax. Compiled once per path.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace pilotfish::PF_PATH {

inline void quantize(const float* x, int n, Group* out, int stride) {
  const Vf most = set1(127.0f), least = set1(-127.0f);
  for (const float* end = x + n; x < end; x += kGroup, out += stride) {
    const Vf low = load(x), high = load(x + kLanes);
    const float greatest = reduce_max(max(abs(low), abs(high)));
    // So small a group counts as zero: 127 / greatest would overflow.
    const bool zero = greatest < 0x1p-100f;
    const Vf inverse = set1(zero ? 0.0f : 127.0f / greatest);
    // Infinities and NaN, which `greatest` may not show, make the scale NaN and so reach the output; q stays bounded.
    const float finite = reduce_add(mul(add(abs(low), abs(high)), set1(0.0f)));
    out->scale = (zero ? 0.0f : greatest / 127.0f) + finite;
    const Vi ints[2] = {to_int(max(min(mul(low, inverse), most), least)),
                        to_int(max(min(mul(high, inverse), most), least))};
    int32_t sum = 0, before = 0;
    for (int half = 0; half < 2; ++half) {
      store_i8(out->q + half * kLanes, ints[half]);
      sum += static_cast<int32_t>(reduce_add(to_float(ints[half])));  // exact: small integers
      out->minus_halves[half] = -kZeroByHalf * (sum - before);
      before = sum;
    }
    out->minus = -sum;
    out->offset = out->scale * static_cast<float>(sum);
  }
}

inline void norm(const float* x, const float* weight, float eps, int n, float* out) {
  Vf squares = set1(0.0f);
  for (int i = 0; i < n; i += kLanes) {
    const Vf v = load_first(x + i, n - i);
    squares = fma(v, v, squares);
  }
  const float mean = reduce_add(squares) / static_cast<float>(n);
  const Vf inverse = set1(1.0f / __builtin_sqrtf(mean + eps));
  for (int i = 0; i < n; i += kLanes) {
    const Vf v = mul(mul(load_first(x + i, n - i), inverse), load_first(weight + i, n - i));
    store_first(out + i, n - i, v);
  }
}

// silu(x) = x / (1 + e^-x)
inline void gated(const float* gate, const float* up, int n, float* out) {
  const Vf one = set1(1.0f), zero = set1(0.0f), greatest = set1(88.0f);
  for (int i = 0; i < n; i += kLanes) {
    const Vf x = load_first(gate + i, n - i);
    const Vf silu = div(x, add(one, exp(min(sub(zero, x), greatest))));
    store_first(out + i, n - i, mul(silu, load_first(up + i, n - i)));
  }
}

// Turns the pairs (i, i + n / 2).
inline void rotate(float* x, int n, const float* cos, const float* sin) {
  const int half = n / 2;
  for (int i = 0; i < half; i += kLanes) {
    const Vf a = load_first(x + i, half - i), b = load_first(x + half + i, half - i);
    const Vf c = load_first(cos + i, half - i), s = load_first(sin + i, half - i);
    store_first(x + i, half - i, fma(a, c, mul(b, sub(set1(0.0f), s))));
    store_first(x + half + i, half - i, fma(b, c, mul(a, s)));
  }
}

// Halves of 16 floats. The bounds keep infinities and NaN out of the cache, where later rows would read them.
inline void store_bounded(uint16_t* p, Vf a) { store_half(p, min(max(a, set1(-65504.0f)), set1(65504.0f))); }

inline void rope_kv(float* qkv, int head0, int head1, int heads, const float* q_norm, const float* k_norm, float eps,
                    const float* cos, const float* sin, const KvLayer& kv, int block, int offset) {
  const int n = kv.head_dim;
  for (int head = head0; head < head1; ++head) {
    float* x = qkv + head * n;
    const int key = head - heads, value = key - kv.kv_heads;
    if (value < 0) {
      const float* weight = key < 0 ? q_norm : k_norm;
      if (weight) norm(x, weight, eps, n, x);
      rotate(x, n, cos, sin);
    }
    if (key < 0) continue;
    const size_t tile = kv.tile(block, value < 0 ? key : value);
    for (int i = 0; i < n; i += kLanes) {
      if (value >= 0) {
        store_bounded(kv.v + tile + offset * n + i, load(x + i));
        continue;
      }
      uint16_t halves[kLanes];
      store_bounded(halves, load(x + i));
      for (int lane = 0; lane < kLanes; ++lane) kv.k[tile + (i + lane) * kBlockSlots + offset] = halves[lane];
    }
  }
}

inline int argmax(const float* x, int n, float* best) {
  Vf greatest = set1(-__builtin_inff());
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) greatest = max(load(x + i), greatest);  // keeps the second where x is NaN
  *best = reduce_max(greatest);
  for (; i < n; ++i)
    if (x[i] > *best) *best = x[i];
  for (i = 0; i < n; ++i)
    if (x[i] == *best) return i;
  return 0;
}

}  // namespace pilotfish::PF_PATH
