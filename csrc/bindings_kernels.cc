// Packed weights, and the kernels one by one for the tests.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "kernels.h"
#include "pack.h"
#include "paths.h"

namespace nb = nanobind;
using namespace pilotfish;

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Result = nb::ndarray<nb::numpy, T>;

template <typename T>
Result<T> to_numpy(std::vector<T>&& values, std::initializer_list<size_t> shape) {
  auto* owned = new std::vector<T>(std::move(values));
  const nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return Result<T>(owned->data(), shape, owner);
}

std::vector<std::string> path_names() {
  std::vector<std::string> names;
  for (const Kernels* kernels : paths()) names.emplace_back(kernels->path);
  return names;
}

PackedWeight pack_bytes(const std::string& kind, int outputs, int inputs, Bytes data) {
  constexpr size_t kWorthAThread = 1 << 20;
  const size_t most = data.size() / kWorthAThread + 1;
  const int threads = static_cast<int>(std::min<size_t>(most, std::max(1u, std::thread::hardware_concurrency())));
  const nb::gil_scoped_release release;
  return pack(kind, outputs, inputs, data.data(), data.size(), threads);
}

// Puts `rows` in the place of as many rows, from `first` on; what they leave of their last panel becomes zeros.
void replace_rows(PackedWeight& packed, int first, const PackedWeight& rows) {
  const Weight &to = packed.weight, &from = rows.weight;
  if (packed.kind != rows.kind || to.inputs != from.inputs)
    throw std::invalid_argument("the rows are of another format or width");
  if (first < 0 || first % kPanel != 0 || first / kPanel + from.panels > to.panels)
    throw std::invalid_argument("the rows do not begin with a panel, or reach beyond the last");
  std::memcpy(packed.memory.get() + first / kPanel * to.panel_bytes, from.data, from.panels * from.panel_bytes);
}

Result<float> row_of(const PackedWeight& packed, int row) {
  if (row < 0 || row >= packed.weight.outputs) throw std::out_of_range("the weight has no such row");
  std::vector<float> values(static_cast<size_t>(packed.weight.inputs));
  unpack_row(packed.weight, row, values.data());
  const size_t size = values.size();
  return to_numpy(std::move(values), {size});
}

// Rows quantised as a linear reads them.
struct Quantized {
  std::vector<Group> groups;
  Rows rows;

  Quantized(const Kernels& kernels, const float* x, int count, int inputs, bool integers) {
    const int tile = even_share(count, kernels.tile_rows);
    if (integers) groups.resize(group_count(count, inputs, tile));
    rows = {x, inputs, groups.data(), tile};
    for (int row = 0; integers && row < count; ++row)
      kernels.quantize(x + static_cast<size_t>(row) * inputs, inputs, &groups[rows.row(row, inputs) - groups.data()],
                       tile);
  }
};

// q [n], scale [n / 32], offset [n / 32], and [n / 32, 3]: minus, then minus_halves.
std::tuple<Result<int8_t>, Result<float>, Result<float>, Result<int32_t>> quantize(const std::string& path, Vector x) {
  if (x.size() % kGroup != 0 || x.size() == 0) throw std::invalid_argument("x must hold whole groups of 32");
  const Quantized row(kernels_of(path), x.data(), 1, static_cast<int>(x.size()), true);
  std::vector<int8_t> q;
  std::vector<float> scale, offset;
  std::vector<int32_t> minus;
  for (const Group& group : row.groups) {
    q.insert(q.end(), group.q, group.q + kGroup);
    scale.push_back(group.scale);
    offset.push_back(group.offset);
    minus.insert(minus.end(), {group.minus, group.minus_halves[0], group.minus_halves[1]});
  }
  const size_t groups = row.groups.size();
  return {to_numpy(std::move(q), {x.size()}), to_numpy(std::move(scale), {groups}),
          to_numpy(std::move(offset), {groups}), to_numpy(std::move(minus), {groups, 3})};
}

Result<float> linear(const std::string& path, const PackedWeight& packed, Matrix x, std::optional<Vector> bias,
                     std::optional<Matrix> out) {
  const Kernels& kernels = kernels_of(path);
  const Weight& weight = packed.weight;
  const size_t rows = x.shape(0), inputs = static_cast<size_t>(weight.inputs);
  const size_t outputs = static_cast<size_t>(weight.outputs);
  if (x.shape(1) != inputs) throw std::invalid_argument("x must be [rows, inputs]");
  if (bias && bias->size() != outputs) throw std::invalid_argument("bias must be [outputs]");
  if (out && (out->shape(0) != rows || out->shape(1) != outputs))
    throw std::invalid_argument("out must be [rows, outputs]");
  std::vector<float> result(rows * outputs);
  if (out) std::copy_n(out->data(), result.size(), result.begin());
  const Quantized input(kernels, x.data(), static_cast<int>(rows), weight.inputs, weight.scales != Scales::kNone);
  std::vector<float> sums(linear_scratch(static_cast<int>(rows)));
  kernels.linear(weight, input.rows, 0, static_cast<int>(rows), 0, weight.panels, bias ? bias->data() : nullptr,
                 result.data(), weight.outputs, out.has_value(), nullptr, sums.data());
  return to_numpy(std::move(result), {rows, outputs});
}

std::tuple<int, float> argmax(const std::string& path, Vector x) {
  if (x.size() == 0) throw std::invalid_argument("argmax of nothing");
  float best;
  const int index = kernels_of(path).argmax(x.data(), static_cast<int>(x.size()), &best);
  return {index, best};
}

void check_logits(const Vector& logits) {
  constexpr size_t kMost = 1 << 23;  // whose weights, up to 2^40 each, have a sum of 64 bits
  if (logits.size() == 0 || logits.size() > kMost) throw std::invalid_argument("logits must be 1 to 2^23 numbers");
}

int sample(const std::string& path, Vector logits, double temperature, double min_p, int top_k, double top_p,
           uint64_t seed, uint64_t position) {
  check_logits(logits);
  if (!(temperature >= 0) || !(min_p >= 0 && min_p <= 1) || top_k < 0 || !(top_p > 0 && top_p <= 1))
    throw std::invalid_argument("a sampling parameter is out of range");
  const Kernels& kernels = kernels_of(path);
  const Sampling rule{temperature, min_p, top_k, top_p, seed, position};
  const nb::gil_scoped_release release;
  return kernels.sample(logits.data(), static_cast<int>(logits.size()), rule);
}

// The normaliser and the ids of the `top` likeliest tokens; None where the highest logit is not finite.
std::optional<std::tuple<double, Result<int32_t>>> log_probabilities(const std::string& path, Vector logits, int top) {
  constexpr int kMostTop = 20;  // the kernel looks through all of them for each that it finds
  check_logits(logits);
  if (top < 0 || top > kMostTop) throw std::invalid_argument("top must be from 0 to 20");
  const Kernels& kernels = kernels_of(path);
  const int n = static_cast<int>(logits.size());
  std::vector<int32_t> ids(std::min(top, n));
  double normaliser = 0;
  bool finite;
  {
    const nb::gil_scoped_release release;
    finite = kernels.log_probabilities(logits.data(), n, static_cast<int>(ids.size()), &normaliser, ids.data());
  }
  if (!finite) return std::nullopt;
  const size_t count = ids.size();
  return std::tuple{normaliser, to_numpy(std::move(ids), {count})};
}

}  // namespace

void bind_kernels(nb::module_& m) {
  nb::class_<PackedWeight>(m, "Weight")
      .def_ro("kind", &PackedWeight::kind)
      .def_prop_ro("outputs", [](const PackedWeight& packed) { return packed.weight.outputs; })
      .def_prop_ro("inputs", [](const PackedWeight& packed) { return packed.weight.inputs; })
      .def_prop_ro("nbytes", &PackedWeight::bytes)
      .def("unpack_row", row_of, nb::arg("row"))
      .def("replace_rows", replace_rows, nb::arg("first"), nb::arg("rows"));
  m.def("pack", pack_bytes, nb::arg("kind"), nb::arg("outputs"), nb::arg("inputs"), nb::arg("data"));
  m.def("path_names", path_names);
  m.def("quantize", quantize, nb::arg("path"), nb::arg("x"));
  m.def("linear", linear, nb::arg("path"), nb::arg("weight"), nb::arg("x"), nb::arg("bias") = nb::none(),
        nb::arg("out") = nb::none());
  m.def("argmax", argmax, nb::arg("path"), nb::arg("x"));
  m.def("sample", sample, nb::arg("path"), nb::arg("logits"), nb::arg("temperature"), nb::arg("min_p"),
        nb::arg("top_k"), nb::arg("top_p"), nb::arg("seed"), nb::arg("position"));
  m.def("log_probabilities", log_probabilities, nb::arg("path"), nb::arg("logits"), nb::arg("top"));
}
