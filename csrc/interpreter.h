// Programs (program.py) on the CPU: operations over buffers [rows, width], one call for a forward pass.
#pragma once

#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <variant>
#include <vector>

#include "kernels.h"
#include "kv.h"
#include "pool.h"

namespace pilotfish {

// Memory that only grows; its content does not survive growing.
template <class T>
class Scratch {
 public:
  T* data() const { return data_.get(); }
  void reserve(size_t count) {
    if (count <= count_) return;
    data_.reset();
    count_ = 0;
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    data_.reset(static_cast<T*>(std::aligned_alloc(64, bytes)));
    if (!data_) throw std::bad_alloc();
    count_ = count;
  }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  size_t count_ = 0;
};

// Panels that one thread computes at a time, of one of the matrices of an operation or the same panels of all.
struct Share {
  int part, panel0, panel1;
};

// The operations of program.py; buffers by number, vectors by value. An empty vector is one that the program lacks.
struct Embed {
  const Weight* weight;
  int out;
};
struct Feed {  // rows given from outside
  int out;
  int index = 0;  // among the feeds
};
struct Norm {
  int x;
  std::vector<float> weight;
  float eps;
  int out;
};
struct Part {
  const Weight* weight;
  std::vector<float> bias;
  int column;
};
struct Linear {
  int x;
  std::vector<Part> parts;
  int out;
  bool add;
  bool together = false;  // a share is of all parts
  std::vector<Share> shares = {};
};
struct RopeKv {
  int qkv, layer;
  std::vector<float> q_norm, k_norm;
  float eps;
};
struct Attention {
  int qkv, layer, out;
};
struct Gated {
  int x, out;
};
struct Tap {
  int x;
  int index = 0;  // among the taps
};
struct Gather {
  int x, out;
};
struct Head {
  int x;
  const Weight* weight;
  std::vector<Share> shares = {};
};
struct Quantize {  // of rows that a linear wrote
  int x;
};
using RowOp = std::variant<Embed, Feed, Norm, RopeKv, Gated, Tap, Gather, Quantize>;

// What is done between two barriers when there are few rows: an operation that is divided by columns, heads and chunks,
// what can follow for the same columns, and operations on whole rows, one after the other for each row.
struct Stage {
  std::variant<std::monostate, Linear, Attention, Head> wide = {};
  std::variant<std::monostate, RopeKv, Gated> columns = {};
  std::vector<RowOp> rows = {};
  bool wanted_only = false;   // `rows` are the rows of the head
  size_t width = 0;           // numbers of a row that `rows` reads
  std::vector<int> ops = {};  // what it holds of the program
};

// What attention and rotation need to know of a model.
struct Shape {
  int heads, kv_heads, head_dim, layers, vocab, context;
  const float* cos;  // [context, head_dim / 2]
  const float* sin;
};

// The arrays of a TreeBatch (tree.py).
struct Batch {
  int rows, requests, wanted, paths, table_blocks;
  const int32_t* tokens;        // [rows]
  const int32_t* positions;     // [rows]
  const int32_t* slots;         // [rows]
  const int32_t* prefix_lens;   // [rows]
  const int32_t* path_starts;   // [rows + 1]
  const int32_t* path_slots;    // [paths]
  const int32_t* row_starts;    // [requests + 1]
  const int32_t* block_tables;  // [requests, table_blocks]
  const int32_t* logit_rows;    // [wanted]

  // Throws std::invalid_argument unless every index stays within the model, the cache and these arrays.
  void check(const Shape& shape, const Kv& kv) const;
};

// What a forward pass takes beside the batch, and where it leaves its results.
struct Output {
  int32_t* argmax;                  // [wanted]
  float* logits;                    // [wanted, outputs of the head], or nullptr when nobody asks
  std::vector<float*> taps;         // each [rows, width]
  std::vector<const float*> feeds;  // each [rows, width]
  double* stage_ms;                 // [stages], or nullptr when nobody asks
  int32_t* stage_phases;            // [stages], with stage_ms
};

// A program bound to weights, which must outlive it.
class Executable {
 public:
  // `widths` are those of the buffers.
  Executable(const Kernels& kernels, Pool& pool, const Shape& shape, const std::vector<int>& widths);

  // Appends an operation; native.py has checked that its buffers and weights fit.
  template <class Op>
  void add(Op op) {
    place(std::move(op));
    stages_.back().ops.push_back(ops_++);
  }

  const Shape& shape() const { return shape_; }
  const std::vector<int>& tap_widths() const { return tap_widths_; }
  const std::vector<int>& feed_widths() const { return feed_widths_; }
  int head_outputs() const { return head_outputs_; }
  const std::vector<Stage>& stages() const { return stages_; }

  // Passes from several callers come one after the other.
  void forward(const Batch& batch, Kv& kv, const Output& output);

 private:
  struct Buffer {
    int width;
    bool integers = false;     // some linear reads it as integers, so whoever writes a row quantises it
    bool unfinished = false;   // the last to write it left no whole rows or groups behind, as a linear does
    bool wanted_only = false;  // holds the rows of the head only
    Scratch<float> x;          // [rows, width]
    Scratch<Group> groups;     // [tiles, width / 32, tile]
    int tile = 1;              // rows, in this pass

    float* row(int index) const { return x.data() + static_cast<size_t>(index) * width; }
    Rows rows() const { return {x.data(), width, groups.data(), tile}; }
  };

  // Consecutive rows of one request whose attention is one task for each kv head and chunk.
  struct Span {
    int request, row0, row1, chunks;
    size_t part;          // its parts [chunks, row1 - row0, heads, part_stride_] in parts_
    size_t chunk_floats;  // of the parts of one chunk
  };
  struct Task {
    int span, chunk;
  };
  // Spans whose parts are in memory at the same time.
  struct Wave {
    int row0, row1, task0, task1;
  };

  void reserve(const Batch& batch, bool logits);
  void plan_attention(const Batch& batch);
  void plan_tasks(int span0, int span1);
  // Puts an operation into the last stage or one of its own.
  void place(Embed op);
  void place(Feed op);
  void place(Norm op);
  void place(Linear op);
  void place(RopeKv op);
  void place(Attention op);
  void place(Gated op);
  void place(Tap op);
  void place(Gather op);
  void place(Head op);
  void add_row(RowOp op, int x, int out, bool wanted_only);
  void read(int x, const Weight& weight);
  Linear* last_linear(int out);
  std::vector<Share> share(const std::vector<Part>& parts, int unit, bool together) const;
  int rows(const Buffer& buffer) const { return buffer.wanted_only ? batch_->wanted : batch_->rows; }
  void quantize(const Buffer& buffer, int row, int column, int width) const;
  void multiply(const Weight& weight, const Buffer& x, const float* bias, int panel0, int panel1, float* out,
                int stride, bool add, const uint8_t* next, int thread) const;
  const uint8_t* weights_of(const Stage& stage, int index, int part) const;
  const uint8_t* weights_after(const Stage& stage, int index, int thread) const;
  void fetch(const Buffer& x) const;
  void choose() const;

  void run(const Stage& stage, Pool::Member& member);
  template <class Item, class RowItem>
  void run(Pool::Member& member, int items, const Item& item, int row0, int row1, size_t width,
           const RowItem& row_item) const;
  void run_rows(const Stage& stage, int row);
  void run_attention(const Stage& stage, const Attention& op, Pool::Member& member);
  void run_share(const Stage& stage, const Linear& op, int index, int thread);
  void run_share(const Stage& stage, const Head& op, int index, int thread);
  void combine(const Attention& op, const Span& span, int row, int kv_head);

  void run_row(const Embed& op, int row);
  void run_row(const Feed& op, int row);
  void run_row(const Norm& op, int row);
  void run_row(const RopeKv& op, int row) { rope(op, row, 0, shape_.heads + 2 * shape_.kv_heads); }
  void run_row(const Gated& op, int row) { gated(op, row, 0, buffers_[op.out].width); }
  void run_row(const Tap& op, int row);
  void run_row(const Gather& op, int row);
  void run_row(const Quantize& op, int row) { quantize(buffers_[op.x], row, 0, buffers_[op.x].width); }
  void rope(const RopeKv& op, int row, int head0, int head1);
  void gated(const Gated& op, int row, int column0, int column1);

  const Kernels& kernels_;
  Pool& pool_;
  const Shape shape_;
  const size_t part_stride_;
  const size_t attend_scratch_;
  std::vector<Buffer> buffers_;
  std::vector<Stage> stages_;
  int ops_ = 0;
  std::vector<int> tap_widths_;
  std::vector<int> feed_widths_;
  int head_outputs_ = 0;

  // Of the pass that runs now.
  std::mutex one_pass_;
  const Batch* batch_ = nullptr;
  Kv* kv_ = nullptr;
  const Output* output_ = nullptr;
  std::vector<int> requests_;  // of each row
  std::vector<Span> spans_;
  std::vector<Task> tasks_;
  std::vector<Wave> waves_;
  std::vector<int> chunks_left_;  // [spans, kv heads]
  Scratch<float> parts_;
  Scratch<float> scores_;      // [threads, attend_scratch_]
  Scratch<float> sums_;        // [threads, linear_scratch(rows)]
  Scratch<float> logits_;      // [threads, wanted, outputs of a share], when nobody asks for logits
  std::vector<float> best_;    // [shares, wanted]
  std::vector<int> best_ids_;  // [shares, wanted]
};

}  // namespace pilotfish
