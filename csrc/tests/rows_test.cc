// The row kernels against plain loops that follow their definitions, bit for bit on every path this machine runs.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "../kernels.h"
#include "check.h"
#include "plain.h"

using namespace pilotfish;

namespace {

constexpr float kInfinity = INFINITY;

using Floats = std::vector<float>;

Floats normals(std::mt19937& random, int n, float spread) {
  std::normal_distribution<float> normal(0.0f, spread);
  Floats x(n);
  for (float& v : x) v = normal(random);
  return x;
}

bool same(const Floats& a, const Floats& b) { return memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0; }

Floats plain_norm(const Floats& x, const Floats& weight, float eps) {
  float lanes[16] = {};
  for (size_t i = 0; i < x.size(); ++i) lanes[i % 16] = std::fma(x[i], x[i], lanes[i % 16]);
  const float inverse = 1.0f / std::sqrt(plain_sum(lanes) / static_cast<float>(x.size()) + eps);
  Floats out(x.size());
  for (size_t i = 0; i < x.size(); ++i) out[i] = x[i] * inverse * weight[i];
  return out;
}

uint16_t nearest_half(float x) {
  // The candidate whose distance is least, the even one of two: halves below 65504 in order of size.
  const double size = std::fabs(static_cast<double>(x));
  auto value = [](int half) {
    const int exponent = half >> 10, mantissa = half & 1023;
    return exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
  };
  int low = 0, high = 0x7bff;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (value(middle) <= size)
      low = middle;
    else
      high = middle - 1;
  }
  if (low < 0x7bff) {
    const double below = size - value(low), above = value(low + 1) - size;
    if (above < below || (above == below && low % 2)) ++low;
  }
  return static_cast<uint16_t>(low | (std::signbit(x) ? 0x8000 : 0));
}

void test_quantize(const Kernels& kernels, std::mt19937& random) {
  const int n = 32 * 9;
  Floats x = normals(random, n, 1.0f);
  for (int i = 0; i < 32; ++i) {
    x[32 + i] = 0.0f;
    x[64 + i] *= 1e-35f;
    x[96 + i] *= 1e30f;
    x[128 + i] = static_cast<float>(i - 16) + 0.5f;  // ties, once the group's scale is 1
  }
  x[128] = 127.0f;
  const int stride = 3;
  std::vector<Group> groups(n / 32 * stride);
  kernels.quantize(x.data(), n, groups.data(), stride);
  for (int group = 0; group < n / 32; ++group) {
    const Group& got = groups[group * stride];
    float greatest = 0.0f;
    for (int i = 0; i < 32; ++i) greatest = std::max(greatest, std::fabs(x[group * 32 + i]));
    const bool zero = greatest < 0x1p-100f;
    CHECK(got.scale == (zero ? 0.0f : greatest / 127.0f));
    for (int i = 0; i < 32; ++i) {
      const float scaled = zero ? 0.0f : x[group * 32 + i] * (127.0f / greatest);
      CHECK(got.q[i] == static_cast<int>(std::nearbyint(std::clamp(scaled, -127.0f, 127.0f))));
    }
    int sums[2] = {};
    for (int i = 0; i < 32; ++i) sums[i / 16] += got.q[i];
    CHECK(got.minus == -sums[0] - sums[1]);
    CHECK(got.offset == got.scale * static_cast<float>(sums[0] + sums[1]));
    for (int half = 0; half < 2; ++half) CHECK(got.minus_halves[half] == -32 * sums[half]);
    for (int other = 1; other < stride; ++other) CHECK(groups[group * stride + other].minus == 0);
  }
}

void test_norm(const Kernels& kernels, std::mt19937& random) {
  for (const int n : {1, 15, 16, 17, 48, 64, 576, 1000}) {
    const Floats x = normals(random, n, 3.0f), weight = normals(random, n, 1.0f);
    Floats out(n);
    kernels.norm(x.data(), weight.data(), 1e-5f, n, out.data());
    CHECK(same(out, plain_norm(x, weight, 1e-5f)));
  }
}

void test_gated(const Kernels& kernels, std::mt19937& random) {
  for (const int n : {1, 16, 33, 96}) {
    Floats x = normals(random, 2 * n, 8.0f);
    if (n > 2) {
      x[0] = -200.0f;
      x[1] = 300.0f;
    }
    Floats out(n + 1, 7.0f);
    kernels.gated(x.data(), x.data() + n, n, out.data());
    for (int i = 0; i < n; ++i) {
      CHECK(out[i] == x[i] / (1.0f + plain_exp(std::min(-x[i], 88.0f))) * x[n + i]);
      const double exact = x[i] / (1.0 + std::exp(-static_cast<double>(x[i]))) * x[n + i];
      CHECK(std::fabs(out[i] - exact) <= 1e-6 * std::fabs(exact) + 1e-30);
    }
    CHECK(out[n] == 7.0f);
  }
}

void test_rope_kv(const Kernels& kernels, std::mt19937& random) {
  for (const int head_dim : {16, 48, 64, 128})
    for (const bool normed : {false, true}) {
      const int heads = 6, kv_heads = 2, blocks = 3, block = 1, offset = static_cast<int>(random() % 16);
      const Floats q_norm = normals(random, head_dim, 1.0f), k_norm = normals(random, head_dim, 1.0f);
      const Floats cos = normals(random, head_dim / 2, 1.0f), sin = normals(random, head_dim / 2, 1.0f);
      Floats qkv = normals(random, (heads + 2 * kv_heads) * head_dim, 1.0f);
      qkv[(heads + kv_heads) * head_dim] = 1e6f;  // a value beyond the halves
      qkv[(heads + kv_heads) * head_dim + 1] = -kInfinity;
      qkv[(heads + kv_heads) * head_dim + 2] = 1e-7f;
      Floats expected = qkv;
      for (int head = 0; head < heads + kv_heads; ++head) {
        float* x = expected.data() + head * head_dim;
        if (normed) {
          const Floats one = plain_norm(Floats(x, x + head_dim), head < heads ? q_norm : k_norm, 1e-6f);
          std::copy(one.begin(), one.end(), x);
        }
        for (int i = 0; i < head_dim / 2; ++i) {
          const float a = x[i], b = x[i + head_dim / 2];
          x[i] = std::fma(a, cos[i], b * -sin[i]);
          x[i + head_dim / 2] = std::fma(b, cos[i], a * sin[i]);
        }
      }
      const size_t size = static_cast<size_t>(blocks) * kv_heads * head_dim * kBlockSlots;
      std::vector<uint16_t> k(size, 0xabcd), v(size, 0xabcd), expected_k = k, expected_v = v;
      const size_t halves = static_cast<size_t>(head_dim) * kBlockSlots;
      const KvLayer kv{k.data(), v.data(), kv_heads, head_dim, kv_heads * halves, halves};
      for (int head = 0; head < kv_heads; ++head)
        for (int i = 0; i < head_dim; ++i) {
          const size_t tile = static_cast<size_t>(block * kv_heads + head) * head_dim * kBlockSlots;
          auto half = [&](int of) {
            return nearest_half(std::clamp(expected[of * head_dim + i], -65504.0f, 65504.0f));
          };
          expected_k[tile + i * kBlockSlots + offset] = half(heads + head);
          expected_v[tile + offset * head_dim + i] = half(heads + kv_heads + head);
        }
      const int all = heads + 2 * kv_heads, cut = 1 + static_cast<int>(random() % (all - 1));
      for (const int from : {0, cut})  // in two parts
        kernels.rope_kv(qkv.data(), from, from == 0 ? cut : all, heads, normed ? q_norm.data() : nullptr,
                        normed ? k_norm.data() : nullptr, 1e-6f, cos.data(), sin.data(), kv, block, offset);
      CHECK(same(qkv, expected));
      CHECK(k == expected_k);
      CHECK(v == expected_v);
      // NaN may come out of a broken model; in the cache it would spread to every later row.
      qkv.assign(qkv.size(), NAN);
      kernels.rope_kv(qkv.data(), 0, all, heads, nullptr, nullptr, 0.0f, cos.data(), sin.data(), kv, block, offset);
      for (const uint16_t half : k) CHECK((half & 0x7fff) < 0x7c00);
      for (const uint16_t half : v) CHECK((half & 0x7fff) < 0x7c00);
    }
}

void test_argmax(const Kernels& kernels, std::mt19937& random) {
  for (const int n : {1, 5, 16, 31, 200}) {
    for (int trial = 0; trial < 20; ++trial) {
      Floats x(n);
      for (float& v : x) v = random() % 10 == 0 ? NAN : static_cast<float>(random() % 7) - 3.0f;
      int best = -1;
      for (int i = 0; i < n; ++i)
        if (!std::isnan(x[i]) && (best < 0 || x[i] > x[best])) best = i;
      float value = 0.0f;
      const int found = kernels.argmax(x.data(), n, &value);
      if (best < 0) {
        CHECK(found == 0 && value == -kInfinity);
      } else {
        CHECK(found == best && value == x[best]);
      }
    }
  }
}

}  // namespace

int main() {
  for (const Kernels* kernels : tested_paths()) {
    std::mt19937 random(3);
    test_quantize(*kernels, random);
    test_norm(*kernels, random);
    test_gated(*kernels, random);
    test_rope_kv(*kernels, random);
    test_argmax(*kernels, random);
  }
  return 0;
}
