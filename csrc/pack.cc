#include "pack.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#define PF_PATH packing
#include "simd.h"

namespace pilotfish {

namespace {

using packing::bits_float;
using packing::half_float;

struct Format {
  const char* kind;
  Values values;
  Scales scales;
  int block_elements;
  int block_bytes;
};

constexpr Format kFormats[] = {
    {"F32", Values::kF32, Scales::kNone, 1, 4},         {"F16", Values::kF16, Scales::kNone, 1, 2},
    {"BF16", Values::kBf16, Scales::kNone, 1, 2},       {"Q4_0", Values::kU4, Scales::kHalf, 32, 18},
    {"Q4_1", Values::kU4, Scales::kHalfMin, 32, 20},    {"Q5_0", Values::kU5, Scales::kHalf, 32, 22},
    {"Q5_1", Values::kU5, Scales::kHalfMin, 32, 24},    {"Q8_0", Values::kU8, Scales::kHalf, 32, 34},
    {"Q4_K", Values::kU4, Scales::kSuperMin, 256, 144}, {"Q5_K", Values::kU5, Scales::kSuperMin, 256, 176},
    {"Q6_K", Values::kU6, Scales::kSuper16, 256, 210},
};

bool is_super(Scales scales) { return scales == Scales::kSuperMin || scales == Scales::kSuper16; }

size_t header_bytes(Scales scales) {  // of a super block
  return scales == Scales::kSuperMin ? 4 * kPanel : scales == Scales::kSuper16 ? 2 * kPanel : 0;
}

size_t group_bytes(Values values, Scales scales) {
  return line_bytes(values) + (scales == Scales::kHalfMin ? 4 : 2) * kPanel;
}

size_t panel_bytes(Values values, Scales scales, int inputs) {
  if (scales == Scales::kNone) return static_cast<size_t>(inputs) * kPanel * (values == Values::kF32 ? 4 : 2);
  const size_t groups = inputs / kGroup;
  return groups * group_bytes(values, scales) +
         (is_super(scales) ? groups * kGroup / kSuper * header_bytes(scales) : 0);
}

uint16_t half_at(const uint8_t* p) {
  uint16_t half;
  memcpy(&half, p, 2);
  return half;
}

uint32_t word_at(const uint8_t* p) {
  uint32_t word;
  memcpy(&word, p, 4);
  return word;
}

// One output's share of a group of 32: its integers and whatever its format scales them with.
struct Group {
  uint8_t q[kGroup];
  uint16_t d, m;     // halves; of the super block for kSuper*
  uint8_t sc, mn;    // kSuperMin
  int8_t halves[2];  // kSuper16
};

void nibbles(const uint8_t* p, uint8_t* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = p[i] & 15;
    q[16 + i] = p[i] >> 4;
  }
}

void fifth_bits(uint32_t high, uint8_t* q) {
  for (int i = 0; i < kGroup; ++i) q[i] |= static_cast<uint8_t>((high >> i & 1) << 4);
}

// The 6-bit scale and minimum that Q4_K and Q5_K pack into twelve bytes: 0..3 plain, the high bits of 4..7 above them.
void k_scales(const uint8_t* p, int g, Group& group) {
  if (g < 4) {
    group.sc = p[g] & 63;
    group.mn = p[g + 4] & 63;
  } else {
    group.sc = static_cast<uint8_t>((p[g + 4] & 15) | (p[g - 4] >> 6 << 4));
    group.mn = static_cast<uint8_t>((p[g + 4] >> 4) | (p[g] >> 6 << 4));
  }
}

// Group g of a row whose blocks start at `row` (layouts: ggml-common.h of the ggml project).
void read_group(const Format& format, const uint8_t* row, int g, Group& group) {
  const int in_block = format.block_elements / kGroup;
  const uint8_t* block = row + static_cast<size_t>(g / in_block) * format.block_bytes;
  g %= in_block;
  if (format.scales == Scales::kSuperMin) {
    const uint8_t* integers = block + (format.values == Values::kU5 ? 48 : 16) + g / 2 * 32;
    group.d = half_at(block);
    group.m = half_at(block + 2);
    k_scales(block + 4, g, group);
    for (int i = 0; i < kGroup; ++i) group.q[i] = integers[i] >> (g % 2 * 4) & 15;
    if (format.values == Values::kU5)
      for (int i = 0; i < kGroup; ++i) group.q[i] |= static_cast<uint8_t>((block[16 + i] >> g & 1) << 4);
  } else if (format.scales == Scales::kSuper16) {
    const int part = g / 4, i = g % 4;
    const uint8_t* low = block + 64 * part + 32 * (i % 2);
    const uint8_t* high = block + 128 + 32 * part;
    for (int k = 0; k < kGroup; ++k)
      group.q[k] = static_cast<uint8_t>((low[k] >> (i / 2 * 4) & 15) | (high[k] >> (2 * i) & 3) << 4);
    memcpy(group.halves, block + 192 + 2 * g, 2);
    group.d = half_at(block + 208);
  } else {
    group.d = half_at(block);
    block += 2;
    if (format.scales == Scales::kHalfMin) {
      group.m = half_at(block);
      block += 2;
    }
    if (format.values == Values::kU8) {
      for (int i = 0; i < kGroup; ++i) group.q[i] = block[i] ^ 0x80;  // signed to 128 + signed
    } else {
      const bool five = format.values == Values::kU5;
      nibbles(block + (five ? 4 : 0), group.q);
      if (five) fifth_bits(word_at(block), group.q);
    }
  }
}

void put_word(uint8_t* p, uint32_t word) { memcpy(p, &word, 4); }

// Writes the integers of one lane into the lines of a group, returns where the scales follow.
uint8_t* put_integers(Values values, const uint8_t* q, int lane, uint8_t* lines) {
  uint8_t* at = lines + 4 * lane;
  if (values == Values::kU8) {
    for (int j = 0; j < 8; ++j) put_word(at + 64 * j, word_at(q + 4 * j));
    return lines + 512;
  }
  for (int j = 0; j < 4; ++j)
    put_word(at + 64 * j, (word_at(q + 4 * j) & 0x0f0f0f0fu) | (word_at(q + 16 + 4 * j) & 0x0f0f0f0fu) << 4);
  if (values == Values::kU4) return lines + 256;
  if (values == Values::kU5) {
    uint32_t bits = 0;
    for (int j = 0; j < 8; ++j) bits |= (word_at(q + 4 * j) >> 4 & 0x01010101u) << j;
    put_word(at + 256, bits);
    return lines + 320;
  }
  for (int i = 0; i < 2; ++i) {
    uint32_t bits = 0;
    for (int j = 0; j < 4; ++j) bits |= (word_at(q + 16 * i + 4 * j) >> 4 & 0x03030303u) << (2 * j);
    put_word(at + 256 + 64 * i, bits);
  }
  return lines + 384;
}

void pack_integers(const Format& format, const uint8_t* const* rows, int inputs, uint8_t* out) {
  const int groups = inputs / kGroup;
  Group group{};
  for (int g = 0; g < groups; ++g) {
    uint8_t* super = nullptr;
    if (is_super(format.scales) && g % (kSuper / kGroup) == 0) {
      super = out;
      out += header_bytes(format.scales);
    }
    for (int lane = 0; lane < kPanel; ++lane) {
      if (!rows[lane]) continue;  // a lane beyond the outputs stays zero
      read_group(format, rows[lane], g, group);
      uint8_t* scales = put_integers(format.values, group.q, lane, out);
      switch (format.scales) {
        case Scales::kSuperMin:
          if (super) memcpy(super + 2 * lane, &group.d, 2), memcpy(super + 2 * (kPanel + lane), &group.m, 2);
          scales[lane] = group.sc;
          scales[kPanel + lane] = group.mn;
          break;
        case Scales::kSuper16:
          if (super) memcpy(super + 2 * lane, &group.d, 2);
          memcpy(scales + lane, &group.halves[0], 1);
          memcpy(scales + kPanel + lane, &group.halves[1], 1);
          break;
        default:
          memcpy(scales + 2 * lane, &group.d, 2);
          if (format.scales == Scales::kHalfMin) memcpy(scales + 2 * (kPanel + lane), &group.m, 2);
      }
    }
    out += group_bytes(format.values, format.scales);
  }
}

template <size_t kSize>
void pack_floats(const uint8_t* const* rows, int inputs, uint8_t* out) {
  constexpr int kNear = 128;  // what is written stays in the cache until all lanes have been there
  for (int first = 0; first < inputs; first += kNear)
    for (int lane = 0; lane < kPanel && rows[lane]; ++lane)
      for (int k = first; k < std::min(first + kNear, inputs); ++k)
        memcpy(out + (static_cast<size_t>(k) * kPanel + lane) * kSize, rows[lane] + k * kSize, kSize);
}

const Format& format_of(const std::string& kind) {
  for (const Format& format : kFormats)
    if (kind == format.kind) return format;
  throw std::invalid_argument("there are no kernels for weights of the format " + kind);
}

// Weights lie side by side in pieces of memory large enough for large pages. A decoding step reads them all once, and
// with pages of 4 KiB a fifth of that time is the translation of addresses (measured on a virtual machine).
struct Piece {
  explicit Piece(size_t bytes) : size(bytes), data(static_cast<uint8_t*>(std::aligned_alloc(kLargePage, bytes))) {
    if (!data) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    madvise(data, size, MADV_HUGEPAGE);  // a wish: nothing depends on it
#endif
  }
  ~Piece() { std::free(data); }
  Piece(const Piece&) = delete;

  static constexpr size_t kLargePage = 2 << 20;
  size_t size;
  size_t used = 0;
  uint8_t* data;
};

std::shared_ptr<uint8_t> allocate(size_t bytes) {
  constexpr size_t kLeast = 128 * Piece::kLargePage, kAlignment = 64;  // what is not used is never touched
  static std::mutex mutex;
  static std::weak_ptr<Piece> last;
  const std::lock_guard<std::mutex> lock(mutex);
  bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  std::shared_ptr<Piece> piece = last.lock();
  if (!piece || piece->size - piece->used < bytes) {
    const size_t pages = (bytes + Piece::kLargePage - 1) / Piece::kLargePage;
    last = piece = std::make_shared<Piece>(std::max(kLeast, pages * Piece::kLargePage));
  }
  uint8_t* memory = piece->data + piece->used;
  piece->used += bytes;
  return {std::move(piece), memory};
}

}  // namespace

size_t raw_bytes(const std::string& kind, int outputs, int inputs) {
  const Format& format = format_of(kind);
  if (outputs < 1 || inputs < 1 || inputs % format.block_elements)
    throw std::invalid_argument("a matrix of " + std::to_string(outputs) + " x " + std::to_string(inputs) +
                                " does not fill blocks of " + kind);
  return static_cast<size_t>(inputs / format.block_elements) * format.block_bytes * outputs;
}

PackedWeight pack(const std::string& kind, int outputs, int inputs, const uint8_t* raw, size_t bytes, int threads) {
  const Format& format = format_of(kind);
  if (bytes != raw_bytes(kind, outputs, inputs))
    throw std::invalid_argument(std::to_string(bytes) + " bytes are not " + std::to_string(outputs) + " x " +
                                std::to_string(inputs) + " in " + kind);
  const size_t row_bytes = bytes / outputs;
  PackedWeight packed{kind, {}, nullptr};
  Weight& weight = packed.weight;
  weight = {format.values,
            format.scales,
            outputs,
            inputs,
            (outputs + kPanel - 1) / kPanel,
            panel_bytes(format.values, format.scales, inputs),
            nullptr};
  packed.memory = allocate(packed.bytes());
  weight.data = packed.memory.get();
  auto work = [&](int first, int last) {
    for (int panel = first; panel < last; ++panel) {
      uint8_t* out = packed.memory.get() + panel * weight.panel_bytes;
      const uint8_t* rows[kPanel] = {};
      for (int lane = 0; lane < kPanel && panel * kPanel + lane < outputs; ++lane)
        rows[lane] = raw + row_bytes * (panel * kPanel + lane);
      if (!rows[kPanel - 1]) memset(out, 0, weight.panel_bytes);
      if (format.scales != Scales::kNone)
        pack_integers(format, rows, inputs, out);
      else if (format.values == Values::kF32)
        pack_floats<4>(rows, inputs, out);
      else
        pack_floats<2>(rows, inputs, out);
    }
  };
  threads = std::max(1, std::min(threads, weight.panels / 4));
  std::vector<std::thread> team;
  for (int t = 1; t < threads; ++t)
    team.emplace_back(work, weight.panels * t / threads, weight.panels * (t + 1) / threads);
  work(0, weight.panels / threads);
  for (std::thread& thread : team) thread.join();
  return packed;
}

void unpack_row(const Weight& weight, int row, float* out) {
  const int lane = row % kPanel;
  const uint8_t* p = weight.data + row / kPanel * weight.panel_bytes;
  if (weight.scales == Scales::kNone) {
    const int size = weight.values == Values::kF32 ? 4 : 2;
    for (int k = 0; k < weight.inputs; ++k) {
      const uint8_t* at = p + static_cast<size_t>(k * kPanel + lane) * size;
      out[k] = weight.values == Values::kF32   ? bits_float(word_at(at))
               : weight.values == Values::kF16 ? half_float(half_at(at))
                                               : bits_float(static_cast<uint32_t>(half_at(at)) << 16);
    }
    return;
  }
  const int zero = zero_of(weight.values, weight.scales);
  float d = 0.0f, m = 0.0f;  // of the super block, or of the group
  for (int g = 0; g < weight.inputs / kGroup; ++g) {
    if (is_super(weight.scales) && g % (kSuper / kGroup) == 0) {
      d = half_float(half_at(p + 2 * lane));
      if (weight.scales == Scales::kSuperMin) m = half_float(half_at(p + 2 * (kPanel + lane)));
      p += header_bytes(weight.scales);
    }
    const uint8_t* scales = p + line_bytes(weight.values);
    if (!is_super(weight.scales)) {
      d = half_float(half_at(scales + 2 * lane));
      if (weight.scales == Scales::kHalfMin) m = half_float(half_at(scales + 2 * (kPanel + lane)));
    }
    for (int k = 0; k < kGroup; ++k, ++out) {
      const uint8_t* at = p + 4 * lane + k % 4;
      const int half = k / 16, j = k / 4;
      int q = weight.values == Values::kU8 ? at[64 * j] : at[64 * (j % 4)] >> (4 * half) & 15;
      if (weight.values == Values::kU5) q |= (at[256] >> j & 1) << 4;
      if (weight.values == Values::kU6) q |= (at[256 + 64 * half] >> (2 * (j % 4)) & 3) << 4;
      const float value = static_cast<float>(q - zero);
      switch (weight.scales) {
        case Scales::kSuperMin:
          *out = d * static_cast<float>(scales[lane]) * value - m * static_cast<float>(scales[kPanel + lane]);
          break;
        case Scales::kSuper16:
          *out = d * static_cast<float>(static_cast<int8_t>(scales[kPanel * half + lane])) * value;
          break;
        case Scales::kHalfMin:
          *out = d * value + m;
          break;
        default:
          *out = d * value;
      }
    }
    p += group_bytes(weight.values, weight.scales);
  }
}

}  // namespace pilotfish
