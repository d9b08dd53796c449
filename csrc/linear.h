// The linear kernels: rows times packed weights. Compiled once per path.
//
// A tile is one panel (16 outputs, one lane each) by a few rows. It walks the panel's stream once, turns each piece of
// weights into registers once and uses it for all its rows, so the weights of a panel come from memory once however
// many rows there are. What happens to one row does not depend on the others:
//   floats:   acc = fma(w, x[k], acc) for each k
//   integers: acc = fma(float(sum of (q - zero) * a), dw * da, acc) for each group of 32 (kSuper16: of 16), and for the
//             formats with a minimum then acc = fma(mw, da * float(sum of a), acc)
#pragma once

#include "kernels.h"
#include "simd.h"

namespace pilotfish::PF_PATH {

// The most rows in a tile, bounded by the registers. More are split evenly into tiles.
#if defined(PF_TILE_ROWS)
constexpr int kTileRows = PF_TILE_ROWS;
#elif defined(PF_AVX512)
constexpr int kTileRows = 8;
#elif defined(PF_AVX2)
constexpr int kTileRows = 6;
#else
constexpr int kTileRows = 2;
#endif

constexpr bool is_float(Values values) { return values <= Values::kBf16; }

constexpr int kHalves = kPanel * 2;  // bytes of one half per lane

template <Values V>
inline Vf load_values(const uint8_t* p) {
  if constexpr (V == Values::kF32) return load(reinterpret_cast<const float*>(p));
  if constexpr (V == Values::kF16) return load_half(reinterpret_cast<const uint16_t*>(p));
  if constexpr (V == Values::kBf16) return load_bf16(reinterpret_cast<const uint16_t*>(p));
}

// The integers k = 16 * half + 4j + b of a group, j in 0..3.
template <Values V>
inline Vb load_integers(const uint8_t* p, int half, int j) {
  if constexpr (V == Values::kU8) return loadb(p + 64 * (4 * half + j));
  const Vb line = loadb(p + 64 * j);
  const Vb low = and_bytes(half ? shr_bytes(line, 4) : line, 0x0f);
  if constexpr (V == Values::kU5) {
    const Vb bits = loadb(p + 256);
    return or_bytes(low, and_bytes(half ? shr_bytes(bits, j) : shl_bytes(bits, 4 - j), 0x10));
  }
  if constexpr (V == Values::kU6) {
    const Vb bits = loadb(p + 256 + 64 * half);
    return or_bytes(low, and_bytes(j == 3 ? shr_bytes(bits, 2) : shl_bytes(bits, 4 - 2 * j), 0x30));
  }
  return low;
}

inline int32_t four(const int8_t* a) {
  int32_t word;
  memcpy(&word, a, 4);
  return word;
}

// What a row contributes to a group besides its integers.
struct Side {
  float scale;
  float offset;      // formats with a minimum: scale * sum
  int32_t start[2];  // others: what takes the zero point off, for both halves (kSuper16) or in the first
};

template <Values V, Scales S>
inline Side side_of(float scale, const int32_t* sums) {
  constexpr int kZero = zero_of(V, S) - Dot<bits_of(V)>::kTaken;  // of the minimum formats: unused
  if constexpr (S == Scales::kSuper16) return {scale, 0.0f, {-kZero * sums[0], -kZero * sums[1]}};
  const int32_t sum = sums[0] + sums[1];
  return {scale, scale * static_cast<float>(sum), {-kZero * sum, 0}};
}

// Leaves R x 16 sums of rows [row, row + R) in `out`. Fetches `ahead` bytes from `next` for each group on the way.
template <Values V, Scales S, int R>
void integer_tile(const uint8_t* p, const Rows& rows, int inputs, int row, const uint8_t* next, int ahead, float* out) {
  constexpr bool kMinimum = S == Scales::kHalfMin || S == Scales::kSuperMin;
  constexpr int kGroups = kSuper / kGroup;  // walked at a time
  constexpr int kLines = line_bytes(V);
  const int groups = inputs / kGroup;
  const int8_t* a = rows.q + static_cast<size_t>(row) * inputs;
  Vf acc[R];
  PF_UNROLL
  for (int r = 0; r < R; ++r) acc[r] = set1(0.0f);
  for (int first = 0; first < groups; first += kGroups) {
    const int count = groups - first < kGroups ? groups - first : kGroups;
    Side sides[kGroups][R];
    PF_UNROLL
    for (int r = 0; r < R; ++r) {
      const size_t at = static_cast<size_t>(row + r) * groups + first;
      for (int g = 0; g < count; ++g) sides[g][r] = side_of<V, S>(rows.scale[at + g], rows.sums + 2 * (at + g));
    }
    Vf d, dmin;  // of the super block
    if constexpr (S == Scales::kSuperMin || S == Scales::kSuper16) {
      d = load_half(reinterpret_cast<const uint16_t*>(p));
      p += kHalves;
    }
    if constexpr (S == Scales::kSuperMin) {
      dmin = mul(load_half(reinterpret_cast<const uint16_t*>(p)), set1(-1.0f));
      p += kHalves;
    }
    for (int g = 0; g < count; ++g, a += kGroup, next += ahead) {
      for (int i = 0; i < ahead; i += 64) prefetch(next + i);
      const Side* side = sides[g];
      const uint8_t* scales = p + kLines;
      Dot<bits_of(V)> dot[R];
      PF_UNROLL
      for (int half = 0; half < 2; ++half) {
        if (half == 0 || S == Scales::kSuper16) {
          PF_UNROLL
          for (int r = 0; r < R; ++r) dot[r].start(kMinimum ? 0 : side[r].start[half]);
        }
        PF_UNROLL
        for (int j = 0; j < 4; ++j) {
          const Vb w = load_integers<V>(p, half, j);
          PF_UNROLL
          for (int r = 0; r < R; ++r)
            dot[r].step(w, four(a + static_cast<size_t>(r) * inputs + 16 * half + 4 * j), 4 * half + j);
        }
        if (half == 1 || S == Scales::kSuper16) {
          Vf dw;
          if constexpr (S == Scales::kSuperMin)
            dw = mul(d, load_u8(scales));
          else if constexpr (S == Scales::kSuper16)
            dw = mul(d, load_i8(reinterpret_cast<const int8_t*>(scales) + 16 * half));
          else
            dw = load_half(reinterpret_cast<const uint16_t*>(scales));
          PF_UNROLL
          for (int r = 0; r < R; ++r) acc[r] = fma(to_float(dot[r].finish()), mul(dw, set1(side[r].scale)), acc[r]);
        }
      }
      if constexpr (kMinimum) {
        Vf mw;
        if constexpr (S == Scales::kSuperMin)
          mw = mul(dmin, load_u8(scales + 16));
        else
          mw = load_half(reinterpret_cast<const uint16_t*>(scales + kHalves));
        PF_UNROLL
        for (int r = 0; r < R; ++r) acc[r] = fma(mw, set1(side[r].offset), acc[r]);
      }
      p = scales + kHalves * (S == Scales::kHalfMin ? 2 : 1);
    }
  }
  PF_UNROLL
  for (int r = 0; r < R; ++r) store(out + r * kPanel, acc[r]);
}

template <Values V, int R>
void float_tile(const uint8_t* p, const Rows& rows, int inputs, int row, const uint8_t* next, int ahead, float* out) {
  constexpr int kBytes = (V == Values::kF32 ? 4 : 2) * kPanel;
  const float* x = rows.x + static_cast<size_t>(row) * rows.stride;
  Vf acc[R];
  PF_UNROLL
  for (int r = 0; r < R; ++r) acc[r] = set1(0.0f);
  for (int k = 0; k < inputs; ++k, p += kBytes, next += ahead) {
    if (ahead > 0) prefetch(next);
    const Vf w = load_values<V>(p);
    PF_UNROLL
    for (int r = 0; r < R; ++r) acc[r] = fma(w, set1(x[static_cast<size_t>(r) * rows.stride + k]), acc[r]);
  }
  PF_UNROLL
  for (int r = 0; r < R; ++r) store(out + r * kPanel, acc[r]);
}

template <Values V, Scales S, int R>
inline void tile(int count, const uint8_t* p, const Rows& rows, int inputs, int row, const uint8_t* next, int ahead,
                 float* out) {
  if constexpr (R > 1)
    if (count < R) return tile<V, S, R - 1>(count, p, rows, inputs, row, next, ahead, out);
  if constexpr (is_float(V))
    float_tile<V, R>(p, rows, inputs, row, next, ahead, out);
  else
    integer_tile<V, S, R>(p, rows, inputs, row, next, ahead, out);
}

template <Values V, Scales S>
void linear_as(const Weight& weight, const Rows& rows, int row0, int row1, int panel0, int panel1, const float* bias,
               float* out, int out_stride, bool add) {
  const int count = row1 - row0;
  const int tiles = (count + kTileRows - 1) / kTileRows;
  const int steps = is_float(V) ? weight.inputs : weight.inputs / kGroup;
  const int share = static_cast<int>(weight.panel_bytes / (static_cast<size_t>(tiles) * steps)) + 1;
  float acc[kTileRows * kPanel];
  for (int panel = panel0; panel < panel1; ++panel) {
    const uint8_t* data = weight.data + panel * weight.panel_bytes;
    const int first_output = panel * kPanel;
    const int lanes = weight.outputs - first_output < kPanel ? weight.outputs - first_output : kPanel;
    const int ahead = panel + 1 < panel1 ? share : 0;
    for (int t = 0; t < tiles; ++t) {
      const int begin = row0 + count * t / tiles, end = row0 + count * (t + 1) / tiles;
      const uint8_t* next = data + weight.panel_bytes + static_cast<size_t>(t) * steps * ahead;
      tile<V, S, kTileRows>(end - begin, data, rows, weight.inputs, begin, next, ahead, acc);
      for (int row = begin; row < end; ++row) {
        const float* sum = acc + (row - begin) * kPanel;
        float* o = out + static_cast<size_t>(row) * out_stride + first_output;
        for (int lane = 0; lane < lanes; ++lane) {
          const float value = bias ? sum[lane] + bias[first_output + lane] : sum[lane];
          o[lane] = add ? o[lane] + value : value;
        }
      }
    }
  }
}

inline void linear(const Weight& weight, const Rows& rows, int row0, int row1, int panel0, int panel1,
                   const float* bias, float* out, int out_stride, bool add) {
  using Linear = void (*)(const Weight&, const Rows&, int, int, int, int, const float*, float*, int, bool);
  Linear as = nullptr;
  switch (weight.scales) {
    case Scales::kNone:
      as = weight.values == Values::kF32   ? linear_as<Values::kF32, Scales::kNone>
           : weight.values == Values::kF16 ? linear_as<Values::kF16, Scales::kNone>
                                           : linear_as<Values::kBf16, Scales::kNone>;
      break;
    case Scales::kHalf:
      as = weight.values == Values::kU4   ? linear_as<Values::kU4, Scales::kHalf>
           : weight.values == Values::kU5 ? linear_as<Values::kU5, Scales::kHalf>
                                          : linear_as<Values::kU8, Scales::kHalf>;
      break;
    case Scales::kHalfMin:
      as = weight.values == Values::kU4 ? linear_as<Values::kU4, Scales::kHalfMin>
                                        : linear_as<Values::kU5, Scales::kHalfMin>;
      break;
    case Scales::kSuperMin:
      as = weight.values == Values::kU4 ? linear_as<Values::kU4, Scales::kSuperMin>
                                        : linear_as<Values::kU5, Scales::kSuperMin>;
      break;
    case Scales::kSuper16:
      as = linear_as<Values::kU6, Scales::kSuper16>;
      break;
  }
  as(weight, rows, row0, row1, panel0, panel1, bias, out, out_stride, add);
}

}  // namespace pilotfish::PF_PATH
