// From the blocks of a file to the panels of the kernels, value for value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "kernels.h"

namespace pilotfish {

// A weight that owns its panels.
struct PackedWeight {
  std::string kind;
  Weight weight;
  std::shared_ptr<uint8_t> memory;
  size_t bytes() const { return weight.panels * weight.panel_bytes; }
};

// `raw` holds the rows [outputs, inputs] in blocks of a format of quant.py. Throws std::invalid_argument when the
// format is unknown or the shape and the bytes do not fit together.
PackedWeight pack(const std::string& kind, int outputs, int inputs, const uint8_t* raw, size_t bytes, int threads);

// Bytes of a matrix in a format of quant.py; throws as `pack` does.
size_t raw_bytes(const std::string& kind, int outputs, int inputs);

// The values of one row, bit for bit what Tensor.dequantize says: out[inputs].
void unpack_row(const Weight& weight, int row, float* out);

}  // namespace pilotfish
