#include "interpreter.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "pack.h"

namespace pilotfish {

namespace {

constexpr size_t kShareBytes = 128 << 10;  // of weights: long enough a stream, small against the caches
constexpr int kSharesPerThread = 4;        // at least, so that small matrices divide evenly too
constexpr size_t kFetchBytes = 256 << 10;  // of input rows, which a near cache holds beside the weights
constexpr int kSpanRows = 16;              // rows of a request that attend together
constexpr size_t kSmallWork = 8 << 10;     // numbers in rows that are done sooner than another thread would have come
constexpr size_t kPartFloats = 4 << 20;    // of attention parts in memory at the same time

bool is_integer(const Weight& weight) { return weight.scales != Scales::kNone; }

// The panels [panel0, panel1) as a weight of their own.
Weight slice(const Weight& weight, int panel0, int panel1) {
  Weight part = weight;
  part.data += panel0 * weight.panel_bytes;
  part.panels = panel1 - panel0;
  part.outputs = std::min(weight.outputs - panel0 * kPanel, part.panels * kPanel);
  return part;
}

int widest(const std::vector<Share>& shares) {
  int panels = 0;
  for (const Share& share : shares) panels = std::max(panels, share.panel1 - share.panel0);
  return panels * kPanel;
}

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

void need_within(int32_t value, int32_t end, int row, const char* what) {
  if (value < 0 || value >= end)
    refuse("row " + std::to_string(row) + ": " + what + " " + std::to_string(value) + " is not within 0 to " +
           std::to_string(end - 1));
}

void need_ascending(const int32_t* starts, int count, int32_t end, const char* what) {
  if (starts[0] != 0 || starts[count] != end || !std::is_sorted(starts, starts + count + 1))
    refuse(std::string(what) + " do not ascend from 0 to " + std::to_string(end));
}

class Stopwatch {
 public:
  double lap_ms() {
    const Clock::time_point before = last_;
    last_ = Clock::now();
    return std::chrono::duration<double, std::milli>(last_ - before).count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_ = Clock::now();
};

}  // namespace

void Batch::check(const Shape& shape, const Kv& kv) const {
  if (kv.layers() != shape.layers || kv.kv_heads() != shape.kv_heads || kv.head_dim() != shape.head_dim)
    refuse("the KV cache was made for another model");
  need_ascending(row_starts, requests, rows, "row_starts");
  need_ascending(path_starts, rows, paths, "path_starts");
  const int end = table_blocks * kBlockSlots;
  for (int i = 0; i < requests * table_blocks; ++i)
    if (block_tables[i] < 0 || block_tables[i] >= kv.blocks())
      refuse("block " + std::to_string(block_tables[i]) + " is not one of the cache's " + std::to_string(kv.blocks()));
  for (int row = 0; row < rows; ++row) {
    need_within(tokens[row], shape.vocab, row, "token");
    need_within(positions[row], shape.context, row, "position");
    need_within(slots[row], end, row, "slot");
    need_within(prefix_lens[row], std::min(positions[row] + 1, end) + 1, row, "prefix");
    if (path_starts[row + 1] - path_starts[row] != positions[row] + 1 - prefix_lens[row])
      refuse("row " + std::to_string(row) + ": prefix and path do not add up to position + 1");
    for (int i = path_starts[row]; i < path_starts[row + 1]; ++i) need_within(path_slots[i], end, row, "path slot");
  }
  for (int i = 0; i < wanted; ++i)
    if (logit_rows[i] < 0 || logit_rows[i] >= rows)
      refuse("logit row " + std::to_string(logit_rows[i]) + " is not one of the " + std::to_string(rows) + " rows");
}

Executable::Executable(const Kernels& kernels, Pool& pool, const Shape& shape, const std::vector<int>& widths)
    : kernels_(kernels),
      pool_(pool),
      shape_(shape),
      part_stride_(static_cast<size_t>(shape.head_dim) + kPanel),
      attend_scratch_(pilotfish::attend_scratch(shape.head_dim)),
      buffers_(widths.size()) {
  for (size_t i = 0; i < widths.size(); ++i) buffers_[i].width = widths[i];
}

// A linear reads x: it must be there as integers if its weight is. Nobody has made them when a linear wrote it.
void Executable::read(int x, const Weight& weight) {
  Buffer& buffer = buffers_[x];
  if (!is_integer(weight) || (buffer.integers && !buffer.unfinished)) return;
  buffer.integers = true;
  if (!buffer.unfinished) return;
  add_row(Quantize{x}, x, x, buffer.wanted_only);
}

// `unit` panels stay together, as do the parts if `together`.
std::vector<Share> Executable::share(const std::vector<Part>& parts, int unit, bool together) const {
  size_t bytes = 0;
  for (const Part& part : parts) bytes += part.weight->panels * part.weight->panel_bytes;
  const size_t each = std::min(kShareBytes, bytes / (pool_.threads() * kSharesPerThread));
  std::vector<Share> shares;
  for (size_t i = 0; i < (together ? 1 : parts.size()); ++i) {
    const Weight& weight = *parts[i].weight;
    const size_t unit_bytes = unit * (together ? bytes / weight.panels : weight.panel_bytes);
    const int units = (weight.panels + unit - 1) / unit, most = std::max(1, static_cast<int>(each / unit_bytes));
    const int count = (units + most - 1) / most;
    for (int n = 0; n < count; ++n)
      shares.push_back(
          {static_cast<int>(i), units * n / count * unit, std::min(units * (n + 1) / count * unit, weight.panels)});
  }
  return shares;
}

// Rows join the stage before when they are the same ones and it leaves each to itself.
void Executable::add_row(RowOp op, int x, int out, bool wanted_only) {
  const bool gather = std::holds_alternative<Gather>(op);
  if (stages_.empty() || (!stages_.back().rows.empty() && (gather || stages_.back().wanted_only != wanted_only)) ||
      (gather && !std::holds_alternative<Linear>(stages_.back().wide)))
    stages_.emplace_back();
  Stage& stage = stages_.back();
  stage.rows.push_back(std::move(op));
  stage.wanted_only = wanted_only;
  stage.width += buffers_[x].width;
  buffers_[out].wanted_only = wanted_only;
  buffers_[out].unfinished = false;
}

void Executable::place(Embed op) { add_row(op, op.out, op.out, false); }
void Executable::place(Feed op) {
  op.index = static_cast<int>(feed_widths_.size());
  feed_widths_.push_back(buffers_[op.out].width);
  add_row(op, op.out, op.out, false);
}
void Executable::place(Norm op) {
  const int x = op.x, out = op.out;
  add_row(std::move(op), x, out, buffers_[x].wanted_only);
}
void Executable::place(Gather op) { add_row(op, op.x, op.out, true); }
void Executable::place(Tap op) {
  op.index = static_cast<int>(tap_widths_.size());
  tap_widths_.push_back(buffers_[op.x].width);
  const bool unfinished = buffers_[op.x].unfinished;
  add_row(op, op.x, op.x, buffers_[op.x].wanted_only);
  buffers_[op.x].unfinished = unfinished;
}

void Executable::place(Linear op) {
  for (const Part& part : op.parts) read(op.x, *part.weight);
  op.shares = share(op.parts, kPair, false);
  buffers_[op.out].wanted_only = buffers_[op.x].wanted_only;
  buffers_[op.out].unfinished = true;
  stages_.emplace_back().wide = std::move(op);
}

// The linear that has just written `out` and nothing else, if that is what came last.
Linear* Executable::last_linear(int out) {
  if (stages_.empty() || !stages_.back().rows.empty()) return nullptr;
  auto* linear = std::get_if<Linear>(&stages_.back().wide);
  const bool free = std::holds_alternative<std::monostate>(stages_.back().columns);
  return linear && free && linear->out == out && !linear->add ? linear : nullptr;
}

// Whoever computes heads also turns and stores them.
void Executable::place(RopeKv op) {
  Linear* linear = last_linear(op.qkv);
  auto whole_heads = [this](const Part& part) {
    return part.column % shape_.head_dim == 0 && part.weight->outputs % shape_.head_dim == 0;
  };
  if (linear && std::all_of(linear->parts.begin(), linear->parts.end(), whole_heads)) {
    linear->shares = share(linear->parts, shape_.head_dim / kPanel, false);
    stages_.back().columns = std::move(op);
    return;
  }
  const int qkv = op.qkv;
  add_row(std::move(op), qkv, qkv, false);
  buffers_[qkv].unfinished = true;
}

// Whoever computes columns of both halves also joins them: whole groups, so that they can be quantised.
void Executable::place(Gated op) {
  Linear* linear = last_linear(op.x);
  const int half = buffers_[op.out].width;
  if (linear && linear->parts.size() == 2 && linear->parts[0].column == 0 && linear->parts[1].column == half &&
      linear->parts[0].weight->outputs == half) {
    linear->together = true;
    linear->shares = share(linear->parts, kGroup / kPanel, true);
    stages_.back().columns = op;
    buffers_[op.out].wanted_only = buffers_[op.x].wanted_only;
    buffers_[op.out].unfinished = false;
    return;
  }
  add_row(op, op.x, op.out, buffers_[op.x].wanted_only);
}

void Executable::place(Attention op) {
  buffers_[op.out].wanted_only = false;
  // Each KV head's columns are quantised on their own, where they are whole groups.
  buffers_[op.out].unfinished = shape_.heads / shape_.kv_heads * shape_.head_dim % kGroup != 0;
  stages_.emplace_back().wide = op;
}

void Executable::place(Head op) {
  read(op.x, *op.weight);
  op.shares = share({{op.weight, {}, 0}}, kPair, false);
  head_outputs_ = op.weight->outputs;
  stages_.emplace_back().wide = std::move(op);
}

void Executable::forward(const Batch& batch, Kv& kv, const Output& output) {
  batch.check(shape_, kv);
  if (batch.rows == 0) return;
  const std::lock_guard<std::mutex> lock(one_pass_);
  batch_ = &batch;
  kv_ = &kv;
  output_ = &output;
  plan_attention(batch);
  reserve(batch, output.logits != nullptr);
  pool_.run([this](Pool::Member& member) {
    const bool timed = output_->stage_ms && member.thread == 0;
    Stopwatch watch;
    uint32_t before = member.wait();
    for (size_t i = 0; i < stages_.size(); ++i) {
      run(stages_[i], member);
      if (!timed) continue;
      const uint32_t phases = member.wait();  // the next stage would wait anyway
      output_->stage_ms[i] = watch.lap_ms();
      output_->stage_phases[i] = static_cast<int32_t>(phases - before);
      before = phases;
    }
  });
  choose();
}

void Executable::reserve(const Batch& batch, bool logits) {
  for (Buffer& buffer : buffers_) {
    const int count = rows(buffer);
    buffer.x.reserve(static_cast<size_t>(count) * buffer.width);
    buffer.tile = even_share(count, kernels_.tile_rows);
    if (buffer.integers) buffer.groups.reserve(group_count(count, buffer.width, buffer.tile));
  }
  scores_.reserve(pool_.threads() * attend_scratch_);
  sums_.reserve(pool_.threads() * linear_scratch(batch.rows));
  for (const Stage& stage : stages_) {
    const auto* head = std::get_if<Head>(&stage.wide);
    if (!head) continue;
    best_.resize(head->shares.size() * batch.wanted);
    best_ids_.resize(best_.size());
    if (!logits) logits_.reserve(static_cast<size_t>(pool_.threads()) * batch.wanted * widest(head->shares));
  }
}

void Executable::plan_attention(const Batch& batch) {
  requests_.resize(batch.rows);
  spans_.clear();
  tasks_.clear();
  waves_.clear();
  const size_t row_floats = shape_.heads * part_stride_;
  size_t floats = 0, most = 0;
  int first_span = 0;
  auto end_wave = [&](int end_row) {
    const int spans = static_cast<int>(spans_.size());
    if (first_span == spans) return;
    const int task0 = static_cast<int>(tasks_.size());
    plan_tasks(first_span, spans);
    waves_.push_back({spans_[first_span].row0, end_row, task0, static_cast<int>(tasks_.size())});
    most = std::max(most, floats);
    floats = 0;
    first_span = spans;
  };
  for (int request = 0; request < batch.requests; ++request) {
    const int end = batch.row_starts[request + 1];
    for (int row = batch.row_starts[request], next; row < end; row = next) {
      next = std::min(row + kSpanRows, end);
      const int chunks = *std::max_element(batch.positions + row, batch.positions + next) / kChunk + 1;
      while (next - row > 1 && (next - row) * chunks * row_floats > kPartFloats) next -= (next - row) / 2;
      const size_t needed = (next - row) * chunks * row_floats;
      if (floats + needed > kPartFloats) end_wave(row);
      std::fill(requests_.begin() + row, requests_.begin() + next, request);
      spans_.push_back({request, row, next, chunks, floats, (next - row) * row_floats});
      floats += needed;
    }
  }
  end_wave(batch.rows);
  chunks_left_.clear();
  for (const Span& span : spans_) chunks_left_.insert(chunks_left_.end(), shape_.kv_heads, span.chunks);
  parts_.reserve(most);
}

// Spans of one request side by side: they read the same keys and values.
void Executable::plan_tasks(int span0, int span1) {
  for (int first = span0, last; first < span1; first = last) {
    int chunks = 0;
    for (last = first; last < span1 && spans_[last].request == spans_[first].request; ++last)
      chunks = std::max(chunks, spans_[last].chunks);
    for (int chunk = 0; chunk < chunks; ++chunk)
      for (int span = first; span < last; ++span)
        if (chunk < spans_[span].chunks) tasks_.push_back({span, chunk});
  }
}

// Columns in whole groups, or all of them.
void Executable::quantize(const Buffer& buffer, int row, int column, int width) const {
  if (!buffer.integers) return;
  const size_t at = buffer.rows().row(row, buffer.width) - buffer.groups.data() + column / kGroup * buffer.tile;
  kernels_.quantize(buffer.row(row) + column, width, buffer.groups.data() + at, buffer.tile);
}

void Executable::multiply(const Weight& weight, const Buffer& x, const float* bias, int panel0, int panel1, float* out,
                          int stride, bool add, const uint8_t* next, int thread) const {
  if (rows(x) == 0) return;
  float* sums = sums_.data() + linear_scratch(rows(x)) * thread;
  kernels_.linear(weight, x.rows(), 0, rows(x), panel0, panel1, bias, out, stride, add, next, sums);
}

// item(i) for all items, then row_item(row) for all rows: divided too, or at once by whoever is last, if that is
// sooner.
template <class Item, class RowItem>
void Executable::run(Pool::Member& member, int items, const Item& item, int row0, int row1, size_t width,
                     const RowItem& row_item) const {
  if (row1 - row0 > 1 && (row1 - row0) * width > kSmallWork) {
    member.phase(items, item);
    member.phase(row1 - row0, [&](int index) { row_item(row0 + index); });
  } else {
    member.phase(items, item, [&] {
      for (int row = row0; row < row1; ++row) row_item(row);
    });
  }
}

void Executable::run(const Stage& stage, Pool::Member& member) {
  if (const auto* attention = std::get_if<Attention>(&stage.wide)) return run_attention(stage, *attention, member);
  const int count = stage.wanted_only ? batch_->wanted : batch_->rows;
  auto row_item = [&](int row) { run_rows(stage, row); };
  if (const auto* linear = std::get_if<Linear>(&stage.wide)) {
    auto item = [&](int index) { run_share(stage, *linear, index, member.thread); };
    run(member, static_cast<int>(linear->shares.size()), item, 0, count, stage.width, row_item);
  } else if (const auto* head = std::get_if<Head>(&stage.wide)) {
    member.phase(static_cast<int>(head->shares.size()),
                 [&](int index) { run_share(stage, *head, index, member.thread); });
  } else {
    run(member, 1, [](int) {}, 0, count, stage.width, row_item);
  }
}

void Executable::run_rows(const Stage& stage, int row) {
  for (const RowOp& op : stage.rows) std::visit([&](const auto& one) { run_row(one, row); }, op);
}

// Where the weights of a share begin; nullptr where there are none.
const uint8_t* Executable::weights_of(const Stage& stage, int index, int part) const {
  const auto* head = std::get_if<Head>(&stage.wide);
  const auto* linear = std::get_if<Linear>(&stage.wide);
  if (!head && !linear) return nullptr;
  const Share& share = head ? head->shares[index] : linear->shares[index];
  const Weight& weight = head ? *head->weight : *linear->parts[linear->together ? part : share.part].weight;
  return weight.data + share.panel0 * weight.panel_bytes;
}

// Where the weights begin that a thread will need after a share, most likely.
const uint8_t* Executable::weights_after(const Stage& stage, int index, int thread) const {
  const Stage* at = &stage;
  for (bool same = true; at < stages_.data() + stages_.size(); ++at, same = false) {
    const auto* head = std::get_if<Head>(&at->wide);
    const auto* linear = std::get_if<Linear>(&at->wide);
    if (!head && !linear) continue;
    const int shares = static_cast<int>(head ? head->shares.size() : linear->shares.size());
    const int next = same ? index + 1 : pool_.first_item(shares, thread);
    if (next < (same ? pool_.first_item(shares, thread + 1) : shares)) return weights_of(*at, next, 0);
  }
  return nullptr;
}

// Asks for all rows at once: half of them lie in another core's cache, which may be far.
void Executable::fetch(const Buffer& x) const {
  const size_t count = rows(x);
  const auto* first =
      x.integers ? reinterpret_cast<const char*>(x.groups.data()) : reinterpret_cast<const char*>(x.row(0));
  const size_t bytes = x.integers ? count * (x.width / kGroup) * sizeof(Group) : count * x.width * sizeof(float);
  for (size_t i = 0; i < std::min(bytes, kFetchBytes); i += 64) __builtin_prefetch(first + i);
}

void Executable::run_share(const Stage& stage, const Linear& op, int index, int thread) {
  const Share& share = op.shares[index];
  const Buffer &x = buffers_[op.x], &out = buffers_[op.out];
  if (index == pool_.first_item(static_cast<int>(op.shares.size()), thread)) fetch(x);
  const int count = rows(x);
  const size_t part0 = op.together ? 0 : share.part, part1 = op.together ? op.parts.size() : share.part + 1;
  for (size_t i = part0; i < part1; ++i) {
    const Part& part = op.parts[i];
    multiply(*part.weight, x, part.bias.empty() ? nullptr : part.bias.data(), share.panel0, share.panel1,
             out.row(0) + part.column, out.width, op.add,
             i + 1 < part1 ? weights_of(stage, index, static_cast<int>(i) + 1) : weights_after(stage, index, thread),
             thread);
  }
  const int column0 = share.panel0 * kPanel;
  const int column1 = std::min(share.panel1 * kPanel, op.parts[share.part].weight->outputs);
  if (const auto* act = std::get_if<Gated>(&stage.columns)) {
    for (int row = 0; row < count; ++row) gated(*act, row, column0, column1);
  } else if (const auto* kv = std::get_if<RopeKv>(&stage.columns)) {
    const int column = op.parts[share.part].column, dim = shape_.head_dim;
    for (int row = 0; row < count; ++row) rope(*kv, row, (column + column0) / dim, (column + column1) / dim);
  }
}

void Executable::run_share(const Stage& stage, const Head& op, int index, int thread) {
  const Buffer& x = buffers_[op.x];
  const int wanted = rows(x), width = widest(op.shares);
  const Share& share = op.shares[index];
  const Weight weight = slice(*op.weight, share.panel0, share.panel1);
  const int stride = output_->logits ? op.weight->outputs : width;
  float* logits = output_->logits ? output_->logits + share.panel0 * kPanel
                                  : logits_.data() + static_cast<size_t>(thread) * wanted * width;
  multiply(weight, x, nullptr, 0, weight.panels, logits, stride, false, weights_after(stage, index, thread), thread);
  for (int row = 0; row < wanted; ++row) {
    const size_t best = static_cast<size_t>(index) * wanted + row;
    best_ids_[best] = share.panel0 * kPanel +
                      kernels_.argmax(logits + static_cast<size_t>(row) * stride, weight.outputs, &best_[best]);
  }
}

void Executable::run_attention(const Stage& stage, const Attention& op, Pool::Member& member) {
  const Buffer& qkv = buffers_[op.qkv];
  const KvLayer kv = kv_->layer(op.layer);
  const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape_.head_dim)));
  float* scratch = scores_.data() + member.thread * attend_scratch_;
  for (const Wave& wave : waves_) {
    const int tasks = wave.task1 - wave.task0;
    auto item = [&](int index) {
      const Task& task = tasks_[wave.task0 + index % tasks];
      const Span& span = spans_[task.span];
      const AttentionRows rows = {qkv.x.data(),        qkv.width,
                                  shape_.heads,        batch_->positions,
                                  batch_->prefix_lens, batch_->path_starts,
                                  batch_->path_slots,  batch_->block_tables + span.request * batch_->table_blocks};
      float* part = parts_.data() + span.part + span.chunk_floats * task.chunk;
      const int kv_head = index / tasks;
      kernels_.attend(rows, kv, span.row0, span.row1, kv_head, task.chunk, scale, part, part_stride_, scratch);
      // Whoever does the last chunk has most of the others in its cache, too.
      int& left = chunks_left_[task.span * shape_.kv_heads + kv_head];
      if (std::atomic_ref<int>(left).fetch_sub(1) > 1) return;
      left = span.chunks;  // for the next layer
      for (int row = span.row0; row < span.row1; ++row) combine(op, span, row, kv_head);
    };
    run(member, tasks * shape_.kv_heads, item, wave.row0, wave.row1, stage.width,
        [&](int row) { run_rows(stage, row); });
  }
}

void Executable::combine(const Attention& op, const Span& span, int row, int kv_head) {
  const Buffer& out = buffers_[op.out];
  const int group = shape_.heads / shape_.kv_heads, width = group * shape_.head_dim;
  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const size_t part = (static_cast<size_t>(row - span.row0) * shape_.heads + head) * part_stride_;
    kernels_.combine(parts_.data() + span.part + part, span.chunk_floats, batch_->positions[row] / kChunk + 1,
                     shape_.head_dim, out.row(row) + head * shape_.head_dim);
  }
  if (width % kGroup == 0) quantize(out, row, kv_head * width, width);
}

void Executable::run_row(const Embed& op, int row) {
  const Buffer& out = buffers_[op.out];
  unpack_row(*op.weight, batch_->tokens[row], out.row(row));
  quantize(out, row, 0, out.width);
}

void Executable::run_row(const Feed& op, int row) {
  const Buffer& out = buffers_[op.out];
  memcpy(out.row(row), output_->feeds[op.index] + static_cast<size_t>(row) * out.width, out.width * sizeof(float));
  quantize(out, row, 0, out.width);
}

void Executable::run_row(const Norm& op, int row) {
  const Buffer &x = buffers_[op.x], &out = buffers_[op.out];
  kernels_.norm(x.row(row), op.weight.data(), op.eps, x.width, out.row(row));
  quantize(out, row, 0, out.width);
}

void Executable::run_row(const Tap& op, int row) {
  const Buffer& x = buffers_[op.x];
  memcpy(output_->taps[op.index] + static_cast<size_t>(row) * x.width, x.row(row), x.width * sizeof(float));
}

void Executable::run_row(const Gather& op, int row) {
  const Buffer &x = buffers_[op.x], &out = buffers_[op.out];
  memcpy(out.row(row), x.row(batch_->logit_rows[row]), x.width * sizeof(float));
  quantize(out, row, 0, out.width);
}

void Executable::rope(const RopeKv& op, int row, int head0, int head1) {
  const int slot = batch_->slots[row];
  const int block = batch_->block_tables[requests_[row] * batch_->table_blocks + slot / kBlockSlots];
  const size_t angle = static_cast<size_t>(batch_->positions[row]) * (shape_.head_dim / 2);
  kernels_.rope_kv(buffers_[op.qkv].row(row), head0, head1, shape_.heads,
                   op.q_norm.empty() ? nullptr : op.q_norm.data(), op.k_norm.empty() ? nullptr : op.k_norm.data(),
                   op.eps, shape_.cos + angle, shape_.sin + angle, kv_->layer(op.layer), block, slot % kBlockSlots);
}

void Executable::gated(const Gated& op, int row, int column0, int column1) {
  const Buffer& out = buffers_[op.out];
  const float* gate = buffers_[op.x].row(row) + column0;
  kernels_.gated(gate, gate + out.width, column1 - column0, out.row(row) + column0);
  quantize(out, row, column0, column1 - column0);
}

// Shares come in the order of token ids, so the first of equals is the lowest.
void Executable::choose() const {
  if (best_.empty()) return;
  const size_t wanted = batch_->wanted;
  for (size_t row = 0; row < wanted; ++row) {
    size_t best = row;
    for (size_t i = row; i < best_.size(); i += wanted)
      if (best_[i] > best_[best]) best = i;
    output_->argmax[row] = std::isfinite(best_[best]) ? best_ids_[best] : -1;
  }
}

}  // namespace pilotfish
