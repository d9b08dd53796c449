// The linear kernels against plain loops that follow their definition, bit for bit on every path.
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../pack.h"
#include "check.h"

using namespace pilotfish;

namespace {

struct Kind {
  const char* name;
  int elements, bytes;      // of a block
  std::vector<int> halves;  // offsets of its halves, which random bytes would make NaN
};

const std::vector<Kind> kKinds = {
    {"F32", 1, 4, {}},          {"F16", 1, 2, {}},          {"BF16", 1, 2, {}},        {"Q4_0", 32, 18, {0}},
    {"Q4_1", 32, 20, {0, 2}},   {"Q5_0", 32, 22, {0}},      {"Q5_1", 32, 24, {0, 2}},  {"Q8_0", 32, 34, {0}},
    {"Q4_K", 256, 144, {0, 2}}, {"Q5_K", 256, 176, {0, 2}}, {"Q6_K", 256, 210, {208}},
};

constexpr int kRows = 40;

// Allocated to the byte, so that the address sanitizer sees every read and write beyond.
template <typename T>
struct Exact {
  explicit Exact(size_t n) : size(n), data(nullptr) {
    void* memory;
    CHECK(posix_memalign(&memory, 64, n * sizeof(T)) == 0);
    data = static_cast<T*>(memory);
  }
  ~Exact() { std::free(data); }
  Exact(const Exact&) = delete;
  T& operator[](size_t i) { return data[i]; }
  const T& operator[](size_t i) const { return data[i]; }
  size_t size;
  T* data;
};

struct Case {
  const Kind& kind;
  int outputs, inputs;
};

// How the integers are drawn: anything, or the ends of the range, where sums of 16 bits would overflow.
enum class Draw { kRandom, kLowest, kHighest };

std::vector<uint8_t> raw_weight(const Case& c, Draw draw, std::mt19937& random) {
  const size_t blocks = static_cast<size_t>(c.outputs) * c.inputs / c.kind.elements;
  std::vector<uint8_t> raw(blocks * c.kind.bytes);
  const bool signed_bytes = std::string(c.kind.name) == "Q8_0";
  for (uint8_t& byte : raw)
    byte = draw == Draw::kRandom ? random() : (draw == Draw::kHighest ? 0xff : 0) ^ (signed_bytes ? 0x80 : 0);
  std::uniform_real_distribution<float> value(-2.0f, 2.0f);
  for (size_t block = 0; block < blocks; ++block) {
    uint8_t* p = &raw[block * c.kind.bytes];
    for (const int offset : c.kind.halves) {  // 2^-8 to 2^8, either sign
      const uint16_t half = static_cast<uint16_t>((random() & 0x8000) | (7 + random() % 16) << 10 | (random() & 0x3ff));
      memcpy(p + offset, &half, 2);
    }
    if (c.kind.elements > 1) continue;
    const float x = value(random);
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (c.kind.bytes == 4)
      memcpy(p, &bits, 4);
    else if (std::string(c.kind.name) == "BF16")
      memcpy(p, reinterpret_cast<uint8_t*>(&bits) + 2, 2);
    else
      p[1] = (p[1] & 0x83) | (11 + random() % 8) << 2;  // a finite half
  }
  return raw;
}

struct Input {
  Exact<float> x;
  std::vector<int8_t> q;
  std::vector<float> scale;
  int inputs;

  Input(int n, bool integers, std::mt19937& random)
      : x(static_cast<size_t>(kRows) * n), q(integers ? x.size : 0), scale(q.size() / kGroup), inputs(n) {
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < x.size; ++i) x[i] = normal(random);
    if (!integers) return;
    for (size_t i = 0; i < scale.size(); ++i) scale[i] = std::fabs(x[i]) * 0.01f;
    for (size_t i = 0; i < q.size(); ++i) {
      const int row = static_cast<int>(i) / n;  // the first rows are extreme
      const int value = static_cast<int>(random() % 255) - 127;
      q[i] = static_cast<int8_t>(row == 0 ? 127 : row == 1 ? -127 : row == 2 ? (i % 2 ? 127 : -127) : value);
    }
    // Nothing of a row may reach its neighbours.
    for (int g = 0; g < n / kGroup; ++g) scale[static_cast<size_t>(3) * n / kGroup + g] = NAN;
  }
};

// The first rows of an input, interleaved in tiles.
struct Tiles {
  Exact<Group> groups;
  Rows rows;

  Tiles(const Input& in, int count, int tile)
      : groups(in.q.empty() ? 1 : group_count(count, in.inputs, tile)), rows{in.x.data, in.inputs, groups.data, tile} {
    for (size_t i = 0; i < groups.size; ++i) memset(static_cast<void*>(groups.data + i), 0xff, sizeof(Group));
    for (int row = 0; row < count && !in.q.empty(); ++row) {
      for (int g = 0; g < in.inputs / kGroup; ++g) {
        const size_t from = static_cast<size_t>(row) * in.inputs / kGroup + g;
        Group& group = groups[rows.row(row, in.inputs) - groups.data + static_cast<size_t>(g) * tile];
        memcpy(group.q, &in.q[from * kGroup], kGroup);
        int sums[2] = {};
        for (int k = 0; k < kGroup; ++k) sums[k / 16] += group.q[k];
        group.scale = in.scale[from];
        group.offset = group.scale * static_cast<float>(sums[0] + sums[1]);
        group.minus = -(sums[0] + sums[1]);
        for (int half = 0; half < 2; ++half) group.minus_halves[half] = -32 * sums[half];
      }
    }
  }
};

float half_value(const uint8_t* p) {
  const int bits = p[0] | p[1] << 8, exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const float size =
      std::ldexp(static_cast<float>(exponent ? mantissa + 1024 : mantissa), (exponent ? exponent : 1) - 25);
  return bits & 0x8000 ? -size : size;
}

// One output of one row, read off the panel as kernels.h describes it.
float plain_linear(const Weight& w, const Input& in, int row, int output) {
  const uint8_t* p = w.data + static_cast<size_t>(output / kPanel) * w.panel_bytes;
  const int lane = output % kPanel;
  float acc = 0.0f;
  if (w.scales == Scales::kNone) {
    const int size = w.values == Values::kF32 ? 4 : 2;
    for (int k = 0; k < w.inputs; ++k) {
      const uint8_t* at = p + (static_cast<size_t>(k) * kPanel + lane) * size;
      uint32_t bits = 0;
      if (size == 4)
        memcpy(&bits, at, 4);
      else
        bits = static_cast<uint32_t>(at[0] << 16 | at[1] << 24);
      float value;
      memcpy(&value, &bits, 4);
      if (w.values == Values::kF16) value = half_value(at);
      acc = std::fma(value, in.x[static_cast<size_t>(row) * w.inputs + k], acc);
    }
    return acc;
  }
  const bool super_min = w.scales == Scales::kSuperMin, super16 = w.scales == Scales::kSuper16;
  const bool minimum = super_min || w.scales == Scales::kHalfMin;
  const int zero = minimum ? 0 : w.values == Values::kU4 ? 8 : w.values == Values::kU5 ? 16 : super16 ? 32 : 128;
  float d = 0.0f, dmin = 0.0f;
  for (int g = 0; g < w.inputs / kGroup; ++g) {
    if ((super_min || super16) && g % 8 == 0) {
      d = half_value(p + 2 * lane);
      if (super_min) dmin = half_value(p + 32 + 2 * lane);
      p += super_min ? 64 : 32;
    }
    int sum[2] = {}, activations[2] = {};
    for (int k = 0; k < kGroup; ++k) {
      const int half = k / 16, j = k / 4, byte = lane * 4 + k % 4;
      int q = w.values == Values::kU8 ? p[64 * j + byte] : p[64 * (j % 4) + byte] >> (4 * half) & 15;
      if (w.values == Values::kU5) q += (p[256 + byte] >> j & 1) * 16;
      if (w.values == Values::kU6) q += (p[256 + 64 * half + byte] >> (2 * (j % 4)) & 3) * 16;
      const int a = in.q[static_cast<size_t>(row) * w.inputs + g * kGroup + k];
      sum[half] += (q - zero) * a;
      activations[half] += a;
    }
    p += w.values == Values::kU4 ? 256 : w.values == Values::kU5 ? 320 : w.values == Values::kU6 ? 384 : 512;
    const float da = in.scale[(static_cast<size_t>(row) * w.inputs) / kGroup + g];
    if (super16) {
      for (int half = 0; half < 2; ++half) {
        const float dw = d * static_cast<float>(static_cast<int8_t>(p[16 * half + lane]));
        acc = std::fma(static_cast<float>(sum[half]), dw * da, acc);
      }
    } else {
      const float dw = super_min ? d * static_cast<float>(p[lane]) : half_value(p + 2 * lane);
      acc = std::fma(static_cast<float>(sum[0] + sum[1]), dw * da, acc);
    }
    if (minimum) {
      const float mw = super_min ? -(dmin * static_cast<float>(p[16 + lane])) : half_value(p + 32 + 2 * lane);
      acc = std::fma(mw, da * static_cast<float>(activations[0] + activations[1]), acc);
    }
    p += w.scales == Scales::kHalfMin ? 64 : 32;
  }
  return acc;
}

// Lanes beyond the outputs hold zeros; whatever they held, it must not reach the others.
void poison_padding(const Weight& w, uint8_t* data) {
  uint8_t* panel = data + static_cast<size_t>(w.panels - 1) * w.panel_bytes;
  for (int lane = w.outputs - (w.panels - 1) * kPanel; lane < kPanel; ++lane) {
    if (w.scales == Scales::kNone) {
      const int size = w.values == Values::kF32 ? 4 : 2;
      for (int k = 0; k < w.inputs; ++k) memset(panel + (static_cast<size_t>(k) * kPanel + lane) * size, 0xff, size);
    } else {  // the first scale of the panel
      const bool super = w.scales == Scales::kSuperMin || w.scales == Scales::kSuper16;
      memset(panel + (super ? 0 : line_bytes(w.values)) + 2 * lane, 0xff, 2);
    }
  }
}

bool same(float a, float b) { return std::isnan(a) ? std::isnan(b) : memcmp(&a, &b, 4) == 0; }

void test_linear(const Case& c, Draw draw, std::mt19937& random) {
  const std::vector<uint8_t> raw = raw_weight(c, draw, random);
  const PackedWeight packed = pack(c.kind.name, c.outputs, c.inputs, raw.data(), raw.size(), 2);
  Exact<uint8_t> panels(packed.bytes());
  memcpy(panels.data, packed.memory.get(), panels.size);
  Weight weight = packed.weight;
  weight.data = panels.data;
  poison_padding(weight, panels.data);

  const Input input(c.inputs, c.kind.elements > 1, random);
  Exact<float> bias(c.outputs);
  for (size_t i = 0; i < bias.size; ++i) bias[i] = static_cast<float>(i) - 3.5f;
  std::vector<float> expected;
  for (int row = 0; row < kRows; ++row)
    for (int output = 0; output < c.outputs; ++output) expected.push_back(plain_linear(weight, input, row, output));

  const int stride = c.outputs + 3;
  const float untouched = 12345.0f;
  for (const Kernels* kernels : tested_paths()) {
    // Rows [row0, row1) of panels [panel0, panel1) get theirs, everything else stays.
    const auto check = [&](int row0, int row1, int panel0, int panel1, bool with_bias, bool add) {
      Exact<float> out(static_cast<size_t>(row1 - 1) * stride + c.outputs);
      for (size_t i = 0; i < out.size; ++i) out[i] = untouched;
      const Tiles tiled(input, row1, even_share(row1, kernels->tile_rows));
      const Exact<float> sums(linear_scratch(row1 - row0));
      kernels->linear(weight, tiled.rows, row0, row1, panel0, panel1, with_bias ? bias.data : nullptr, out.data, stride,
                      add, row0 % 2 ? panels.data : nullptr, sums.data);
      for (size_t i = 0; i < out.size; ++i) {
        const int row = static_cast<int>(i) / stride, output = static_cast<int>(i) % stride;
        float value = untouched;
        if (row >= row0 && output >= panel0 * kPanel && output < panel1 * kPanel && output < c.outputs) {
          value = expected[static_cast<size_t>(row) * c.outputs + output];
          if (with_bias) value += bias[output];
          if (add) value = untouched + value;
        }
        if (!same(out[i], value))
          std::fprintf(stderr, "%s %s [%d, %d] rows %d..%d: row %d output %d is %a, not %a\n", kernels->path,
                       c.kind.name, c.outputs, c.inputs, row0, row1, row, output, out[i], value);
        CHECK(same(out[i], value));
      }
    };
    for (int rows = 1; rows <= kRows; ++rows) check(0, rows, 0, weight.panels, false, false);
    check(0, 5, 0, weight.panels, true, false);
    check(0, 1, 0, weight.panels, true, true);
    check(7, 18, 0, weight.panels, false, true);
    check(kRows - 1, kRows, weight.panels / 2, weight.panels, true, true);
    check(2, 4, 0, (weight.panels + 1) / 2, false, false);
  }
}

}  // namespace

int main() {
  std::mt19937 random(1);
  for (const Kind& kind : kKinds) {
    const int block = kind.elements;
    test_linear({kind, 37, block == 1 ? 45 : 3 * block}, Draw::kRandom, random);
    test_linear({kind, 16, block == 1 ? 1 : block}, Draw::kRandom, random);
    test_linear({kind, 1, block == 1 ? 33 : block == 32 ? 320 : 512}, Draw::kRandom, random);
    test_linear({kind, 33, block == 1 ? 2100 : 2304}, Draw::kRandom, random);  // in two pieces
    if (block == 1) continue;
    test_linear({kind, 17, block}, Draw::kLowest, random);
    test_linear({kind, 17, block}, Draw::kHighest, random);
  }
}
