// Sixteen lanes on every instruction set: one zmm, two ymm, four NEON registers, or an array the compiler vectorises.
//
// Kernels are written once against these types and compiled once per path (PF_PATH names it, compiler flags decide
// which branch below is taken). Every operation is one correctly rounded IEEE operation per lane, fma is explicit and
// reductions use one fixed tree, so all paths give the same bits. Kernel files use no templates of the standard
// library: the linker would keep one copy of an inline function, and it might be the AVX-512 one.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(PF_EMULATE_AVX512)
#define PF_AVX512 1
#include "tests/emulated_avx512.h"
#elif defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define PF_AVX512 1
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define PF_AVX2 1
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#define PF_DOTPROD 1
#include "simd_dotprod.h"
#endif

// Before a loop over a small constant count whose body must see the count as a constant.
#if defined(__clang__)
#define PF_UNROLL _Pragma("unroll")
#else
#define PF_UNROLL _Pragma("GCC unroll 16")
#endif

namespace pilotfish::PF_PATH {

constexpr int kLanes = 16;

// Into the second-level cache; any address is allowed.
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

inline float bits_float(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}

inline uint32_t float_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}

// IEEE half to float, exact, without the instruction. Scaling by 2^112 turns half subnormals into floats.
inline float half_float(uint16_t h) {
  const uint32_t magnitude = (h & 0x7fffu) << 13;
  const float value = (h & 0x7c00u) == 0x7c00u ? bits_float(magnitude | 0x7f800000u) : bits_float(magnitude) * 0x1p112f;
  return bits_float(float_bits(value) | (static_cast<uint32_t>(h & 0x8000u) << 16));
}

// Float to IEEE half, round to nearest even; the caller keeps |f| <= 65504.
inline uint16_t float_half(float f) {
  const uint32_t bits = float_bits(f);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude < 0x38800000u) {  // below 2^-14: the addition rounds to a multiple of 2^-24
    const float rounded = bits_float(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (float_bits(rounded) - 0x3f000000u));
  }
  const uint32_t even = (magnitude >> 13) & 1u;
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + even) >> 13));
}

#if defined(PF_AVX512)

struct Vf {
  __m512 v;
};
struct Vi {
  __m512i v;
};
struct Vb {  // 64 bytes: four k of each of 16 outputs
  __m512i v;
};

inline Vf load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Vf a) { _mm512_storeu_ps(p, a.v); }
inline Vf set1(float x) { return {_mm512_set1_ps(x)}; }
inline Vf add(Vf a, Vf b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vf sub(Vf a, Vf b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vf mul(Vf a, Vf b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vf div(Vf a, Vf b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vf fma(Vf a, Vf b, Vf c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vf max(Vf a, Vf b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vf min(Vf a, Vf b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vf abs(Vf a) { return {_mm512_abs_ps(a.v)}; }
inline Vf to_float(Vi a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline Vi to_int(Vf a) { return {_mm512_cvtps_epi32(a.v)}; }  // round to nearest even; |a| <= 2^22
inline Vi load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store(int32_t* p, Vi a) { _mm512_storeu_si512(p, a.v); }
inline Vi seti(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Vi add(Vi a, Vi b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Vi shift_left(Vi a, int n) { return {_mm512_slli_epi32(a.v, static_cast<unsigned>(n))}; }
inline Vf as_float(Vi a) { return {_mm512_castsi512_ps(a.v)}; }
inline Vf load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store_half(uint16_t* p, Vf a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline Vf load_bf16(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline Vf load_u8(const uint8_t* p) {  // 16 unsigned bytes as floats
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline Vf load_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline void store_i8(int8_t* p, Vi a) {  // saturating
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a.v));
}
// The first n lanes of a, `rest` beyond them.
inline Vf first(Vf a, int n, Vf rest) {
  return {_mm512_mask_mov_ps(rest.v, static_cast<__mmask16>((1u << n) - 1u), a.v)};
}

inline Vb loadb(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
// Lets the compiler believe that these bytes are others now.
#if defined(PF_EMULATE_AVX512)
inline void touch(Vb& a) { asm volatile("" : "+m"(a)); }
#else
inline void touch(Vb& a) { asm volatile("" : "+v"(a.v)); }
#endif
inline Vb and_bytes(Vb a, uint8_t mask) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(static_cast<char>(mask)))}; }
inline Vb or_masked(Vb a, Vb b, uint8_t mask) {  // a | (b & mask)
  return {_mm512_ternarylogic_epi64(a.v, b.v, _mm512_set1_epi8(static_cast<char>(mask)), 0xf8)};
}
// Shifts work on 16-bit units: mask afterwards.
inline Vb shr_bytes(Vb a, int n) { return {_mm512_srli_epi16(a.v, static_cast<unsigned>(n))}; }
inline Vb shl_bytes(Vb a, int n) { return {_mm512_slli_epi16(a.v, static_cast<unsigned>(n))}; }

// start + sum over k of (w[output][k] - kTaken) * a[k] in integers, exact: w unsigned with Bits bits, a within
// -127..127.
template <int Bits>
struct Dot {
  static constexpr int kTaken = 0;
  __m512i sum;
  void start(Vi x) { sum = x.v; }
  // Four k of 16 outputs; `a` holds the same four k of one row. `step` counts from 0.
  void step(Vb w, int32_t a, int /*step*/) { sum = _mm512_dpbusd_epi32(sum, w.v, _mm512_set1_epi32(a)); }
  Vi finish() const { return {sum}; }
};

#elif defined(PF_AVX2)

struct Vf {
  __m256 a, b;
};
struct Vi {
  __m256i a, b;
};
struct Vb {
  __m256i a, b;
};

inline Vf load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Vf x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline Vf set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vf add(Vf x, Vf y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Vf sub(Vf x, Vf y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Vf mul(Vf x, Vf y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Vf div(Vf x, Vf y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Vf fma(Vf x, Vf y, Vf z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline Vf max(Vf x, Vf y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Vf min(Vf x, Vf y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Vf abs(Vf x) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}
inline Vf to_float(Vi x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline Vi to_int(Vf x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline Vi load(const int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
inline void store(int32_t* p, Vi x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
}
inline Vi seti(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Vi add(Vi x, Vi y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline Vi shift_left(Vi x, int n) { return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)}; }
inline Vf as_float(Vi x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline Vf load_half(const uint16_t* p) { return {_mm256_cvtph_ps(load128(p)), _mm256_cvtph_ps(load128(p + 8))}; }
inline void store_half(uint16_t* p, Vf x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
inline Vf load_bf16(const uint16_t* p) {
  const Vi wide = {_mm256_cvtepu16_epi32(load128(p)), _mm256_cvtepu16_epi32(load128(p + 8))};
  return as_float(shift_left(wide, 16));
}
inline Vf load_u8(const uint8_t* p) {
  const __m128i bytes = load128(p);
  return to_float(Vi{_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))});
}
inline Vf load_i8(const int8_t* p) {
  const __m128i bytes = load128(p);
  return to_float(Vi{_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))});
}
inline void store_i8(int8_t* p, Vi x) {
  // packs works within 128-bit halves: put the 32-bit quarters back into order afterwards.
  const __m256i words = _mm256_packs_epi32(x.a, x.b);
  const __m256i bytes = _mm256_packs_epi16(words, words);
  const __m256i ordered = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(ordered));
}
inline Vf first(Vf x, int n, Vf rest) {
  const __m256i low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i high = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
  const __m256i count = _mm256_set1_epi32(n);
  return {_mm256_blendv_ps(rest.a, x.a, _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, low))),
          _mm256_blendv_ps(rest.b, x.b, _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, high)))};
}

inline Vb loadb(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
inline void touch(Vb& x) { asm volatile("" : "+x"(x.a), "+x"(x.b)); }
inline Vb and_bytes(Vb x, uint8_t mask) {
  const __m256i m = _mm256_set1_epi8(static_cast<char>(mask));
  return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
inline Vb or_masked(Vb x, Vb y, uint8_t mask) {  // x | (y & mask)
  const Vb z = and_bytes(y, mask);
  return {_mm256_or_si256(x.a, z.a), _mm256_or_si256(x.b, z.b)};
}
inline Vb shr_bytes(Vb x, int n) { return {_mm256_srli_epi16(x.a, n), _mm256_srli_epi16(x.b, n)}; }
inline Vb shl_bytes(Vb x, int n) { return {_mm256_slli_epi16(x.a, n), _mm256_slli_epi16(x.b, n)}; }

#if defined(__AVXVNNI__)
template <int Bits>
struct Dot {
  static constexpr int kTaken = 0;
  __m256i low, high;
  void start(Vi x) { low = x.a, high = x.b; }
  void step(Vb w, int32_t a, int /*step*/) {
    const __m256i b = _mm256_set1_epi32(a);
    low = _mm256_dpbusd_avx_epi32(low, w.a, b);
    high = _mm256_dpbusd_avx_epi32(high, w.b, b);
  }
  Vi finish() const { return {low, high}; }
};
#else
// maddubs adds two products in 16 bits. Largest pair: 15*127*2 = 3810 for 4 bits, 7874 for 5, 16002 for 6, so 8, 4 and
// 2 steps fit into int16. Eight bits (w = 128 + signed weight) go through |w - 128| and the sign moved to a: at most
// 32512.
template <int Bits>
struct Dot {
  static constexpr int kTaken = Bits == 8 ? 128 : 0;
  static constexpr int kSteps = Bits == 4 ? 8 : Bits == 5 ? 4 : Bits == 6 ? 2 : 1;
  __m256i low, high;      // int32 sums
  __m256i low16, high16;  // int16 sums of up to kSteps steps
  void start(Vi x) { low = x.a, high = x.b; }
  void step(Vb w, int32_t a, int step) {
    const __m256i b = _mm256_set1_epi32(a);
    __m256i p, q;
    if constexpr (Bits == 8) {
      const __m256i flip = _mm256_set1_epi8(static_cast<char>(0x80));
      const __m256i wa = _mm256_xor_si256(w.a, flip), wb = _mm256_xor_si256(w.b, flip);
      p = _mm256_maddubs_epi16(_mm256_abs_epi8(wa), _mm256_sign_epi8(b, wa));
      q = _mm256_maddubs_epi16(_mm256_abs_epi8(wb), _mm256_sign_epi8(b, wb));
    } else {
      p = _mm256_maddubs_epi16(w.a, b);
      q = _mm256_maddubs_epi16(w.b, b);
    }
    if (step % kSteps == 0) {
      low16 = p;
      high16 = q;
    } else {
      low16 = _mm256_add_epi16(low16, p);
      high16 = _mm256_add_epi16(high16, q);
      keep(low16, high16);
    }
    if (step % kSteps == kSteps - 1) {
      const __m256i ones = _mm256_set1_epi16(1);
      low = _mm256_add_epi32(low, _mm256_madd_epi16(low16, ones));
      high = _mm256_add_epi32(high, _mm256_madd_epi16(high16, ones));
      if (Bits > 4) keep(low, high);
    }
  }
  Vi finish() const { return {low, high}; }

 private:
  // Compilers would regroup the sums, keep all the products until the end and spill them.
  static void keep(__m256i& x, __m256i& y) { asm("" : "+x"(x), "+x"(y)); }
};
#endif

#elif !defined(PF_DOTPROD)

// Four vectors of 16 bytes in the compilers' own notation: SSE2, NEON or whatever the machine has.
using F4 = float __attribute__((vector_size(16)));
using I4 = int32_t __attribute__((vector_size(16)));
using U4 = uint32_t __attribute__((vector_size(16)));
using S8 = int16_t __attribute__((vector_size(16)));
using U8 = uint16_t __attribute__((vector_size(16)));
using D2 = double __attribute__((vector_size(16)));
using L2 = int64_t __attribute__((vector_size(16)));
using F2 = float __attribute__((vector_size(8)));

struct Vf {
  F4 v[4];
};
struct Vi {
  I4 v[4];
};
struct Vb {
  U8 v[4];
};

#define PF_PARTS for (int i = 0; i < 4; ++i)
#define PF_LANES for (int i = 0; i < kLanes; ++i)

template <typename V>
inline V load_parts(const void* p) {
  V r;
  memcpy(&r, p, sizeof r);
  return r;
}
// Sixteen small numbers, one by one: compilers know how to widen them.
template <typename T>
inline Vi widen(const T* p) {
  int32_t r[kLanes];
  PF_LANES r[i] = p[i];
  return load_parts<Vi>(r);
}

inline Vf load(const float* p) { return load_parts<Vf>(p); }
inline void store(float* p, Vf a) { memcpy(p, &a, sizeof a); }
inline Vf set1(float x) {
  const F4 a = {x, x, x, x};
  return {{a, a, a, a}};
}
inline Vf add(Vf a, Vf b) {
  PF_PARTS a.v[i] += b.v[i];
  return a;
}
inline Vf sub(Vf a, Vf b) {
  PF_PARTS a.v[i] -= b.v[i];
  return a;
}
inline Vf mul(Vf a, Vf b) {
  PF_PARTS a.v[i] *= b.v[i];
  return a;
}
inline Vf div(Vf a, Vf b) {
  PF_PARTS a.v[i] /= b.v[i];
  return a;
}
#if defined(__FP_FAST_FMAF)
inline F4 fma4(F4 a, F4 b, F4 c) {
  for (int i = 0; i < 4; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
#else
// Without the instruction: in doubles the product is exact. Where the sum is not, of the two doubles around the exact
// value the odd one is taken; that one rounds to the float to which the exact value rounds (Boldo and Melquiond, 2008).
inline F2 fma2(F2 a, F2 b, F2 c) {
  const D2 x = __builtin_convertvector(a, D2) * __builtin_convertvector(b, D2), y = __builtin_convertvector(c, D2);
  const D2 sum = x + y, part = sum - x;
  const D2 error = (x - (sum - part)) + (y - part);  // exact (Knuth)
  const L2 even = ((L2)sum & 1) - 1;  // all ones or zeros; false comparisons leave infinities and NaN alone
  const L2 away = (L2)(error > 0.0) ^ (L2)(sum < 0.0), inexact = (L2)(error > 0.0) | (L2)(error < 0.0);
  return __builtin_convertvector((D2)((L2)sum + (even & inexact & (-1 - 2 * away))), F2);
}
inline F4 fma4(F4 a, F4 b, F4 c) {
  const F2 low = fma2(F2{a[0], a[1]}, F2{b[0], b[1]}, F2{c[0], c[1]});
  const F2 high = fma2(F2{a[2], a[3]}, F2{b[2], b[3]}, F2{c[2], c[3]});
  return F4{low[0], low[1], high[0], high[1]};
}
#endif
inline Vf fma(Vf a, Vf b, Vf c) {
  PF_PARTS c.v[i] = fma4(a.v[i], b.v[i], c.v[i]);
  return c;
}
inline Vf max(Vf a, Vf b) {  // as the x86 instruction: b where they do not compare
  PF_PARTS a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline Vf min(Vf a, Vf b) {
  PF_PARTS a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline Vf abs(Vf a) {
  PF_PARTS a.v[i] = (F4)((U4)a.v[i] & 0x7fffffffu);
  return a;
}
inline Vf to_float(Vi a) {
  Vf r;
  PF_PARTS r.v[i] = __builtin_convertvector(a.v[i], F4);
  return r;
}
inline Vi to_int(Vf a) {  // the addition rounds
  Vi r;
  PF_PARTS r.v[i] = (I4)(a.v[i] + 0x1.8p23f) - 0x4b400000;
  return r;
}
inline Vi load(const int32_t* p) { return load_parts<Vi>(p); }
inline void store(int32_t* p, Vi a) { memcpy(p, &a, sizeof a); }
inline Vi seti(int32_t x) {
  const I4 a = {x, x, x, x};
  return {{a, a, a, a}};
}
inline Vi add(Vi a, Vi b) {
  PF_PARTS a.v[i] = (I4)((U4)a.v[i] + (U4)b.v[i]);
  return a;
}
inline Vi shift_left(Vi a, int n) {
  PF_PARTS a.v[i] = (I4)((U4)a.v[i] << n);
  return a;
}
inline Vf as_float(Vi a) { return load_parts<Vf>(&a); }
inline Vf load_half(const uint16_t* p) {
  const Vi halves = widen(p);
  Vf r;
  PF_PARTS {  // as half_float
    const U4 h = (U4)halves.v[i], magnitude = (h & 0x7fffu) << 13;
    const F4 value = (h & 0x7c00u) == 0x7c00u ? (F4)(magnitude | 0x7f800000u) : (F4)magnitude * 0x1p112f;
    r.v[i] = (F4)((U4)value | (h & 0x8000u) << 16);
  }
  return r;
}
inline void store_half(uint16_t* p, Vf a) { PF_LANES p[i] = float_half(a.v[i / 4][i % 4]); }
inline Vf load_bf16(const uint16_t* p) { return as_float(shift_left(widen(p), 16)); }
inline Vf load_u8(const uint8_t* p) { return to_float(widen(p)); }
inline Vf load_i8(const int8_t* p) { return to_float(widen(p)); }
inline void store_i8(int8_t* p, Vi a) {
  PF_LANES {
    const int32_t x = a.v[i / 4][i % 4];
    p[i] = static_cast<int8_t>(x < -128 ? -128 : x > 127 ? 127 : x);
  }
}
inline Vf first(Vf a, int n, Vf rest) {
  PF_PARTS a.v[i] = I4{0, 1, 2, 3} < n - 4 * i ? a.v[i] : rest.v[i];
  return a;
}

inline Vb loadb(const uint8_t* p) { return load_parts<Vb>(p); }
inline void touch(Vb& a) { asm volatile("" : "+m"(a)); }
inline Vb and_bytes(Vb a, uint8_t mask) {
  PF_PARTS a.v[i] &= static_cast<uint16_t>(mask * 0x101u);
  return a;
}
inline Vb or_masked(Vb a, Vb b, uint8_t mask) {
  PF_PARTS a.v[i] |= b.v[i] & static_cast<uint16_t>(mask * 0x101u);
  return a;
}
inline Vb shr_bytes(Vb a, int n) {
  PF_PARTS a.v[i] >>= n;
  return a;
}
inline Vb shl_bytes(Vb a, int n) {
  PF_PARTS a.v[i] <<= n;
  return a;
}

// Even and odd k apart, as 16-bit numbers; the same bounds as with maddubs, and one step for eight bits made signed.
template <int Bits>
struct Dot {
  static constexpr int kTaken = Bits == 8 ? 128 : 0;
  static constexpr int kSteps = Bits == 4 ? 8 : Bits == 5 ? 4 : Bits == 6 ? 2 : 1;
  I4 sum[4];
  S8 sum16[4];
  void start(const Vi& x) { PF_PARTS sum[i] = x.v[i]; }
  void step(const Vb& w, int32_t a, int step) {
    const U8 b = (U8)I4{a, a, a, a};
    const S8 even = (S8)(b << 8) >> 8, odd = (S8)b >> 8;
    PF_PARTS {
      const U8 x = Bits == 8 ? w.v[i] ^ 0x8080 : w.v[i];
      const S8 w_even = Bits == 8 ? (S8)(x << 8) >> 8 : (S8)(x & 0xff);
      const S8 w_odd = Bits == 8 ? (S8)x >> 8 : (S8)(x >> 8);
      const S8 pairs = w_even * even + w_odd * odd;
      sum16[i] = step % kSteps == 0 ? pairs : sum16[i] + pairs;
      if (step % kSteps == kSteps - 1) sum[i] += ((I4)((U4)sum16[i] << 16) >> 16) + ((I4)sum16[i] >> 16);
    }
  }
  Vi finish() const { return load_parts<Vi>(sum); }
};

#undef PF_PARTS
#undef PF_LANES
#endif

// Lane i + lane i+8, then +4, +2, +1: the one order of every row reduction.
#if defined(PF_AVX512) || defined(PF_AVX2)
inline __m128 low_half(__m256 a) { return _mm256_castps256_ps128(a); }
inline __m128 high_half(__m256 a) { return _mm256_extractf128_ps(a, 1); }
#if defined(PF_AVX512)
inline __m256 low_half(Vf a) { return _mm512_castps512_ps256(a.v); }
inline __m256 high_half(Vf a) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1)); }
#else
inline __m256 low_half(Vf a) { return a.a; }
inline __m256 high_half(Vf a) { return a.b; }
#endif

inline float reduce_add(Vf a) {
  const __m256 eight = _mm256_add_ps(low_half(a), high_half(a));
  const __m128 four = _mm_add_ps(low_half(eight), high_half(eight));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

inline float reduce_max(Vf a) {
  const __m256 eight = _mm256_max_ps(low_half(a), high_half(a));
  const __m128 four = _mm_max_ps(low_half(eight), high_half(eight));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
#else
inline float reduce_add(Vf a) {
  float v[kLanes];
  store(v, a);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) v[i] += v[i + half];
  return v[0];
}

inline float reduce_max(Vf a) {
  float v[kLanes];
  store(v, a);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) v[i] = v[i] > v[i + half] ? v[i] : v[i + half];
  return v[0];
}
#endif

// Widths need not be multiples of 16: the last vector is padded with zeros, on every path alike.
inline Vf load_first(const float* p, int n) {
  if (n >= kLanes) return load(p);
  float padded[kLanes] = {};
  memcpy(padded, p, static_cast<size_t>(n) * sizeof(float));
  return load(padded);
}

inline void store_first(float* p, int n, Vf a) {
  if (n >= kLanes) return store(p, a);
  float padded[kLanes];
  store(padded, a);
  memcpy(p, padded, static_cast<size_t>(n) * sizeof(float));
}

// e^x for x <= 88.7; smaller x than -87.3 count as -87.3 (1.2e-38, the smallest normal float). Cody and Waite's split
// of ln 2, then the Taylor polynomial of degree 7 on [-ln2/2, ln2/2] (its remainder there is below 2^-24).
inline Vf exp(Vf x) {
  const Vf low = set1(-87.3f);
  const Vf clipped = max(x, low);
  const Vi n = to_int(mul(clipped, set1(1.44269504088896341f)));
  const Vf nf = to_float(n);
  Vf r = fma(nf, set1(-0.693359375f), clipped);
  r = fma(nf, set1(2.12194440e-4f), r);
  Vf p = set1(1.0f / 5040.0f);
  p = fma(p, r, set1(1.0f / 720.0f));
  p = fma(p, r, set1(1.0f / 120.0f));
  p = fma(p, r, set1(1.0f / 24.0f));
  p = fma(p, r, set1(1.0f / 6.0f));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return mul(p, as_float(shift_left(add(n, seti(127)), 23)));
}

}  // namespace pilotfish::PF_PATH
