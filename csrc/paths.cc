// Which paths are built, and which of them this machine can run.
#include "kernels.h"

namespace pilotfish {

#if defined(__x86_64__)
namespace avx512 {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
#endif
namespace portable {
extern const Kernels kernels;
}

const Path* paths(int* count) {
  static const Path all[] = {
#if defined(__x86_64__)
      // These ask the processor and the operating system, which must save the registers. Clang knows no name for F16C,
      // but every processor with AVX2 and FMA has it.
      {&avx512::kernels, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                             __builtin_cpu_supports("avx512vnni")},
      {&avx2::kernels, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
#endif
      {&portable::kernels, true},
  };
  *count = sizeof all / sizeof all[0];
  return all;
}

}  // namespace pilotfish
