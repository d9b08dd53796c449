// Times the kernels of one path on one thread, their data in the caches:
//   kernel_bench PATH linear KIND ROWS OUTPUTS INPUTS REPEAT
//   kernel_bench PATH attend HEAD_DIM ROWS HEADS REPEAT     one chunk of 256 positions, all heads of one kv head
// Prints one JSON object. `measured` is what to count when a profiler counts instructions.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "../pack.h"
#include "../paths.h"

using namespace pilotfish;

extern "C" __attribute__((noinline)) void measured(const std::function<void()>& work) { work(); }

namespace {

void report(const char* path, const char* what, int rows, double macs, double bytes, int repeat,
            const std::function<void()>& work) {
  std::vector<double> seconds;
  for (int i = 0; i < repeat; ++i) {
    const auto start = std::chrono::steady_clock::now();
    measured(work);
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  std::printf(
      "{\"path\": \"%s\", \"kernel\": \"%s\", \"rows\": %d, \"macs\": %.0f, \"us\": %.2f, \"gmac_per_s\": %.1f, "
      "\"gb_per_s\": %.1f}\n",
      path, what, rows, macs, median * 1e6, macs / median * 1e-9, bytes / median * 1e-9);
}

void bench_linear(const Kernels& kernels, const char* kind, int rows, int outputs, int inputs, int repeat) {
  std::mt19937 random(1);
  std::vector<uint8_t> raw(raw_bytes(kind, outputs, inputs));
  for (uint8_t& byte : raw) byte = static_cast<uint8_t>(random() % 60);  // small: every half of it is a finite one
  const PackedWeight packed = pack(kind, outputs, inputs, raw.data(), raw.size(), 1);
  std::vector<float> x(static_cast<size_t>(rows) * inputs), out(static_cast<size_t>(rows) * outputs);
  for (float& value : x) value = static_cast<float>(random() % 2000) * 1e-3f - 1.0f;
  const bool integers = packed.weight.scales != Scales::kNone;
  const int tile = even_share(rows, kernels.tile_rows);
  std::vector<Group> groups(integers ? group_count(rows, inputs, tile) : 1);
  const Rows in{x.data(), inputs, groups.data(), tile};
  for (int row = 0; row < rows && integers; ++row)
    kernels.quantize(&x[static_cast<size_t>(row) * inputs], inputs, &groups[in.row(row, inputs) - groups.data()], tile);
  std::vector<float> sums(linear_scratch(rows));
  report(kernels.path, kind, rows, static_cast<double>(rows) * outputs * inputs, static_cast<double>(packed.bytes()),
         repeat, [&] {
           kernels.linear(packed.weight, in, 0, rows, 0, packed.weight.panels, nullptr, out.data(), outputs, false,
                          packed.weight.data, sums.data());
         });
}

void bench_attend(const Kernels& kernels, int head_dim, int rows, int heads, int repeat) {
  std::mt19937 random(1);
  const int blocks = kChunk / kBlockSlots;
  const size_t tile = static_cast<size_t>(head_dim) * kBlockSlots;
  std::vector<uint16_t> k(static_cast<size_t>(kChunk) * head_dim), v(k.size());
  for (uint16_t& half : k) half = static_cast<uint16_t>(0x3000 | (random() & 0x83ff));
  for (uint16_t& half : v) half = static_cast<uint16_t>(0x3000 | (random() & 0x83ff));
  std::vector<float> q(static_cast<size_t>(rows) * heads * head_dim);
  for (float& value : q) value = static_cast<float>(random() % 2000) * 1e-3f - 1.0f;
  std::vector<int32_t> positions(rows, kChunk - 1), prefixes(rows, kChunk), starts(rows + 1), table;
  for (int i = 0; i < blocks; ++i) table.push_back((i * 5) % blocks);
  const AttentionRows in{q.data(),        heads * head_dim, heads,        positions.data(),
                         prefixes.data(), starts.data(),    table.data(), table.data()};
  const size_t stride = static_cast<size_t>(head_dim) + kPanel;
  std::vector<float> part(static_cast<size_t>(rows) * heads * stride), scratch(attend_scratch(head_dim) + 16);
  float* aligned = scratch.data() + (16 - reinterpret_cast<uintptr_t>(scratch.data()) / 4 % 16) % 16;
  report(kernels.path, "attend", rows, 2.0 * rows * heads * kChunk * head_dim, 4.0 * kChunk * head_dim, repeat, [&] {
    kernels.attend(in, {k.data(), v.data(), 1, head_dim, tile, tile}, 0, rows, 0, 0, 0.1f, part.data(), stride,
                   aligned);
  });
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string what = argc > 2 ? argv[2] : "";
  auto number = [&](int i) { return std::stoi(argv[i]); };
  if (what == "linear" && argc == 8)
    bench_linear(kernels_of(argv[1]), argv[3], number(4), number(5), number(6), number(7));
  else if (what == "attend" && argc == 7)
    bench_attend(kernels_of(argv[1]), number(3), number(4), number(5), number(6));
  else
    throw std::invalid_argument("usage: kernel_bench PATH linear KIND ROWS OUTPUTS INPUTS REPEAT, or attend ...");
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "kernel_bench: %s\n", error.what());
  return 2;
}
