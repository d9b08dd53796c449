// Which paths are built, and which of them this machine can run.
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#define PF_AARCH64 1
#include <sys/auxv.h>
#endif

namespace pilotfish {

#if defined(__x86_64__)
namespace avx512 {
extern const Kernels kernels;
}
namespace avxvnni {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
#elif defined(PF_AARCH64)
namespace dotprod {
extern const Kernels kernels;
}
#endif
namespace portable {
extern const Kernels kernels;
}

#if defined(__x86_64__)
// The built-in functions ask the processor and the operating system, which must save the registers. Clang knows no name
// for F16C, but every processor with AVX2 and FMA has it.
static bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}

static bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

// GCC 12 knows no name for AVX-VNNI.
static bool has_avxvnni() {
  unsigned eax, ebx, ecx, edx;
  return has_avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & 1u << 4);
}
#endif

const Path* paths(int* count) {
  static const Path all[] = {
#if defined(__x86_64__)
      {&avx512::kernels, has_avx512()},
      {&avxvnni::kernels, has_avxvnni()},
      {&avx2::kernels, has_avx2()},
#elif defined(PF_AARCH64)
      {&dotprod::kernels, (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0},
#endif
      {&portable::kernels, true},
  };
  *count = sizeof all / sizeof all[0];
  return all;
}

}  // namespace pilotfish
