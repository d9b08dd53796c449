// The AVX-512 intrinsics of simd.h out of AVX2 ones, so that the very same kernel source is tested on machines without
// AVX-512. The names stand in the namespace of the path and hide the real ones.
#pragma once

#include <immintrin.h>

// What compilers define as macros.
#undef _mm512_cvtps_ph
#undef _mm512_extractf64x4_pd
#undef _mm512_slli_epi16
#undef _mm512_slli_epi32
#undef _mm512_srli_epi16
#undef _mm512_ternarylogic_epi64

namespace pilotfish::PF_PATH {

struct __m512 {
  __m256 low, high;
};
struct __m512d {
  __m256d low, high;
};
struct __m512i {
  __m256i low, high;
};

#define PF_UNARY(to, from, name) \
  inline to _mm512_##name(from a) { return {_mm256_##name(a.low), _mm256_##name(a.high)}; }
#define PF_BINARY(type, name) \
  inline type _mm512_##name(type a, type b) { return {_mm256_##name(a.low, b.low), _mm256_##name(a.high, b.high)}; }
#define PF_SHIFT(name)                                                  \
  inline __m512i _mm512_##name(__m512i a, unsigned n) {                 \
    const int count = static_cast<int>(n);                              \
    return {_mm256_##name(a.low, count), _mm256_##name(a.high, count)}; \
  }
#define PF_SET(type, from, name) \
  inline type _mm512_##name(from x) { return {_mm256_##name(x), _mm256_##name(x)}; }

PF_SET(__m512, float, set1_ps)
PF_SET(__m512i, int, set1_epi32)
PF_SET(__m512i, char, set1_epi8)
PF_BINARY(__m512, add_ps)
PF_BINARY(__m512, sub_ps)
PF_BINARY(__m512, mul_ps)
PF_BINARY(__m512, div_ps)
PF_BINARY(__m512, max_ps)
PF_BINARY(__m512, min_ps)
PF_BINARY(__m512i, add_epi32)
PF_UNARY(__m512, __m512i, cvtepi32_ps)
PF_UNARY(__m512i, __m512, cvtps_epi32)
PF_UNARY(__m512d, __m512, castps_pd)
PF_SHIFT(slli_epi32)
PF_SHIFT(slli_epi16)
PF_SHIFT(srli_epi16)

#undef PF_UNARY
#undef PF_BINARY
#undef PF_SHIFT
#undef PF_SET

inline __m512 _mm512_castsi512_ps(__m512i a) { return {_mm256_castsi256_ps(a.low), _mm256_castsi256_ps(a.high)}; }
inline __m256 _mm512_castps512_ps256(__m512 a) { return a.low; }
inline __m256d _mm512_extractf64x4_pd(__m512d a, int i) { return i ? a.high : a.low; }
inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline __m512i _mm512_and_si512(__m512i a, __m512i b) {
  return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)};
}
inline __m512i _mm512_ternarylogic_epi64(__m512i a, __m512i b, __m512i c, int table) {
  if (table != 0xf8) __builtin_trap();  // a | (b & c) is all that simd.h asks for
  return {_mm256_or_si256(a.low, _mm256_and_si256(b.low, c.low)),
          _mm256_or_si256(a.high, _mm256_and_si256(b.high, c.high))};
}
inline __m512 _mm512_abs_ps(__m512 a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}

inline __m512 _mm512_loadu_ps(const void* p) {
  const float* lanes = static_cast<const float*>(p);
  return {_mm256_loadu_ps(lanes), _mm256_loadu_ps(lanes + 8)};
}
inline void _mm512_storeu_ps(void* p, __m512 a) {
  _mm256_storeu_ps(static_cast<float*>(p), a.low);
  _mm256_storeu_ps(static_cast<float*>(p) + 8, a.high);
}
inline __m512i _mm512_loadu_si512(const void* p) {
  const __m256i_u* halves = static_cast<const __m256i_u*>(p);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
inline void _mm512_storeu_si512(void* p, __m512i a) {
  _mm256_storeu_si256(static_cast<__m256i_u*>(p), a.low);
  _mm256_storeu_si256(static_cast<__m256i_u*>(p) + 1, a.high);
}

inline __m512i _mm512_cvtepu16_epi32(__m256i a) {
  return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1))};
}
inline __m512i _mm512_cvtepu8_epi32(__m128i a) {
  return {_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8))};
}
inline __m512i _mm512_cvtepi8_epi32(__m128i a) {
  return {_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8))};
}
inline __m512 _mm512_cvtph_ps(__m256i a) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))};
}
inline __m256i _mm512_cvtps_ph(__m512 a, int /* to nearest even: the only rounding in use */) {
  return _mm256_set_m128i(_mm256_cvtps_ph(a.high, _MM_FROUND_TO_NEAREST_INT),
                          _mm256_cvtps_ph(a.low, _MM_FROUND_TO_NEAREST_INT));
}

inline __m512 _mm512_mask_mov_ps(__m512 rest, unsigned mask, __m512 a) {
  float from[16], to[16];
  _mm512_storeu_ps(from, a);
  _mm512_storeu_ps(to, rest);
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) to[i] = from[i];
  return _mm512_loadu_ps(to);
}
inline __m128i _mm512_cvtsepi32_epi8(__m512i a) {
  int32_t from[16];
  int8_t to[16];
  _mm512_storeu_si512(from, a);
  for (int i = 0; i < 16; ++i) to[i] = static_cast<int8_t>(from[i] < -128 ? -128 : from[i] > 127 ? 127 : from[i]);
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(to));
}
// Each lane adds four products of an unsigned and a signed byte; nothing saturates. Not inlined: it would be thousands
// of times, which takes compilers minutes.
[[gnu::noinline]] inline __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i w, __m512i a) {
  int32_t sums[16];
  uint8_t unsigned_bytes[64];
  int8_t signed_bytes[64];
  _mm512_storeu_si512(sums, sum);
  _mm512_storeu_si512(unsigned_bytes, w);
  _mm512_storeu_si512(signed_bytes, a);
  for (int i = 0; i < 64; ++i) sums[i / 4] += unsigned_bytes[i] * signed_bytes[i];
  return _mm512_loadu_si512(sums);
}

}  // namespace pilotfish::PF_PATH
