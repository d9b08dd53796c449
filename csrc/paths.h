// The kernels that this machine can run.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace pilotfish {

// One for each path, best first.
const std::vector<const Kernels*>& paths();

// Throws std::invalid_argument when this machine does not run the path.
const Kernels& kernels_of(const std::string& path);

}  // namespace pilotfish
