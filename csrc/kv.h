// The keys and values of one model.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <new>

#include "kernels.h"

namespace pilotfish {

// Block by block: all layers and heads of 16 slots lie together, K and V of a head side by side. So a request's cache
// is as many pieces as it has blocks, and pages are touched only for blocks in use.
class Kv {
 public:
  Kv(int layers, int kv_heads, int head_dim, int blocks)
      : layers_(layers), kv_heads_(kv_heads), head_dim_(head_dim), blocks_(blocks) {
    void* memory = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<uint16_t*>(memory);
#if defined(MADV_HUGEPAGE)
    madvise(memory, bytes(), MADV_HUGEPAGE);  // a wish: nothing depends on it
#endif
  }
  ~Kv() { munmap(data_, bytes()); }
  Kv(const Kv&) = delete;

  int layers() const { return layers_; }
  int kv_heads() const { return kv_heads_; }
  int head_dim() const { return head_dim_; }
  int blocks() const { return blocks_; }
  size_t bytes() const { return blocks_ * block_halves() * sizeof(uint16_t); }

  KvLayer layer(int index) const {
    uint16_t* k = data_ + index * layer_halves();
    return {k, k + tile_halves(), kv_heads_, head_dim_, block_halves(), 2 * tile_halves()};
  }

  // Copies one slot to another in every layer.
  void copy(int from_block, int from_offset, int to_block, int to_offset) {
    for (int index = 0; index < layers_; ++index) {
      const KvLayer kv = layer(index);
      for (int head = 0; head < kv_heads_; ++head) {
        const size_t from = kv.tile(from_block, head), to = kv.tile(to_block, head);
        for (int i = 0; i < head_dim_; ++i) {
          kv.k[to + i * kBlockSlots + to_offset] = kv.k[from + i * kBlockSlots + from_offset];
          kv.v[to + to_offset * head_dim_ + i] = kv.v[from + from_offset * head_dim_ + i];
        }
      }
    }
  }

 private:
  size_t tile_halves() const { return static_cast<size_t>(head_dim_) * kBlockSlots; }
  size_t layer_halves() const { return 2 * kv_heads_ * tile_halves(); }
  size_t block_halves() const { return layers_ * layer_halves(); }

  int layers_, kv_heads_, head_dim_, blocks_;
  uint16_t* data_;
};

}  // namespace pilotfish
