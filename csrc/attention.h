// Tree attention over blocks of keys and values, one chunk of 256 absolute positions at a time. Compiled once per path.
//
// What a row gets depends on its own positions alone: a score is one fma chain over head_dim, an output one fma chain
// over positions, both upwards; rows and heads only share the loads. Scores stand at their position within the chunk:
// where a row's ancestors lie in slots of other numbers, their keys are first gathered into a tile in order of
// position. Lanes beyond a row's last position may hold anything and are never used.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace pilotfish::PF_PATH {

// How many pairs, and how many sums (pairs times vectors), fit into the registers.
#if defined(PF_AVX512)
constexpr int kPairsAtOnce = 6, kSums = 24;
#elif defined(PF_AVX2) || defined(PF_DOTPROD)
constexpr int kPairsAtOnce = 6, kSums = 4;
#else
constexpr int kPairsAtOnce = 4, kSums = 4;
#endif
constexpr int kLine = 32;    // halves in a cache line
constexpr int kVectors = 4;  // vectors of outputs in one call of `multiply`, at most

// One row and head that reach the chunk.
struct Pair {
  int row;
  int seen;      // positions of the chunk that the row sees
  int in_place;  // the first of these, which lie in the slots of their own numbers
  const float* q;
  float* scores;  // [kChunk], later the weights
  float* part;
};

struct Chunk {
  const AttentionRows& rows;
  const KvLayer& kv;
  int kv_head;
  int first;  // position
  int end;    // positions before lie in the slots of their own numbers, for one row at least

  size_t tile(int slot) const { return kv.tile(rows.blocks[slot / kBlockSlots], kv_head); }
  const uint16_t* keys(int slot) const { return kv.k + tile(slot); }
  const uint16_t* values(int slot) const { return kv.v + tile(slot) + (slot % kBlockSlots) * kv.head_dim; }
  int slot(int row, int position) const {
    const int beyond = position - rows.prefix_lens[row];
    return beyond < 0 ? position : rows.path_slots[rows.path_starts[row] + beyond];
  }
};

// Where up to kVectors vectors of a run of steps begin.
struct Run {
  const uint16_t* a[kVectors];
};

// What is multiplied: `steps` in runs of `run_steps`, one step `stride` halves after the other. Each step asks for two
// lines of memory that will be needed later: the first `fetch_steps` steps walk on from fetch[0], and so on.
struct Steps {
  const Run* runs;
  int run_steps, steps, stride;
  const uint16_t* const* fetch;  // one more than is walked; nullptr: nothing to fetch
  int fetch_steps;
};

// out[p][v] = fma(b[p][step], a[v][step], out[p][v]) over all steps upwards, for P pairs and V vectors from `first` on.
template <int P, int V>
inline void multiply_tile(const float* const* b, const Steps& a, int first, float* const* out) {
  Vf sums[P][V];
  PF_UNROLL
  for (int p = 0; p < P; ++p) PF_UNROLL
  for (int v = 0; v < V; ++v) sums[p][v] = load(out[p] + (first + v) * kLanes);
  const Run* run = a.runs;
  const bool fetches = a.fetch && first == 0;
  const uint16_t* const* fetch = a.fetch;
  const uint16_t* next = fetches ? *fetch : run->a[0];
  const int next_stride = fetches ? 2 * kLine : 0;
  int next_steps = fetches ? a.fetch_steps : a.steps + 1;
  for (int begin = 0; begin < a.steps; begin += a.run_steps, ++run) {
    const int end = begin + a.run_steps < a.steps ? begin + a.run_steps : a.steps;
    const uint16_t* at[V];
    PF_UNROLL
    for (int v = 0; v < V; ++v) at[v] = run->a[first + v];
    for (int step = begin; step < end; ++step) {
      prefetch(next);
      prefetch(next + kLine);
      next += next_stride;
      if (--next_steps == 0) next = *++fetch, next_steps = a.fetch_steps;
      Vf lanes[V];
      PF_UNROLL
      for (int v = 0; v < V; ++v) {
        lanes[v] = load_half(at[v]);
        at[v] += a.stride;
      }
      PF_UNROLL
      for (int p = 0; p < P; ++p) {
        const Vf weight = set1(b[p][step]);
        PF_UNROLL
        for (int v = 0; v < V; ++v) sums[p][v] = fma(weight, lanes[v], sums[p][v]);
      }
    }
  }
  PF_UNROLL
  for (int p = 0; p < P; ++p) PF_UNROLL
  for (int v = 0; v < V; ++v) store(out[p] + (first + v) * kLanes, sums[p][v]);
}

template <int P>
inline void multiply_pairs(int pairs, const float* const* b, const Steps& a, int vectors, float* const* out) {
  if constexpr (P > 1)
    if (pairs < P) return multiply_pairs<P - 1>(pairs, b, a, vectors, out);
  constexpr int V = kSums / P < 1 ? 1 : kSums / P > kVectors ? kVectors : kSums / P;
  int v = 0;
  for (; v + V <= vectors; v += V) multiply_tile<P, V>(b, a, v, out);
  for (; v < vectors; ++v) multiply_tile<P, 1>(b, a, v, out);
}

// The same for any number of pairs and up to kVectors vectors.
inline void multiply(int pairs, const float* const* b, const Steps& a, int vectors, float* const* out) {
  const int size = even_share(pairs, kPairsAtOnce);
  for (int p = 0; p < pairs; p += size)
    multiply_pairs<kPairsAtOnce>(pairs - p < size ? pairs - p : size, b + p, a, vectors, out + p);
}

inline int tiles(int positions) { return (positions + kBlockSlots - 1) / kBlockSlots; }

// Tiles whose 16 keys the pair finds in order in one block; what lies beyond its last position does not matter.
inline int block_tiles(const Pair& pair) {
  return pair.in_place == pair.seen ? tiles(pair.seen) : pair.in_place / kBlockSlots;
}

// The end of the pairs of the same row from `pair` on.
inline int row_end(const Pair* pairs, int count, int pair) {
  const int row = pairs[pair].row;
  while (pair < count && pairs[pair].row == row) ++pair;
  return pair;
}

// The keys of a row's positions first .. first + 15, in order.
inline void gather_keys(const Chunk& chunk, int row, int first, int end, uint16_t* tile) {
  const int n = chunk.kv.head_dim, prefix = chunk.rows.prefix_lens[row];
  const size_t bytes = static_cast<size_t>(n) * kBlockSlots * sizeof(uint16_t);
  if (first < prefix)
    memcpy(tile, chunk.keys(first), bytes);
  else
    memset(tile, 0, bytes);
  for (int position = first < prefix ? prefix : first; position < first + kBlockSlots && position < end; ++position) {
    const int slot = chunk.slot(row, position);
    const uint16_t* column = chunk.keys(slot) + slot % kBlockSlots;
    for (int i = 0; i < n; ++i) tile[i * kBlockSlots + position - first] = column[i * kBlockSlots];
  }
}

inline void score(const Chunk& chunk, const Pair* pairs, int count, uint16_t* gathered) {
  const int n = chunk.kv.head_dim;
  const float* q[kPairs];
  float* out[kPairs];
  int most = 0;
  for (int p = 0; p < count; ++p) {
    q[p] = pairs[p].q;
    memset(pairs[p].scores, 0, sizeof(float) * kLanes * tiles(pairs[p].seen));
    if (block_tiles(pairs[p]) > most) most = block_tiles(pairs[p]);
  }
  const int size = even_share(count, kPairsAtOnce);
  for (int tile = 0; tile < most; tile += kVectors) {
    // The values of these tiles meanwhile: tiles lie apart, and the hardware guesses only within each.
    const uint16_t* fetch[kVectors + 1];
    for (int v = 0; v <= kVectors; ++v)
      fetch[v] = chunk.values(chunk.first + (tile + v < most ? tile + v : most - 1) * kBlockSlots);
    for (int g = 0; g < count; g += size) {
      const int members = count - g < size ? count - g : size;
      int end = 0;
      for (int p = g; p < g + members; ++p) {
        out[p] = pairs[p].scores + tile * kLanes;
        if (block_tiles(pairs[p]) > end) end = block_tiles(pairs[p]);
      }
      const int vectors = end - tile < kVectors ? end - tile : kVectors;
      Run keys;
      for (int v = 0; v < vectors; ++v) keys.a[v] = chunk.keys(chunk.first + (tile + v) * kBlockSlots);
      if (vectors > 0)
        multiply(members, q + g, {&keys, n, n, kBlockSlots, g == 0 ? fetch : nullptr, n / 4}, vectors, out + g);
    }
  }
  for (int p = 0, end; p < count; p = end) {
    end = row_end(pairs, count, p);
    for (int tile = block_tiles(pairs[p]); tile < tiles(pairs[p].seen); ++tile) {
      gather_keys(chunk, pairs[p].row, chunk.first + tile * kBlockSlots, chunk.first + pairs[p].seen, gathered);
      for (int i = p; i < end; ++i) {
        out[i] = pairs[i].scores + tile * kLanes;
        store(out[i], set1(0.0f));
      }
      const Run keys = {{gathered}};
      multiply(end - p, q + p, {&keys, n, n, kBlockSlots, nullptr, 0}, 1, out + p);
    }
  }
}

// Scores to weights e^(score - max), 0 beyond the last position; max and sum into the part.
inline void weigh(const Pair& pair, int head_dim, float scale) {
  const Vf factor = set1(scale), nothing = set1(0.0f);
  Vf greatest = set1(-__builtin_inff());
  for (int i = 0; i < pair.seen; i += kLanes) {
    const int lanes = pair.seen - i < kLanes ? pair.seen - i : kLanes;
    const Vf scaled = mul(load(pair.scores + i), factor);
    store(pair.scores + i, scaled);
    greatest = max(first(scaled, lanes, greatest), greatest);
  }
  pair.part[head_dim] = reduce_max(greatest);
  const Vf offset = set1(pair.part[head_dim]);
  Vf sum = nothing;
  for (int i = 0; i < pair.seen; i += kLanes) {
    const int lanes = pair.seen - i < kLanes ? pair.seen - i : kLanes;
    const Vf weight = first(exp(sub(load(pair.scores + i), offset)), lanes, nothing);
    store(pair.scores + i, weight);
    sum = add(sum, weight);
  }
  pair.part[head_dim + 1] = reduce_add(sum);
}

// Adds weight * value to the pairs' outputs for `steps` positions of the chunk from `position` on, whose values lie at
// `rows`: those of each block one after the other.
inline void add_values(const Chunk& chunk, const Pair* pairs, int count, const uint16_t* const* rows, int position,
                       int steps, bool ahead) {
  const int n = chunk.kv.head_dim;
  const float* weights[kPairs];
  float* out[kPairs];
  Run runs[kChunk / kBlockSlots];
  for (int column = 0; column < n; column += kVectors * kLanes) {
    const int left = (n - column) / kLanes, vectors = left < kVectors ? left : kVectors;
    for (int i = 0; i < tiles(steps); ++i)
      for (int v = 0; v < vectors; ++v) runs[i].a[v] = rows[i] + column + v * kLanes;
    for (int p = 0; p < count; ++p) {
      weights[p] = pairs[p].scores + position;
      out[p] = pairs[p].part + column;
    }
    // The keys of the next chunk meanwhile: as many lines of each tile as a run has steps, twice.
    const uint16_t* fetch[kChunk / kBlockSlots + 1];
    for (int i = 0; ahead && i <= tiles(steps); ++i) {
      const int next = chunk.first + kChunk + i * kBlockSlots;
      fetch[i] = chunk.keys(next < chunk.end ? next : chunk.first) + column * kBlockSlots;
    }
    multiply(count, weights, {runs, kBlockSlots, steps, n, ahead ? fetch : nullptr, kBlockSlots}, vectors, out);
  }
}

inline void weigh_values(const Chunk& chunk, const Pair* pairs, int count) {
  for (int p = 0; p < count; ++p) memset(pairs[p].part, 0, sizeof(float) * chunk.kv.head_dim);
  const int size = even_share(count, kPairsAtOnce);
  for (int g = 0; g < count; g += size) {
    const int last = count - g < size ? count : g + size;
    int shared = kChunk;  // positions that all pairs of the group find in place
    for (int p = g; p < last; ++p)
      if (pairs[p].in_place < shared) shared = pairs[p].in_place;
    const uint16_t* rows[kChunk / kBlockSlots];
    for (int i = 0; i < tiles(shared); ++i) rows[i] = chunk.values(chunk.first + i * kBlockSlots);
    if (shared > 0) add_values(chunk, pairs + g, last - g, rows, 0, shared, g == 0 && chunk.first + kChunk < chunk.end);
    for (int p = g, end; p < last; p = end) {
      end = row_end(pairs, last, p);
      for (int i = shared; i < pairs[p].seen; ++i) {
        const uint16_t* row = chunk.values(chunk.slot(pairs[p].row, chunk.first + i));
        add_values(chunk, pairs + p, end - p, &row, i, 1, false);
      }
    }
  }
}

inline void attend_pairs(const Chunk& chunk, const Pair* pairs, int count, float scale, uint16_t* gathered) {
  score(chunk, pairs, count, gathered);
  for (int p = 0; p < count; ++p) weigh(pairs[p], chunk.kv.head_dim, scale);
  weigh_values(chunk, pairs, count);
}

inline void attend(const AttentionRows& rows, const KvLayer& kv, int row0, int row1, int kv_head, int chunk,
                   float scale, float* part, size_t part_stride, float* scratch) {
  int end = 0;
  for (int row = row0; row < row1; ++row)
    if (rows.prefix_lens[row] > end) end = rows.prefix_lens[row];
  const Chunk where{rows, kv, kv_head, chunk * kChunk, end};
  const int group = rows.heads / kv.kv_heads;
  auto* gathered = reinterpret_cast<uint16_t*>(scratch + kPairs * kChunk);
  Pair pairs[kPairs];
  int count = 0;
  for (int row = row0; row < row1; ++row) {
    int seen = rows.positions[row] + 1 - where.first;
    if (seen <= 0) continue;
    if (seen > kChunk) seen = kChunk;
    int in_place = rows.prefix_lens[row] - where.first;
    in_place = in_place < 0 ? 0 : in_place > seen ? seen : in_place;
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      pairs[count] = {row,
                      seen,
                      in_place,
                      rows.q + static_cast<size_t>(row) * rows.stride + head * kv.head_dim,
                      scratch + count * kChunk,
                      part + (static_cast<size_t>(row - row0) * rows.heads + head) * part_stride};
      if (++count == kPairs) {
        attend_pairs(where, pairs, count, scale, gathered);
        count = 0;
      }
    }
  }
  if (count > 0) attend_pairs(where, pairs, count, scale, gathered);
}

// Parts count by e^(their max - the greatest max); dividing by the sum comes last. One part counts by exactly 1.
inline void combine(const float* parts, size_t chunk_stride, int chunks, int head_dim, float* out) {
  float greatest = parts[head_dim];
  for (int chunk = 1; chunk < chunks; ++chunk) {
    const float most = parts[chunk * chunk_stride + head_dim];
    if (most > greatest) greatest = most;
  }
  Vf sum = set1(0.0f);
  for (int i = 0; i < head_dim; i += kLanes) store(out + i, sum);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const float* part = parts + chunk * chunk_stride;
    const Vf factor = exp(set1(part[head_dim] - greatest));
    sum = fma(factor, set1(part[head_dim + 1]), sum);
    for (int i = 0; i < head_dim; i += kLanes) store(out + i, fma(factor, load(part + i), load(out + i)));
  }
  for (int i = 0; i < head_dim; i += kLanes) store(out + i, div(load(out + i), sum));
}

}  // namespace pilotfish::PF_PATH
