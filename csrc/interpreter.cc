#include "interpreter.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "pack.h"

namespace pilotfish {

namespace {

constexpr size_t kShareBytes = 128 << 10;  // of weights: long enough a stream, small against the caches
constexpr int kSharesPerThread = 4;        // at least, so that small matrices divide evenly too
constexpr size_t kRowBytes = 128 << 10;    // of input rows that meet one share while both are in the cache
constexpr int kSpanRows = 16;              // rows of a request that attend together
constexpr size_t kSmallWork = 2 << 10;     // numbers in rows that are done sooner than another thread would have come
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

// What a linear reads must be there as integers if one of its weights is; true: nobody has left them.
bool Executable::needs_integers(int x, const Weight& weight) {
  if (!is_integer(weight)) return false;
  buffers_[x].integers = true;
  return buffers_[x].from_linear;
}

std::vector<Share> Executable::share(const std::vector<Part>& parts) const {
  size_t bytes = 0;
  for (const Part& part : parts) bytes += part.weight->panels * part.weight->panel_bytes;
  const size_t each = std::min(kShareBytes, bytes / (pool_.threads() * kSharesPerThread));
  std::vector<Share> shares;
  for (size_t i = 0; i < parts.size(); ++i) {
    const Weight& weight = *parts[i].weight;
    const int most = std::max(1, static_cast<int>(each / weight.panel_bytes));
    const int count = (weight.panels + most - 1) / most;
    for (int n = 0; n < count; ++n)
      shares.push_back({static_cast<int>(i), weight.panels * n / count, weight.panels * (n + 1) / count});
  }
  return shares;
}

void Executable::add(Op op) {
  auto wrote = [this](int out, int x, bool linear) {
    buffers_[out].wanted_only = x >= 0 && buffers_[x].wanted_only;
    buffers_[out].from_linear = linear;
  };
  if (auto* embed = std::get_if<Embed>(&op)) wrote(embed->out, -1, false);
  if (auto* norm = std::get_if<Norm>(&op)) wrote(norm->out, norm->x, false);
  if (auto* rope = std::get_if<RopeKv>(&op)) buffers_[rope->qkv].from_linear = true;
  if (auto* attention = std::get_if<Attention>(&op)) wrote(attention->out, attention->qkv, false);
  if (auto* gated = std::get_if<Gated>(&op)) wrote(gated->out, gated->x, false);
  if (auto* gather = std::get_if<Gather>(&op)) {
    wrote(gather->out, gather->x, false);
    buffers_[gather->out].wanted_only = true;
  }
  if (auto* linear = std::get_if<Linear>(&op)) {
    for (const Part& part : linear->parts) linear->quantize |= needs_integers(linear->x, *part.weight);
    linear->shares = share(linear->parts);
    wrote(linear->out, linear->x, true);
  }
  if (auto* head = std::get_if<Head>(&op)) {
    head->quantize = needs_integers(head->x, *head->weight);
    head->shares = share({{head->weight, {}, 0}});
  }
  if (auto* tap = std::get_if<Tap>(&op)) {
    tap->index = static_cast<int>(tap_widths_.size());
    tap_widths_.push_back(buffers_[tap->x].width);
  }
  ops_.push_back(std::move(op));
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
    for (const Op& op : ops_) std::visit([&](const auto& one) { run(one, member); }, op);
  });
  choose();
}

void Executable::reserve(const Batch& batch, bool logits) {
  for (Buffer& buffer : buffers_) {
    const size_t cells = static_cast<size_t>(rows(buffer)) * buffer.width;
    buffer.x.reserve(cells);
    if (!buffer.integers) continue;
    buffer.q.reserve(cells);
    buffer.scale.reserve(cells / kGroup);
    buffer.sums.reserve(cells / kGroup * 2);
  }
  scores_.reserve(pool_.threads() * attend_scratch_);
  for (const Op& op : ops_) {
    const auto* head = std::get_if<Head>(&op);
    if (!head) continue;
    best_.resize(head->shares.size() * batch.wanted);
    best_ids_.resize(best_.size());
    if (!logits) logits_.reserve(static_cast<size_t>(pool_.threads()) * batch.wanted * widest(head->shares));
  }
}

void Executable::plan_attention(const Batch& batch) {
  requests_.resize(batch.rows);
  spans_of_rows_.resize(batch.rows);
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
      for (int i = row; i < next; ++i) {
        requests_[i] = request;
        spans_of_rows_[i] = static_cast<int>(spans_.size());
      }
      spans_.push_back({request, row, next, chunks, floats, (next - row) * row_floats});
      floats += needed;
    }
  }
  end_wave(batch.rows);
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

// body(row) for each row of this width, divided among the threads where that pays.
template <class Body>
void Executable::each_row(Pool::Member& member, int rows, int width, const Body& body) const {
  if (rows > 1 && static_cast<size_t>(rows) * width > kSmallWork) return member.phase(rows, body);
  member.phase(1, [&](int) {
    for (int row = 0; row < rows; ++row) body(row);
  });
}

void Executable::quantize(const Buffer& buffer, int row) const {
  if (!buffer.integers) return;
  const size_t cell = static_cast<size_t>(row) * buffer.width;
  kernels_.quantize(buffer.row(row), buffer.width, buffer.q.data() + cell, buffer.scale.data() + cell / kGroup,
                    buffer.sums.data() + cell / kGroup * 2);
}

void Executable::quantize_all(const Buffer& buffer, Pool::Member& member) const {
  each_row(member, rows(buffer), buffer.width, [&](int row) { quantize(buffer, row); });
}

void Executable::multiply(const Weight& weight, const Buffer& x, const float* bias, int panel0, int panel1, float* out,
                          int stride, bool add) const {
  const size_t row_bytes = static_cast<size_t>(x.width) * (is_integer(weight) ? sizeof(int8_t) : sizeof(float));
  const int at_once = std::max<int>(kSpanRows, static_cast<int>(kRowBytes / row_bytes));
  for (int row = 0, end; row < rows(x); row = end) {
    end = std::min(row + at_once, rows(x));
    kernels_.linear(weight, x.rows(), row, end, panel0, panel1, bias, out, stride, add);
  }
}

void Executable::run(const Embed& op, Pool::Member& member) {
  const Buffer& out = buffers_[op.out];
  each_row(member, batch_->rows, out.width, [&](int row) {
    unpack_row(*op.weight, batch_->tokens[row], out.row(row));
    quantize(out, row);
  });
}

void Executable::run(const Norm& op, Pool::Member& member) {
  const Buffer &x = buffers_[op.x], &out = buffers_[op.out];
  each_row(member, rows(x), x.width, [&](int row) {
    kernels_.norm(x.row(row), op.weight.data(), op.eps, x.width, out.row(row));
    quantize(out, row);
  });
}

void Executable::run(const Linear& op, Pool::Member& member) {
  const Buffer &x = buffers_[op.x], &out = buffers_[op.out];
  if (rows(x) == 0) return;
  if (op.quantize) quantize_all(x, member);
  member.phase(static_cast<int>(op.shares.size()), [&](int index) {
    const Share& share = op.shares[index];
    const Part& part = op.parts[share.part];
    multiply(*part.weight, x, part.bias.empty() ? nullptr : part.bias.data(), share.panel0, share.panel1,
             out.row(0) + part.column, out.width, op.add);
  });
}

void Executable::run(const RopeKv& op, Pool::Member& member) {
  const Buffer& qkv = buffers_[op.qkv];
  const KvLayer kv = kv_->layer(op.layer);
  const int half = shape_.head_dim / 2;
  each_row(member, batch_->rows, qkv.width, [&](int row) {
    const int slot = batch_->slots[row];
    const int block = batch_->block_tables[requests_[row] * batch_->table_blocks + slot / kBlockSlots];
    const size_t angle = static_cast<size_t>(batch_->positions[row]) * half;
    kernels_.rope_kv(qkv.row(row), shape_.heads, op.q_norm.empty() ? nullptr : op.q_norm.data(),
                     op.k_norm.empty() ? nullptr : op.k_norm.data(), op.eps, shape_.cos + angle, shape_.sin + angle, kv,
                     block, slot % kBlockSlots);
  });
}

void Executable::run(const Attention& op, Pool::Member& member) {
  const Buffer &qkv = buffers_[op.qkv], &out = buffers_[op.out];
  const KvLayer kv = kv_->layer(op.layer);
  const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape_.head_dim)));
  float* scratch = scores_.data() + member.thread * attend_scratch_;
  for (const Wave& wave : waves_) {
    const int tasks = wave.task1 - wave.task0;
    member.phase(tasks * shape_.kv_heads, [&](int item) {
      const Task& task = tasks_[wave.task0 + item % tasks];
      const Span& span = spans_[task.span];
      const AttentionRows rows = {qkv.x.data(),        qkv.width,
                                  shape_.heads,        batch_->positions,
                                  batch_->prefix_lens, batch_->path_starts,
                                  batch_->path_slots,  batch_->block_tables + span.request * batch_->table_blocks};
      float* part = parts_.data() + span.part + span.chunk_floats * task.chunk;
      kernels_.attend(rows, kv, span.row0, span.row1, item / tasks, task.chunk, scale, part, part_stride_, scratch);
    });
    each_row(member, wave.row1 - wave.row0, out.width, [&](int index) {
      const int row = wave.row0 + index;
      const Span& span = spans_[spans_of_rows_[row]];
      for (int head = 0; head < shape_.heads; ++head) {
        const size_t part = (static_cast<size_t>(row - span.row0) * shape_.heads + head) * part_stride_;
        kernels_.combine(parts_.data() + span.part + part, span.chunk_floats, batch_->positions[row] / kChunk + 1,
                         shape_.head_dim, out.row(row) + head * shape_.head_dim);
      }
      quantize(out, row);
    });
  }
}

void Executable::run(const Gated& op, Pool::Member& member) {
  const Buffer &x = buffers_[op.x], &out = buffers_[op.out];
  each_row(member, rows(x), x.width, [&](int row) {
    kernels_.gated(x.row(row), out.width, out.row(row));
    quantize(out, row);
  });
}

void Executable::run(const Tap& op, Pool::Member& member) {
  const Buffer& x = buffers_[op.x];
  each_row(member, rows(x), x.width, [&](int row) {
    memcpy(output_->taps[op.index] + static_cast<size_t>(row) * x.width, x.row(row), x.width * sizeof(float));
  });
}

void Executable::run(const Gather& op, Pool::Member& member) {
  const Buffer &x = buffers_[op.x], &out = buffers_[op.out];
  each_row(member, batch_->wanted, x.width, [&](int index) {
    memcpy(out.row(index), x.row(batch_->logit_rows[index]), x.width * sizeof(float));
    quantize(out, index);
  });
}

void Executable::run(const Head& op, Pool::Member& member) {
  const Buffer& x = buffers_[op.x];
  const int wanted = rows(x), width = widest(op.shares);
  if (rows(x) == 0) return;
  if (op.quantize) quantize_all(x, member);
  member.phase(static_cast<int>(op.shares.size()), [&](int index) {
    const Share& share = op.shares[index];
    const Weight weight = slice(*op.weight, share.panel0, share.panel1);
    const int stride = output_->logits ? shape_.vocab : width;
    float* logits = output_->logits ? output_->logits + share.panel0 * kPanel
                                    : logits_.data() + static_cast<size_t>(member.thread) * wanted * width;
    multiply(weight, x, nullptr, 0, weight.panels, logits, stride, false);
    for (int row = 0; row < wanted; ++row) {
      const size_t best = static_cast<size_t>(index) * wanted + row;
      best_ids_[best] = share.panel0 * kPanel +
                        kernels_.argmax(logits + static_cast<size_t>(row) * stride, weight.outputs, &best_[best]);
    }
  });
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
