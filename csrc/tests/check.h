// What the test programs share.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../paths.h"

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (0)

namespace pilotfish {

#if defined(__x86_64__)
namespace avx512_emulated {
extern const Kernels kernels;
}
#endif

// All paths this machine runs, and the AVX-512 one out of AVX2 instructions where it has those. Prints their names.
inline const std::vector<const Kernels*>& tested_paths() {
  static const std::vector<const Kernels*> tested = [] {
    std::vector<const Kernels*> found = paths();
#if defined(__x86_64__)
    if (found.size() > 1) found.push_back(&avx512_emulated::kernels);
#endif
    for (const Kernels* kernels : found) std::printf("path: %s\n", kernels->path);
    return found;
  }();
  return tested;
}

}  // namespace pilotfish
