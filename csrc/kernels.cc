// The kernels of one path: this file is compiled once for each, with PF_PATH naming it and the flags that allow its
// instructions.
#include "kernels.h"

#include "attention.h"
#include "linear.h"
#include "logprobs.h"
#include "rows.h"
#include "sampler.h"

#define PF_TEXT_OF(x) #x
#define PF_TEXT(x) PF_TEXT_OF(x)

namespace pilotfish::PF_PATH {

extern const Kernels kernels;
const Kernels kernels = {PF_TEXT(PF_PATH), kTileRows, quantize, linear, norm,   gated,
                         rope_kv,          attend,    combine,  dots,   argmax, sample,
                         log_probabilities};

}  // namespace pilotfish::PF_PATH
