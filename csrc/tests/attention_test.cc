// Attention against plain loops that follow its definition, bit for bit on every path this machine runs: random trees
// and chains, contexts across several chunks, random block tables, NaN in every slot that a row must not look at.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "../kernels.h"
#include "check.h"
#include "plain.h"

using namespace pilotfish;

namespace {

constexpr uint16_t kNan = 0x7e00;

float half_value(uint16_t half) {
  static const std::vector<float> all = [] {
    std::vector<float> values(65536);
    for (int i = 0; i < 65536; ++i) {
      const int exponent = (i >> 10) & 31, mantissa = i & 1023;
      const double size = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
      values[i] = static_cast<float>(i & 0x8000 ? -size : size);
    }
    return values;
  }();
  return all[half];
}

// The rows of one request over a cache of random numbers.
struct Case {
  int heads, kv_heads, head_dim, rows = 0;
  std::vector<float> q;
  std::vector<int32_t> positions, prefix_lens, path_starts{0}, path_slots, blocks;
  std::vector<uint16_t> k, v;

  size_t tile(int slot, int kv_head) const {
    return (static_cast<size_t>(blocks[slot / kBlockSlots]) * kv_heads + kv_head) * head_dim * kBlockSlots;
  }
  uint16_t& key(int slot, int kv_head, int i) { return k[tile(slot, kv_head) + i * kBlockSlots + slot % kBlockSlots]; }
  uint16_t& value(int slot, int kv_head, int i) { return v[tile(slot, kv_head) + slot % kBlockSlots * head_dim + i]; }
  int slot(int row, int position) const {
    const int beyond = position - prefix_lens[row];
    return beyond < 0 ? position : path_slots[path_starts[row] + beyond];
  }

  void add_row(int position, int prefix, const std::vector<int32_t>& path) {
    ++rows;
    positions.push_back(position);
    prefix_lens.push_back(prefix);
    path_slots.insert(path_slots.end(), path.begin(), path.end());
    path_starts.push_back(static_cast<int32_t>(path_slots.size()));
  }

  std::vector<float> expected(int row, int head) {
    struct ChunkPart {
      float most, sum;
      std::vector<float> o;
    };
    const int kv_head = head / (heads / kv_heads);
    const float* query = q.data() + (static_cast<size_t>(row) * heads + head) * head_dim;
    const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
    std::vector<ChunkPart> parts;
    float greatest = -INFINITY;
    for (int first = 0; first <= positions[row]; first += kChunk) {
      std::vector<float> scores;
      ChunkPart part{-INFINITY, 0.0f, std::vector<float>(head_dim, 0.0f)};
      for (int position = first; position <= positions[row] && position < first + kChunk; ++position) {
        float score = 0.0f;
        for (int i = 0; i < head_dim; ++i)
          score = std::fma(query[i], half_value(key(slot(row, position), kv_head, i)), score);
        scores.push_back(score * scale);
        part.most = std::max(part.most, scores.back());
      }
      for (float& score : scores) score = plain_exp(score - part.most);
      float lanes[16] = {};
      for (size_t t = 0; t < scores.size(); ++t) lanes[t % 16] += scores[t];
      part.sum = plain_sum(lanes);
      for (size_t t = 0; t < scores.size(); ++t)
        for (int i = 0; i < head_dim; ++i) {
          const uint16_t half = value(slot(row, first + static_cast<int>(t)), kv_head, i);
          part.o[i] = std::fma(scores[t], half_value(half), part.o[i]);
        }
      greatest = std::max(greatest, part.most);
      parts.push_back(part);
    }
    float sum = 0.0f;
    std::vector<float> out(head_dim, 0.0f);
    for (const ChunkPart& part : parts) {
      const float factor = plain_exp(part.most - greatest);
      sum = std::fma(factor, part.sum, sum);
      for (int i = 0; i < head_dim; ++i) out[i] = std::fma(factor, part.o[i], out[i]);
    }
    for (float& o : out) o /= sum;
    return out;
  }

  // What the kernels give, the rows split at random.
  std::vector<float> actual(const Kernels& kernels, std::mt19937& random) {
    const size_t stride = head_dim + 16;
    const int chunks = *std::max_element(positions.begin(), positions.end()) / kChunk + 1;
    const size_t chunk_stride = static_cast<size_t>(rows) * heads * stride;
    std::vector<float> parts(chunk_stride * chunks, NAN), out(static_cast<size_t>(rows) * heads * head_dim);
    auto* scratch = static_cast<float*>(std::aligned_alloc(64, (attend_scratch(head_dim) * 4 + 63) / 64 * 64));
    std::fill_n(scratch, attend_scratch(head_dim), NAN);
    const AttentionRows view{q.data(),           heads * head_dim,  heads,        positions.data(), prefix_lens.data(),
                             path_starts.data(), path_slots.data(), blocks.data()};
    const size_t tile = static_cast<size_t>(head_dim) * kBlockSlots;
    const KvLayer kv{k.data(), v.data(), kv_heads, head_dim, kv_heads * tile, tile};
    const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
    for (int row = 0, end; row < rows; row = end) {
      end = std::min<int>(rows, row + 1 + static_cast<int>(random() % 40));
      for (int chunk = 0; chunk < chunks; ++chunk)
        for (int kv_head = 0; kv_head < kv_heads; ++kv_head)
          kernels.attend(view, kv, row, end, kv_head, chunk, scale,
                         parts.data() + chunk * chunk_stride + row * heads * stride, stride, scratch);
    }
    std::free(scratch);
    for (int row = 0; row < rows; ++row)
      for (int head = 0; head < heads; ++head)
        kernels.combine(parts.data() + (row * heads + head) * stride, chunk_stride, positions[row] / kChunk + 1,
                        head_dim, out.data() + (static_cast<size_t>(row) * heads + head) * head_dim);
    return out;
  }
};

Case random_case(std::mt19937& random, int committed, int chain, int nodes) {
  const int dims[] = {16, 32, 48, 64, 96, 128}, groups[] = {1, 2, 3, 4, 7, 9};
  Case c;
  c.head_dim = dims[random() % 6];
  c.kv_heads = 1 + static_cast<int>(random() % 2);
  c.heads = c.kv_heads * groups[random() % 6];
  const int end = committed + chain, slots = end + nodes;
  for (int i = 0; i < chain; ++i) c.add_row(committed + i, committed + i + 1, {});
  std::vector<std::vector<int32_t>> paths;
  for (int node = 0; node < nodes; ++node) {
    const int parent = node == 0 ? -1 : random() % 2 ? node - 1 : static_cast<int>(random() % (node + 1)) - 1;
    std::vector<int32_t> path = parent < 0 ? std::vector<int32_t>{} : paths[parent];
    path.push_back(end + node);
    paths.push_back(path);
    const int position = end + static_cast<int>(path.size()) - 1;
    if (path.back() == position)
      c.add_row(position, position + 1, {});
    else
      c.add_row(position, end, path);
  }
  // A table that skips and shuffles blocks of the cache; only slots that hold something are numbers.
  const int blocks = (slots + kBlockSlots - 1) / kBlockSlots;
  std::vector<int32_t> all(blocks + 3);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int32_t>(i);
  std::shuffle(all.begin(), all.end(), random);
  c.blocks.assign(all.begin(), all.begin() + blocks);
  c.k.assign(all.size() * c.kv_heads * c.head_dim * kBlockSlots, kNan);
  c.v = c.k;
  auto number = [&] { return static_cast<uint16_t>((random() & 0x8000) | (0x3000 + random() % 0x1000)); };
  for (int slot = 0; slot < slots; ++slot)
    for (int head = 0; head < c.kv_heads; ++head)
      for (int i = 0; i < c.head_dim; ++i) {
        c.key(slot, head, i) = number();
        c.value(slot, head, i) = number();
      }
  std::normal_distribution<float> normal(0.0f, 2.0f);
  for (int i = 0; i < c.rows * c.heads * c.head_dim; ++i) c.q.push_back(normal(random));
  return c;
}

void test(Case& c, const Kernels& kernels, std::mt19937& random) {
  const std::vector<float> out = c.actual(kernels, random);
  for (int row = 0; row < c.rows; ++row)
    for (int head = 0; head < c.heads; ++head) {
      const float* found = out.data() + (static_cast<size_t>(row) * c.heads + head) * c.head_dim;
      const std::vector<float> expected = c.expected(row, head);
      for (const float o : expected) CHECK(std::isfinite(o));
      CHECK(memcmp(found, expected.data(), c.head_dim * sizeof(float)) == 0);
    }
}

}  // namespace

int main() {
  for (const Kernels* kernels : tested_paths()) {
    std::mt19937 random(7);  // the same cases on each path
    for (const int committed : {0, 15, 16, 100, 250, 256, 600})
      for (const int chain : {1, 10})
        for (const int nodes : {0, 1, 9}) {
          Case c = random_case(random, committed, chain, nodes);
          test(c, *kernels, random);
        }
    for (const int committed : {3, 240}) {
      Case tree = random_case(random, committed, 1, 64);
      test(tree, *kernels, random);
      Case prefill = random_case(random, committed, 90, 0);
      test(prefill, *kernels, random);
    }
  }
  return 0;
}
