// What the kernels of one instruction-set path offer, and the plain data they work on.
//
// Numeric contract (docs/architecture.md): one float32 accumulator per output element that walks K upwards with the
// same operations whatever the number of rows; callers divide outputs, rows, heads and chunks among threads, never K.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pilotfish {

constexpr int kPanel = 16;       // outputs in a panel of packed weights: one lane each
constexpr int kPair = 2;         // panels that `linear` computes together, at most
constexpr int kGroup = 32;       // k that share an activation scale
constexpr int kSuper = 256;      // k that share the float scales of a K-quant
constexpr int kBlockSlots = 16;  // slots in a KV block
constexpr int kChunk = 256;      // absolute positions that attention reduces at a time

// How the numbers of a weight are stored. U4..U8 are unsigned integers of that many bits.
enum class Values : uint8_t { kF32, kF16, kBf16, kU4, kU5, kU6, kU8 };

// What turns an integer q into a value.
enum class Scales : uint8_t {
  kNone,      // floats
  kHalf,      // d * (q - zero), d a half per group of 32                     Q4_0 Q5_0 Q8_0
  kHalfMin,   // d * q + m, both halves per group of 32                       Q4_1 Q5_1
  kSuperMin,  // (d * sc) * q - (dmin * mn), u8 sc, mn per 32, halves per 256   Q4_K Q5_K
  kSuper16,   // (d * sc) * (q - zero), i8 sc per group of 16, half d per 256   Q6_K
};

constexpr int bits_of(Values values) {
  return values == Values::kU4 ? 4 : values == Values::kU5 ? 5 : values == Values::kU6 ? 6 : 8;
}

// Bytes of the integers of one group in a panel.
constexpr int line_bytes(Values values) { return bits_of(values) * kGroup * kPanel / 8; }

// What an integer of value zero is stored as.
constexpr int zero_of(Values values, Scales scales) {
  return scales == Scales::kHalf || scales == Scales::kSuper16 ? 1 << (bits_of(values) - 1) : 0;
}

// A matrix [outputs, inputs] in panels of 16 outputs. A panel is one sequential stream over k:
//   floats: for each k 16 numbers.
//   integers: for each super block (kSuper* only) 16 half d [and 16 half dmin], then for each group of 32 its integers
//   and its scales (16 half d [, 16 half m] | 16 u8 sc, 16 u8 mn | 16 i8 sc of the first, 16 of the second half).
//   Integers come in lines of 64 bytes, byte lane * 4 + b. The low four bits: line j in 0..3 holds k = 4j + b in its
//   low and k = 16 + 4j + b in its high nibble (U4, U5, U6), or line j in 0..7 holds k = 4j + b (U8). High bits follow:
//   U5 has one line, bit j of a byte is bit 4 of k = 4j + b; U6 has two, bits 2j and 2j + 1 of a byte of line i are
//   bits 4 and 5 of k = 16i + 4j + b.
struct Weight {
  Values values;
  Scales scales;
  int outputs;  // real rows; lanes beyond them in the last panel are zeros
  int inputs;
  int panels;
  size_t panel_bytes;
  const uint8_t* data;  // 64-byte aligned
};

constexpr int kZeroByHalf = zero_of(Values::kU6, Scales::kSuper16);

// Thirty-two quantised numbers of a row, x = q * scale, and what a linear needs to know of them: one cache line.
struct alignas(64) Group {
  int8_t q[kGroup];  // within -127..127
  float scale;
  float offset;             // scale * (sum of q)
  int32_t minus;            // -(sum of q)
  int32_t minus_halves[2];  // the same over each half, times kZeroByHalf
};

// The input rows of a linear, as floats and (for integer weights) quantised. The rows of a tile lie interleaved, so
// that a kernel finds the same group of all of them side by side.
struct Rows {
  const float* x;  // [rows, stride]
  int stride;
  const Group* groups;  // [tiles, inputs / 32, tile]
  int tile;             // rows

  const Group* row(int index, int inputs) const {
    return groups + static_cast<size_t>(index / tile) * tile * (inputs / kGroup) + index % tile;
  }
};

// Keys and values of one layer. K of a block and head is [head_dim, 16 slots], so that the scores of 16 slots come out
// in 16 lanes; V is [16 slots, head_dim]. Both are IEEE halves, clamped to the finite range.
struct KvLayer {
  uint16_t* k;  // of block 0 and head 0
  uint16_t* v;
  int kv_heads;
  int head_dim;
  size_t block_halves, head_halves;  // from one block, and from one head, to the next

  size_t tile(int block, int head) const {
    return static_cast<size_t>(block) * block_halves + static_cast<size_t>(head) * head_halves;
  }
};

// The query rows of one request and where each looks (tree.py, TreeBatch). Arrays are indexed by batch row.
struct AttentionRows {
  const float* q;  // [rows, stride]: head h of row r at q + r * stride + h * head_dim
  int stride;
  int heads;
  const int32_t* positions;
  const int32_t* prefix_lens;  // positions below lie in the slot of their own number
  const int32_t* path_starts;
  const int32_t* path_slots;  // slots of positions prefix_lens...
  const int32_t* blocks;      // the request's block table
};

constexpr int kPairs = 48;  // (row, head) pairs that attention works on at a time

// Floats: the scores of each pair, and one tile of K.
constexpr size_t attend_scratch(int head_dim) {
  return static_cast<size_t>(kPairs) * kChunk + static_cast<size_t>(head_dim) * kBlockSlots / 2;
}

// How the token at a position is chosen: the numbers of SamplingParams (params.py) and what keys the noise.
struct Sampling {
  double temperature;  // 0: the likeliest token
  double min_p;        // 0: no such filter
  int top_k;           // 0: no such filter
  double top_p;        // 1: no such filter
  uint64_t seed;
  uint64_t position;
};

// Floats: sums of a pair of panels.
constexpr size_t linear_scratch(int rows) { return static_cast<size_t>(rows) * kPair * kPanel; }

// The size of each share (the last may be smaller) where `count` things are split evenly into as few as possible of at
// most `most`; at least 1. Always inlined: no path may leave a copy of it to the linker (simd.h).
[[gnu::always_inline]] constexpr int even_share(int count, int most) {
  if (count <= 0) return 1;
  const int shares = (count + most - 1) / most;
  return (count + shares - 1) / shares;
}

// The groups of so many rows, in whole tiles.
constexpr size_t group_count(int rows, int inputs, int tile) {
  return static_cast<size_t>(rows + tile - 1) / tile * tile * (inputs / kGroup);
}

struct Kernels {
  const char* path;
  int tile_rows;  // the most rows of a tile

  // The groups of n numbers to out[0], out[stride], ...: scale = max|x| / 127 over each 32, q rounded to nearest even.
  void (*quantize)(const float* x, int n, Group* out, int stride);
  // out[row, 0 .. 16 * panels) for rows [row0, row1) and panels [panel0, panel1): out = w x (+ bias) or out += that.
  // `out` and `bias` start at panel 0; never writes beyond weight.outputs. `next` is where the weights lie that this
  // thread will need next, or nullptr: it asks for them in time. `sums` holds linear_scratch(row1 - row0) floats.
  void (*linear)(const Weight& weight, const Rows& rows, int row0, int row1, int panel0, int panel1, const float* bias,
                 float* out, int out_stride, bool add, const uint8_t* next, float* sums);
  void (*norm)(const float* x, const float* weight, float eps, int n, float* out);
  // out = silu(gate) * up, n of each
  void (*gated)(const float* gate, const float* up, int n, float* out);
  // Heads [head0, head1) of one row of [heads | kv_heads | kv_heads] heads, which starts at `qkv`: norm (where given),
  // rotate q and k in place, store k and v.
  void (*rope_kv)(float* qkv, int head0, int head1, int heads, const float* q_norm, const float* k_norm, float eps,
                  const float* cos, const float* sin, const KvLayer& kv, int block, int offset);
  // Scores, softmax parts and weighted values of one chunk for rows [row0, row1) and the heads of one kv head:
  // part[((row - row0) * heads + head) * part_stride + ...] = {o[head_dim], max, sum}; rows that do not reach the chunk
  // are left alone. `scratch` holds attend_scratch(head_dim) floats, 64-byte aligned.
  void (*attend)(const AttentionRows& rows, const KvLayer& kv, int row0, int row1, int kv_head, int chunk, float scale,
                 float* part, size_t part_stride, float* scratch);
  // Joins `chunks` parts of one row and head in ascending order into out[head_dim].
  void (*combine)(const float* parts, size_t chunk_stride, int chunks, int head_dim, float* out);
  // `groups` times the integer steps of a group on as many independent sums as hide their latency: what the linear
  // kernels could do at most. Returns the number of multiply-adds; `sum` takes a number other than 0.
  int64_t (*dots)(int groups, int32_t* sum);
  // The greatest of n floats and the lowest index that reaches it; NaN never wins.
  int (*argmax)(const float* x, int n, float* best);
  // The token that sampling.py's `choose` gives for n logits, n from 1 to 2^23; -1 where the highest is not finite.
  int (*sample)(const float* logits, int n, const Sampling& rule);
  // What sampling.py's `log_probabilities` gives for n logits, n from 1 to 2^23: the normaliser and the ids of the
  // `count` likeliest tokens, count up to n; false where the highest logit is not finite.
  bool (*log_probabilities)(const float* logits, int n, int count, double* normaliser, int32_t* ids);
};

}  // namespace pilotfish
