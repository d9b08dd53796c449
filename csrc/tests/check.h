// What the test programs share.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../kernels.h"

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

// All paths this machine runs, and the AVX-512 one out of AVX2 instructions where it has those.
inline std::vector<const Kernels*> tested_paths() {
  std::vector<const Kernels*> tested;
  int count;
  const Path* all = paths(&count);
  for (int i = 0; i < count; ++i)
    if (all[i].runs) tested.push_back(all[i].kernels);
#if defined(__x86_64__)
  if (tested.size() > 1) tested.push_back(&avx512_emulated::kernels);
#endif
  return tested;
}

}  // namespace pilotfish
