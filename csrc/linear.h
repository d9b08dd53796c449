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

// The most rows in a tile, of integers and of floats, and panels, bounded by the registers; and how many sums of `dots`
// they hold. More rows are split evenly into tiles.
#if defined(PF_TILE_ROWS)
constexpr int kTileRows = PF_TILE_ROWS, kFloatRows = PF_TILE_ROWS, kTilePanels = 2, kIndependentDots = 2;
#elif defined(PF_AVX512)
constexpr int kTileRows = 6, kFloatRows = 12, kTilePanels = 2, kIndependentDots = 12;
#elif defined(PF_AVX2)  // with AVX-VNNI, too: 4 and 5 rows were slower but for Q6_K, 7 no faster, 8 much slower
constexpr int kTileRows = 6, kFloatRows = 6, kTilePanels = 1, kIndependentDots = sizeof(Dot<4>) > 64 ? 2 : 5;
#elif defined(PF_DOTPROD)
constexpr int kTileRows = 3, kFloatRows = 3, kTilePanels = 1, kIndependentDots = 6;
#else
constexpr int kTileRows = 2, kFloatRows = 2, kTilePanels = 1, kIndependentDots = 2;
#endif

static_assert(kTilePanels <= kPair, "linear_scratch holds no more");

constexpr int kFloatStep = 8;       // k between two looks ahead
constexpr int kPieceInputs = 2048;  // of two panels and a tile of rows: about as much as the first-level cache holds

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
    return or_masked(low, half ? shr_bytes(bits, j) : shl_bytes(bits, 4 - j), 0x10);
  }
  if constexpr (V == Values::kU6) {
    const Vb bits = loadb(p + 256 + 64 * half);
    return or_masked(low, j == 3 ? shr_bytes(bits, 2) : shl_bytes(bits, 4 - 2 * j), 0x30);
  }
  return low;
}

inline int32_t four(const int8_t* a) {
  int32_t word;
  memcpy(&word, a, 4);
  return word;
}

constexpr int log2(int x) { return x <= 1 ? 0 : 1 + log2(x / 2); }

// What the sum over a group starts from, or over a half of it (kSuper16), so that the zero point is taken off.
template <Values V, Scales S>
inline Vi sum_start(const Group& a, int half) {
  constexpr int kZero = zero_of(V, S) - Dot<bits_of(V)>::kTaken;
  static_assert(kZero == 0 || kZero == 1 << log2(kZero), "shifted, not multiplied");
  if constexpr (S == Scales::kSuper16) return seti(a.minus_halves[half]);
  return kZero == 0 ? seti(0) : shift_left(seti(a.minus), log2(kZero));
}

// A piece of P panels: some of their inputs.
struct Piece {
  const uint8_t* data;
  size_t panel_bytes;  // from one panel to the next
  int k0, k1;          // inputs
  int ahead;           // bytes to fetch for each step, of each of the P panels that come next
};

template <int P>
inline void fetch(const Piece& piece, const uint8_t* next) {
  for (int i = 0; i < piece.ahead; i += 64) PF_UNROLL
  for (int panel = 0; panel < P; ++panel) prefetch(next + panel * piece.panel_bytes + i);
}

// Goes on with the sums [R, P, 16] of R rows at `a`. On the way it fetches from `next` on.
template <Values V, Scales S, int P, int R>
void integer_tile(const Piece& piece, const uint8_t* next, const Group* a, int tile, float* sums) {
  constexpr bool kMinimum = S == Scales::kHalfMin || S == Scales::kSuperMin;
  constexpr bool kByHalf = S == Scales::kSuper16;
  constexpr bool kSuperBlocks = S == Scales::kSuperMin || S == Scales::kSuper16;
  constexpr int kGroups = kSuperBlocks ? kSuper / kGroup : 1;
  const size_t panel_bytes = piece.panel_bytes;
  const int ahead = piece.ahead;
  const uint8_t* p = piece.data;
  Vf acc[R][P];
  PF_UNROLL
  for (int r = 0; r < R; ++r) PF_UNROLL
  for (int i = 0; i < P; ++i) acc[r][i] = load(sums + (r * P + i) * kPanel);
  for (int k = piece.k0; k < piece.k1; k += kGroups * kGroup) {
    Vf d[P], dmin[P];  // of the super block
    if constexpr (kSuperBlocks) {
      PF_UNROLL
      for (int i = 0; i < P; ++i) d[i] = load_half(reinterpret_cast<const uint16_t*>(p + i * panel_bytes));
      p += kHalves;
    }
    if constexpr (S == Scales::kSuperMin) {
      PF_UNROLL
      for (int i = 0; i < P; ++i)
        dmin[i] = mul(load_half(reinterpret_cast<const uint16_t*>(p + i * panel_bytes)), set1(-1.0f));
      p += kHalves;
    }
    for (int g = 0; g < kGroups; ++g, a += tile, next += ahead) {
      fetch<P>(piece, next);
      const uint8_t* scales = p + line_bytes(V);
      Dot<bits_of(V)> dot[R][P];
      PF_UNROLL
      for (int half = 0; half < 2; ++half) {
        if (half == 0 || kByHalf) {
          PF_UNROLL
          for (int r = 0; r < R; ++r) {
            const Vi start = sum_start<V, S>(a[r], half);
            PF_UNROLL
            for (int i = 0; i < P; ++i) dot[r][i].start(start);
          }
        }
        PF_UNROLL
        for (int j = 0; j < 4; ++j) {
          Vb w[P];
          PF_UNROLL
          for (int i = 0; i < P; ++i) w[i] = load_integers<V>(p + i * panel_bytes, half, j);
          PF_UNROLL
          for (int r = 0; r < R; ++r) {
            const int32_t x = four(a[r].q + 16 * half + 4 * j);
            PF_UNROLL
            for (int i = 0; i < P; ++i) dot[r][i].step(w[i], x, 4 * half + j);
          }
        }
        if (half == 1 || kByHalf) {
          Vf dw[P];
          PF_UNROLL
          for (int i = 0; i < P; ++i) {
            const uint8_t* at = scales + i * panel_bytes;
            if constexpr (S == Scales::kSuperMin)
              dw[i] = mul(d[i], load_u8(at));
            else if constexpr (S == Scales::kSuper16)
              dw[i] = mul(d[i], load_i8(reinterpret_cast<const int8_t*>(at) + 16 * half));
            else
              dw[i] = load_half(reinterpret_cast<const uint16_t*>(at));
          }
          PF_UNROLL
          for (int r = 0; r < R; ++r) PF_UNROLL
          for (int i = 0; i < P; ++i)
            acc[r][i] = fma(to_float(dot[r][i].finish()), mul(dw[i], set1(a[r].scale)), acc[r][i]);
        }
      }
      if constexpr (kMinimum) {
        Vf mw[P];
        PF_UNROLL
        for (int i = 0; i < P; ++i) {
          const uint8_t* at = scales + i * panel_bytes;
          if constexpr (S == Scales::kSuperMin)
            mw[i] = mul(dmin[i], load_u8(at + 16));
          else
            mw[i] = load_half(reinterpret_cast<const uint16_t*>(at + kHalves));
        }
        PF_UNROLL
        for (int r = 0; r < R; ++r) PF_UNROLL
        for (int i = 0; i < P; ++i) acc[r][i] = fma(mw[i], set1(a[r].offset), acc[r][i]);
      }
      p = scales + kHalves * (S == Scales::kHalfMin ? 2 : 1);
    }
  }
  PF_UNROLL
  for (int r = 0; r < R; ++r) PF_UNROLL
  for (int i = 0; i < P; ++i) store(sums + (r * P + i) * kPanel, acc[r][i]);
}

template <Values V, int P, int R>
void float_tile(const Piece& piece, const uint8_t* next, const float* x, int stride, float* sums) {
  constexpr int kBytes = (V == Values::kF32 ? 4 : 2) * kPanel;
  const size_t panel_bytes = piece.panel_bytes;
  const uint8_t* p = piece.data;
  Vf acc[R][P];
  PF_UNROLL
  for (int r = 0; r < R; ++r) PF_UNROLL
  for (int i = 0; i < P; ++i) acc[r][i] = load(sums + (r * P + i) * kPanel);
  for (int k = piece.k0; k < piece.k1; next += piece.ahead) {
    fetch<P>(piece, next);
    for (const int end = k + kFloatStep < piece.k1 ? k + kFloatStep : piece.k1; k < end; ++k, p += kBytes) {
      Vf w[P];
      PF_UNROLL
      for (int i = 0; i < P; ++i) w[i] = load_values<V>(p + i * panel_bytes);
      PF_UNROLL
      for (int r = 0; r < R; ++r) {
        const Vf value = set1(x[static_cast<size_t>(r) * stride + k]);
        PF_UNROLL
        for (int i = 0; i < P; ++i) acc[r][i] = fma(w[i], value, acc[r][i]);
      }
    }
  }
  PF_UNROLL
  for (int r = 0; r < R; ++r) PF_UNROLL
  for (int i = 0; i < P; ++i) store(sums + (r * P + i) * kPanel, acc[r][i]);
}

template <Values V, Scales S, int P, int R>
inline void tile(int count, const Piece& piece, const uint8_t* next, const Rows& rows, int inputs, int row,
                 float* sums) {
  if constexpr (R > 1)
    if (count < R) return tile<V, S, P, R - 1>(count, piece, next, rows, inputs, row, sums);
  if constexpr (is_float(V))
    float_tile<V, P, R>(piece, next, rows.x + static_cast<size_t>(row) * rows.stride, rows.stride, sums);
  else
    integer_tile<V, S, P, R>(piece, next, rows.row(row, inputs) + static_cast<size_t>(piece.k0 / kGroup) * rows.tile,
                             rows.tile, sums);
}

// out = sum (+ bias), or out += that, for the first `lanes` of a panel's outputs.
inline void put(const float* sum, const float* bias, int lanes, bool add_to, float* out) {
  Vf value = load(sum);
  if (bias) value = add(value, load_first(bias, lanes));
  if (add_to) value = add(load_first(out, lanes), value);
  store_first(out, lanes, value);
}

template <Values V, Scales S, int P>
void linear_panels(const Weight& weight, const Rows& rows, int row0, int row1, int panel, const float* bias, float* out,
                   int out_stride, bool add, const uint8_t* next, float* sums) {
  constexpr int kUnit = S == Scales::kSuperMin || S == Scales::kSuper16 ? kSuper : is_float(V) ? 1 : kGroup;
  constexpr int kStep = is_float(V) ? kFloatStep : kGroup;
  const uint8_t* data = weight.data + panel * weight.panel_bytes;
  constexpr int kMost = is_float(V) ? kFloatRows : kTileRows;
  const int size = is_float(V) ? even_share(row1 - row0, kFloatRows) : rows.tile;
  const int first = is_float(V) ? row0 : row0 / size * size;  // where the first tile begins
  const int units = weight.inputs / kUnit, tiles = (row1 - first + size - 1) / size;
  // One tile reads the panels from end to end. More of them share pieces that stay in a near cache.
  const int pieces = tiles == 1 ? 1 : (weight.inputs + kPieceInputs - 1) / kPieceInputs;
  memset(sums, 0, static_cast<size_t>(row1 - row0) * P * kPanel * sizeof(float));
  for (int i = 0; i < pieces; ++i) {
    const int unit0 = units * i / pieces, unit1 = units * (i + 1) / pieces;
    const size_t unit_bytes = weight.panel_bytes / units;
    Piece piece = {data + unit0 * unit_bytes, weight.panel_bytes, unit0 * kUnit, unit1 * kUnit, 0};
    // What comes after these panels is fetched evenly over all tiles: while the later ones work, memory would be idle.
    const size_t steps = static_cast<size_t>(piece.k1 - piece.k0 + kStep - 1) / kStep;
    const size_t bytes = (unit1 - unit0) * unit_bytes;
    const uint8_t* fetch = next ? next + unit0 * unit_bytes : nullptr;
    if (fetch) piece.ahead = static_cast<int>(bytes / (steps * tiles)) + 1;
    for (int row = row0, end; row < row1; row = end, fetch += steps * piece.ahead) {
      end = first + ((row - first) / size + 1) * size;
      if (end > row1) end = row1;
      tile<V, S, P, kMost>(end - row, piece, fetch, rows, weight.inputs, row, sums + (row - row0) * P * kPanel);
    }
  }
  for (int row = row0; row < row1; ++row) {
    for (int i = 0; i < P; ++i, sums += kPanel) {
      const int output = (panel + i) * kPanel;
      put(sums, bias ? bias + output : nullptr, weight.outputs - output, add,
          out + static_cast<size_t>(row) * out_stride + output);
    }
  }
}

template <Values V, Scales S>
void linear_as(const Weight& weight, const Rows& rows, int row0, int row1, int panel0, int panel1, const float* bias,
               float* out, int out_stride, bool add, const uint8_t* next, float* sums) {
  auto then = [&](int panel) { return panel < panel1 ? weight.data + panel * weight.panel_bytes : next; };
  int panel = panel0;
  // One tile waits for memory, which gives one stream faster than two; more of them wait for arithmetic, and a few rows
  // of floats for the last sum.
  if (row1 - row0 > kTileRows || is_float(V))
    for (; panel + kTilePanels <= panel1; panel += kTilePanels)
      linear_panels<V, S, kTilePanels>(weight, rows, row0, row1, panel, bias, out, out_stride, add,
                                       then(panel + kTilePanels), sums);
  for (; panel < panel1; ++panel)
    linear_panels<V, S, 1>(weight, rows, row0, row1, panel, bias, out, out_stride, add, then(panel + 1), sums);
}

inline int64_t dots(int groups, int32_t* sum) {
  constexpr int kSums = kIndependentDots, kSteps = 8;  // of four k: a group
  const uint8_t ones[64] = {1, 1, 1, 1};
  Vb w = loadb(ones);
  int32_t a[kSums];
  for (int i = 0; i < kSums; ++i) a[i] = 1 + i;
  asm volatile("" : : "r"(a) : "memory");  // might be other numbers now
  Dot<4> dot[kSums];
  PF_UNROLL
  for (int i = 0; i < kSums; ++i) dot[i].start(seti(0));
  for (int group = 0; group < groups; ++group) {
    PF_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      touch(w);
      PF_UNROLL
      for (int i = 0; i < kSums; ++i) dot[i].step(w, a[i], step);
    }
  }
  int32_t lanes[kLanes];
  *sum = 0;
  for (int i = 0; i < kSums; ++i) {
    store(lanes, dot[i].finish());
    *sum |= lanes[0];
  }
  return static_cast<int64_t>(groups) * kSums * kGroup * kPanel;
}

inline void linear(const Weight& weight, const Rows& rows, int row0, int row1, int panel0, int panel1,
                   const float* bias, float* out, int out_stride, bool add, const uint8_t* next, float* sums) {
  using Linear =
      void (*)(const Weight&, const Rows&, int, int, int, int, const float*, float*, int, bool, const uint8_t*, float*);
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
  as(weight, rows, row0, row1, panel0, panel1, bias, out, out_stride, add, next, sums);
}

}  // namespace pilotfish::PF_PATH
