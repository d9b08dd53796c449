// The keys and values of one model.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "kernels.h"

namespace pilotfish {

class Kv {
 public:
  Kv(int layers, int kv_heads, int head_dim, int blocks)
      : layers_(layers), kv_heads_(kv_heads), head_dim_(head_dim), blocks_(blocks) {
    // calloc leaves large memory untouched: pages that no request uses cost nothing.
    memory_.reset(static_cast<uint8_t*>(calloc(1, bytes() + kLine)));
    if (!memory_) throw std::bad_alloc();
    data_ = reinterpret_cast<uint16_t*>((reinterpret_cast<uintptr_t>(memory_.get()) + kLine - 1) / kLine * kLine);
  }

  int layers() const { return layers_; }
  int kv_heads() const { return kv_heads_; }
  int head_dim() const { return head_dim_; }
  int blocks() const { return blocks_; }
  size_t bytes() const { return size_t{2} * layers_ * layer_halves() * sizeof(uint16_t); }

  KvLayer layer(int index) const {
    uint16_t* k = data_ + size_t{2} * index * layer_halves();
    return {k, k + layer_halves(), kv_heads_, head_dim_};
  }

  // Copies one slot to another in every layer.
  void copy(int from_block, int from_offset, int to_block, int to_offset) {
    for (int index = 0; index < layers_; ++index) {
      const KvLayer kv = layer(index);
      for (int head = 0; head < kv_heads_; ++head) {
        const size_t from = tile(from_block, head), to = tile(to_block, head);
        for (int i = 0; i < head_dim_; ++i) {
          kv.k[to + i * kBlockSlots + to_offset] = kv.k[from + i * kBlockSlots + from_offset];
          kv.v[to + to_offset * head_dim_ + i] = kv.v[from + from_offset * head_dim_ + i];
        }
      }
    }
  }

 private:
  static constexpr size_t kLine = 64;

  struct Free {
    void operator()(uint8_t* p) const { free(p); }
  };

  size_t layer_halves() const { return size_t{kBlockSlots} * blocks_ * kv_heads_ * head_dim_; }
  size_t tile(int block, int head) const {
    return (static_cast<size_t>(block) * kv_heads_ + head) * head_dim_ * kBlockSlots;
  }

  int layers_, kv_heads_, head_dim_, blocks_;
  std::unique_ptr<uint8_t, Free> memory_;
  uint16_t* data_;
};

}  // namespace pilotfish
