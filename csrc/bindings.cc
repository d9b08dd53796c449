// The Python module pilotfish._native: what backends/native.py needs. The arrays of a forward pass are checked here and
// in Batch::check, so that no array can make the kernels leave their memory; programs are checked in native.py.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "interpreter.h"
#include "kv.h"
#include "pack.h"
#include "paths.h"
#include "pool.h"

namespace nb = nanobind;

void bind_kernels(nb::module_& m);

namespace {

using namespace pilotfish;
using nb::literals::operator""_a;

template <class T, int Dimensions>
using Array = nb::ndarray<T, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu>;
using Ints = Array<const int32_t, 1>;
using Floats = Array<const float, 1>;

void need(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

std::vector<float> copied(const Floats& array) { return {array.data(), array.data() + array.size()}; }

// Takes None too.
std::vector<float> copied(nb::handle array) {
  return array.is_none() ? std::vector<float>() : copied(nb::cast<Floats>(array, false));
}

void forward(Executable& executable, Ints tokens, Ints positions, Ints slots, Ints prefix_lens, Ints path_starts,
             Ints path_slots, Ints row_starts, Array<const int32_t, 2> block_tables, Ints logit_rows, Kv& kv,
             Array<int32_t, 1> argmax, nb::object logits, const std::vector<Array<float, 2>>& taps, nb::object times,
             const std::vector<Array<const float, 2>>& feeds) {
  const size_t rows = tokens.size(), wanted = logit_rows.size();
  need(positions.size() == rows && slots.size() == rows && prefix_lens.size() == rows && path_starts.size() == rows + 1,
       "the arrays of a tree batch differ in rows");
  need(row_starts.size() == block_tables.shape(0) + 1, "row_starts and block_tables differ in requests");
  need(argmax.size() == wanted, "argmax has not one element for each wanted row");
  Output output{argmax.data(), nullptr, {}, {}, nullptr, nullptr};
  if (!logits.is_none()) {
    const auto array = nb::cast<Array<float, 2>>(logits, false);
    need(array.shape(0) == wanted && (wanted == 0 || array.shape(1) == static_cast<size_t>(executable.head_outputs())),
         "logits are not [wanted rows, outputs of the head]");
    output.logits = array.data();
  }
  need(taps.size() == executable.tap_widths().size(), "the program has another number of taps");
  for (size_t i = 0; i < taps.size(); ++i) {
    need(taps[i].shape(0) == rows && taps[i].shape(1) == static_cast<size_t>(executable.tap_widths()[i]),
         "a tap is not [rows, width]");
    output.taps.push_back(taps[i].data());
  }
  need(feeds.size() == executable.feed_widths().size(), "the program has another number of feeds");
  for (size_t i = 0; i < feeds.size(); ++i) {
    need(feeds[i].shape(0) == rows && feeds[i].shape(1) == static_cast<size_t>(executable.feed_widths()[i]),
         "a feed is not [rows, width]");
    output.feeds.push_back(feeds[i].data());
  }
  if (!times.is_none()) {
    const auto ms = nb::cast<Array<double, 1>>(times[nb::int_(0)], false);
    const auto phases = nb::cast<Array<int32_t, 1>>(times[nb::int_(1)], false);
    const size_t stages = executable.stages().size();
    need(ms.size() == stages && phases.size() == stages, "times are not [stages]");
    output.stage_ms = ms.data();
    output.stage_phases = phases.data();
  }
  const Batch batch{static_cast<int>(rows),
                    static_cast<int>(block_tables.shape(0)),
                    static_cast<int>(wanted),
                    static_cast<int>(path_slots.size()),
                    static_cast<int>(block_tables.shape(1)),
                    tokens.data(),
                    positions.data(),
                    slots.data(),
                    prefix_lens.data(),
                    path_starts.data(),
                    path_slots.data(),
                    row_starts.data(),
                    block_tables.data(),
                    logit_rows.data()};
  const nb::gil_scoped_release released;
  executable.forward(batch, kv, output);
}

void bind_executable(nb::module_& m) {
  nb::class_<Executable>(m, "Executable", "A program whose weights and buffers are bound.")
      .def(
          "__init__",
          [](Executable* self, const std::string& path, Pool& pool, int heads, int kv_heads, int head_dim, int layers,
             int vocab, Array<const float, 2> cos, Array<const float, 2> sin, const std::vector<int>& widths) {
            need(cos.shape(0) == sin.shape(0) && cos.shape(1) == sin.shape(1) &&
                     cos.shape(1) * 2 == static_cast<size_t>(head_dim),
                 "the tables of angles are not [context, head_dim / 2]");
            const int context = static_cast<int>(cos.shape(0));
            const Shape shape{heads, kv_heads, head_dim, layers, vocab, context, cos.data(), sin.data()};
            new (self) Executable(kernels_of(path), pool, shape, widths);
          },
          "path"_a, "pool"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "layers"_a, "vocab"_a, "cos"_a.noconvert(),
          "sin"_a.noconvert(), "widths"_a, nb::keep_alive<1, 3>(), nb::keep_alive<1, 9>(), nb::keep_alive<1, 10>())
      .def(
          "embed", [](Executable& self, const PackedWeight& weight, int out) { self.add(Embed{&weight.weight, out}); },
          "weight"_a, "out"_a, nb::keep_alive<1, 2>())
      .def(
          "feed", [](Executable& self, int out) { self.add(Feed{out}); }, "out"_a)
      .def(
          "norm",
          [](Executable& self, int x, Floats weight, float eps, int out) {
            self.add(Norm{x, copied(weight), eps, out});
          },
          "x"_a, "weight"_a.noconvert(), "eps"_a, "out"_a)
      .def(
          "linear",
          [](Executable& self, int x, const std::vector<nb::tuple>& parts, int out, bool add) {
            Linear linear{x, {}, out, add};
            for (const nb::tuple& part : parts)
              linear.parts.push_back({&nb::cast<const PackedWeight&>(part[0]).weight, copied(nb::handle(part[1])),
                                      nb::cast<int>(part[2])});
            self.add(std::move(linear));
          },
          "x"_a, "parts"_a, "out"_a, "add"_a, nb::keep_alive<1, 3>(), "parts: (weight, bias or None, column) each")
      .def(
          "rope_kv",
          [](Executable& self, int qkv, int layer, nb::object q_norm, nb::object k_norm, float eps) {
            self.add(RopeKv{qkv, layer, copied(nb::handle(q_norm)), copied(nb::handle(k_norm)), eps});
          },
          "qkv"_a, "layer"_a, "q_norm"_a.none(), "k_norm"_a.none(), "eps"_a)
      .def(
          "attention", [](Executable& self, int qkv, int layer, int out) { self.add(Attention{qkv, layer, out}); },
          "qkv"_a, "layer"_a, "out"_a)
      .def(
          "gated", [](Executable& self, int x, int out) { self.add(Gated{x, out}); }, "x"_a, "out"_a)
      .def(
          "tap", [](Executable& self, int x) { self.add(Tap{x}); }, "x"_a)
      .def(
          "gather", [](Executable& self, int x, int out) { self.add(Gather{x, out}); }, "x"_a, "out"_a)
      .def(
          "head", [](Executable& self, int x, const PackedWeight& weight) { self.add(Head{x, &weight.weight}); }, "x"_a,
          "weight"_a, nb::keep_alive<1, 3>())
      .def("forward", &forward, "tokens"_a.noconvert(), "positions"_a.noconvert(), "slots"_a.noconvert(),
           "prefix_lens"_a.noconvert(), "path_starts"_a.noconvert(), "path_slots"_a.noconvert(),
           "row_starts"_a.noconvert(), "block_tables"_a.noconvert(), "logit_rows"_a.noconvert(), "kv"_a,
           "argmax"_a.noconvert(), "logits"_a.none(), "taps"_a, "times"_a.none(), "feeds"_a,
           "times: milliseconds and barriers of each stage, or None")
      .def_prop_ro(
          "stages",
          [](const Executable& self) {
            std::vector<std::vector<int>> ops;
            for (const Stage& stage : self.stages()) ops.push_back(stage.ops);
            return ops;
          },
          "The numbers of the operations in each stage, which are done between two barriers when there are few rows.");
}

void bind_kv(nb::module_& m) {
  using Slots = const std::vector<int>&;
  // A view as [blocks, kv_heads, ...] of the halves, as uint16.
  auto view = [](nb::handle self, int layer, bool keys) {
    const Kv& kv = nb::cast<const Kv&>(self);
    if (layer < 0 || layer >= kv.layers()) throw nb::index_error("no such layer");
    const size_t dim = static_cast<size_t>(kv.head_dim()), slots = kBlockSlots;
    const KvLayer at = kv.layer(layer);
    const size_t rows = keys ? dim : slots, columns = keys ? slots : dim;
    return nb::ndarray<nb::numpy, uint16_t>(
        keys ? at.k : at.v, {static_cast<size_t>(kv.blocks()), static_cast<size_t>(kv.kv_heads()), rows, columns}, self,
        {static_cast<int64_t>(at.block_halves), static_cast<int64_t>(at.head_halves), static_cast<int64_t>(columns),
         1});
  };
  nb::class_<Kv>(m, "Kv", "Keys and values of one model, as halves.")
      .def(
          "__init__",
          [](Kv* self, int layers, int kv_heads, int head_dim, int blocks) {
            need(layers > 0 && kv_heads > 0 && head_dim > 0 && head_dim % kPanel == 0 && blocks > 0,
                 "a KV cache needs layers, heads and blocks, and a head_dim that is a multiple of 16");
            new (self) Kv(layers, kv_heads, head_dim, blocks);
          },
          "layers"_a, "kv_heads"_a, "head_dim"_a, "blocks"_a)
      .def(
          "move",
          [](Kv& self, Slots blocks, Slots src, Slots dst) {
            need(src.size() == dst.size(), "src and dst differ in length");
            const int end = static_cast<int>(blocks.size()) * kBlockSlots;
            for (const int block : blocks) need(block >= 0 && block < self.blocks(), "a block is not of this cache");
            for (Slots slots : {src, dst})
              for (const int slot : slots) need(slot >= 0 && slot < end, "a slot is beyond the block table");
            const nb::gil_scoped_release released;
            for (size_t i = 0; i < src.size(); ++i)
              self.copy(blocks[src[i] / kBlockSlots], src[i] % kBlockSlots, blocks[dst[i] / kBlockSlots],
                        dst[i] % kBlockSlots);
          },
          "blocks"_a, "src"_a, "dst"_a, "Copies slot src[i] to dst[i], in order, in every layer.")
      .def_prop_ro("nbytes", &Kv::bytes)
      .def(
          "keys", [view](nb::handle self, int layer) { return view(self, layer, true); }, "layer"_a,
          "A view [blocks, kv_heads, head_dim, 16] of float16 bits.")
      .def(
          "values", [view](nb::handle self, int layer) { return view(self, layer, false); }, "layer"_a,
          "A view [blocks, kv_heads, 16, head_dim] of float16 bits.");
}

}  // namespace

NB_MODULE(_native, m) {
  bind_kernels(m);
  nb::class_<Pool>(m, "Pool", "Threads that run forward passes; the caller is one of them.")
      .def(nb::init<int>(), "threads"_a)
      .def_prop_ro("threads", &Pool::threads)
      .def("read_gb_per_s", &read_gb_per_s, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "gmac_per_s", [](Pool& self, const std::string& path) { return gmac_per_s(self, kernels_of(path)); },
          "path"_a, nb::call_guard<nb::gil_scoped_release>());
  bind_kv(m);
  bind_executable(m);
}
