#include "paths.h"

#include <stdexcept>

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

const std::vector<const Kernels*>& paths() {
  static const std::vector<const Kernels*> all = [] {
    std::vector<const Kernels*> found;
#if defined(__x86_64__)
    if (has_avx512()) found.push_back(&avx512::kernels);
    if (has_avxvnni()) found.push_back(&avxvnni::kernels);
    if (has_avx2()) found.push_back(&avx2::kernels);
#elif defined(PF_AARCH64)
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) found.push_back(&dotprod::kernels);
#endif
    found.push_back(&portable::kernels);
    return found;
  }();
  return all;
}

const Kernels& kernels_of(const std::string& path) {
  for (const Kernels* kernels : paths())
    if (path == kernels->path) return *kernels;
  throw std::invalid_argument("this machine does not run the path " + path);
}

}  // namespace pilotfish
