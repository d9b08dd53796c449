// The sixteen lanes of simd.h in four NEON registers, with the dot product instructions of aarch64.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace pilotfish::PF_PATH {

struct Vf {
  float32x4_t a, b, c, d;
};
struct Vi {
  int32x4_t a, b, c, d;
};
struct Vb {
  uint8x16_t a, b, c, d;
};

// Four members and not an array with loops: GCC unrolls those only after it has decided what to inline and what to keep
// in memory.
#define PF_UNARY(to, from, name, f) \
  inline to name(from x) { return {f(x.a), f(x.b), f(x.c), f(x.d)}; }
#define PF_BINARY(type, name, f) \
  inline type name(type x, type y) { return {f(x.a, y.a), f(x.b, y.b), f(x.c, y.c), f(x.d, y.d)}; }
#define PF_SHIFT(type, name, op) \
  inline type name(type x, int n) { return {x.a op n, x.b op n, x.c op n, x.d op n}; }

// As the x86 instructions: y where they do not compare. NEON's own would give NaN.
inline float32x4_t greater(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
inline float32x4_t less(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }

PF_BINARY(Vf, add, vaddq_f32)
PF_BINARY(Vf, sub, vsubq_f32)
PF_BINARY(Vf, mul, vmulq_f32)
PF_BINARY(Vf, div, vdivq_f32)
PF_BINARY(Vf, max, greater)
PF_BINARY(Vf, min, less)
PF_BINARY(Vi, add, vaddq_s32)
PF_UNARY(Vf, Vf, abs, vabsq_f32)
PF_UNARY(Vf, Vi, to_float, vcvtq_f32_s32)
PF_UNARY(Vi, Vf, to_int, vcvtnq_s32_f32)  // round to nearest even
PF_UNARY(Vf, Vi, as_float, vreinterpretq_f32_s32)
PF_SHIFT(Vi, shift_left, <<)
PF_SHIFT(Vb, shr_bytes, >>)
PF_SHIFT(Vb, shl_bytes, <<)

#undef PF_UNARY
#undef PF_BINARY
#undef PF_SHIFT

inline Vf load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
inline void store(float* p, Vf x) {
  vst1q_f32(p, x.a);
  vst1q_f32(p + 4, x.b);
  vst1q_f32(p + 8, x.c);
  vst1q_f32(p + 12, x.d);
}
inline Vf set1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline Vf fma(Vf x, Vf y, Vf z) {
  return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
}
inline Vi load(const int32_t* p) { return {vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12)}; }
inline void store(int32_t* p, Vi x) {
  vst1q_s32(p, x.a);
  vst1q_s32(p + 4, x.b);
  vst1q_s32(p + 8, x.c);
  vst1q_s32(p + 12, x.d);
}
inline Vi seti(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x)}; }

inline float32x4_t four_halves(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline Vf load_half(const uint16_t* p) {
  return {four_halves(p), four_halves(p + 4), four_halves(p + 8), four_halves(p + 12)};
}
inline void store_four_halves(uint16_t* p, float32x4_t x) {  // round to nearest even
  vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}
inline void store_half(uint16_t* p, Vf x) {
  store_four_halves(p, x.a);
  store_four_halves(p + 4, x.b);
  store_four_halves(p + 8, x.c);
  store_four_halves(p + 12, x.d);
}
inline float32x4_t four_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
inline Vf load_bf16(const uint16_t* p) { return {four_bf16(p), four_bf16(p + 4), four_bf16(p + 8), four_bf16(p + 12)}; }
inline Vf load_u8(const uint8_t* p) {
  const uint8x16_t bytes = vld1q_u8(p);
  const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
  return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_high_u16(low)),
          vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))), vcvtq_f32_u32(vmovl_high_u16(high))};
}
inline Vf load_i8(const int8_t* p) {
  const int8x16_t bytes = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
          vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))};
}
inline void store_i8(int8_t* p, Vi x) {  // saturating
  const int16x8_t low = vqmovn_high_s32(vqmovn_s32(x.a), x.b), high = vqmovn_high_s32(vqmovn_s32(x.c), x.d);
  vst1q_s8(p, vqmovn_high_s16(vqmovn_s16(low), high));
}
inline float32x4_t first_four(float32x4_t x, int n, float32x4_t rest) {
  const int32x4_t lanes = {0, 1, 2, 3};
  return vbslq_f32(vcltq_s32(lanes, vdupq_n_s32(n)), x, rest);
}
inline Vf first(Vf x, int n, Vf rest) {
  return {first_four(x.a, n, rest.a), first_four(x.b, n - 4, rest.b), first_four(x.c, n - 8, rest.c),
          first_four(x.d, n - 12, rest.d)};
}

inline Vb loadb(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}; }
inline void touch(Vb& x) { asm volatile("" : "+w"(x.a), "+w"(x.b), "+w"(x.c), "+w"(x.d)); }
inline Vb and_bytes(Vb x, uint8_t mask) {
  const uint8x16_t m = vdupq_n_u8(mask);
  return {vandq_u8(x.a, m), vandq_u8(x.b, m), vandq_u8(x.c, m), vandq_u8(x.d, m)};
}
inline Vb or_masked(Vb x, Vb y, uint8_t mask) {  // x | (y & mask)
  const Vb z = and_bytes(y, mask);
  return {vorrq_u8(x.a, z.a), vorrq_u8(x.b, z.b), vorrq_u8(x.c, z.c), vorrq_u8(x.d, z.d)};
}

// The instruction takes both sides signed: weights below 128 are that already, those of eight bits are made so.
template <int Bits>
struct Dot {
  static constexpr int kTaken = Bits == 8 ? 128 : 0;
  Vi sum;
  void start(Vi x) { sum = x; }
  void step(Vb w, int32_t a, int /*step*/) {
    const int8x16_t b = vreinterpretq_s8_s32(vdupq_n_s32(a));
    sum = {dot(sum.a, w.a, b), dot(sum.b, w.b, b), dot(sum.c, w.c, b), dot(sum.d, w.d, b)};
  }
  Vi finish() const { return sum; }

 private:
  static int32x4_t dot(int32x4_t x, uint8x16_t w, int8x16_t b) {
    const uint8x16_t bytes = Bits == 8 ? veorq_u8(w, vdupq_n_u8(0x80)) : w;
    return vdotq_s32(x, vreinterpretq_s8_u8(bytes), b);
  }
};

}  // namespace pilotfish::PF_PATH
