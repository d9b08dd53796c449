// Times the linear kernels of one path on one thread: kernel_bench PATH KIND ROWS OUTPUTS INPUTS REPEAT
//
// Prints one JSON object. `measured` is the function to count when a profiler counts instructions.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../pack.h"

using namespace pilotfish;

namespace {

const Kernels* find(const std::string& path) {
  int count = 0;
  const Path* all = paths(&count);
  for (int i = 0; i < count; ++i)
    if (all[i].runs && path == all[i].kernels->path) return all[i].kernels;
  return nullptr;
}

}  // namespace

extern "C" __attribute__((noinline)) void measured(const Kernels& kernels, const Weight& weight, const Rows& rows,
                                                   int count, float* out, float* sums) {
  kernels.linear(weight, rows, 0, count, 0, weight.panels, nullptr, out, weight.outputs, false, weight.data, sums);
}

int main(int argc, char** argv) {
  const Kernels* kernels = argc == 7 ? find(argv[1]) : nullptr;
  if (!kernels) {
    std::fprintf(stderr,
                 "usage: kernel_bench PATH KIND ROWS OUTPUTS INPUTS REPEAT, with a path that this machine runs\n");
    return 2;
  }
  const int rows = std::atoi(argv[3]), outputs = std::atoi(argv[4]), inputs = std::atoi(argv[5]);
  std::vector<uint8_t> raw(raw_bytes(argv[2], outputs, inputs));
  std::mt19937 random(1);
  for (uint8_t& byte : raw) byte = static_cast<uint8_t>(random() % 60);  // small: every half of it is a finite one
  const PackedWeight packed = pack(argv[2], outputs, inputs, raw.data(), raw.size(), 1);
  std::vector<float> x(static_cast<size_t>(rows) * inputs), out(static_cast<size_t>(rows) * outputs);
  for (float& value : x) value = static_cast<float>(random() % 2000) * 1e-3f - 1.0f;
  const bool integers = packed.weight.scales != Scales::kNone;
  const int tiles = (rows + kernels->tile_rows - 1) / kernels->tile_rows, tile = (rows + tiles - 1) / tiles;
  std::vector<Group> groups(static_cast<size_t>(tiles) * tile * inputs / kGroup + 1);
  const Rows in{x.data(), inputs, groups.data(), tile};
  for (int row = 0; row < rows && integers; ++row)
    kernels->quantize(&x[static_cast<size_t>(row) * inputs], inputs,
                      groups.data() + (in.row(row, inputs) - groups.data()), tile);
  std::vector<float> sums(linear_scratch(rows));
  std::vector<double> seconds;
  for (int i = 0; i < std::atoi(argv[6]); ++i) {
    const auto start = std::chrono::steady_clock::now();
    measured(*kernels, packed.weight, in, rows, out.data(), sums.data());
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  const double macs = static_cast<double>(rows) * outputs * inputs;
  std::printf(
      "{\"path\": \"%s\", \"kind\": \"%s\", \"rows\": %d, \"us\": %.2f, \"gmac_per_s\": %.1f, \"gb_per_s\": %.1f}\n",
      argv[1], argv[2], rows, median * 1e6, macs / median * 1e-9, static_cast<double>(packed.bytes()) / median * 1e-9);
}
