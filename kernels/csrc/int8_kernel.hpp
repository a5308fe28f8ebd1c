// What an 8-bit kernel for one instruction set offers, and the plan it works from. Knows neither threads nor Python.
#pragma once

#include "int8.hpp"

namespace longgraft::int8 {

// A block of rows against the whole weight, cut into tiles of nearly equal height.
struct Plan {
  Linear linear;
  std::int64_t first, rows, tiles;
  char* quantized;       // [rows, steps * kInputs] elements of the kernel's own kind
  float* row_scales;     // [rows, groups]
  std::int32_t* starts;  // [rows, groups] where a group's sum starts: what takes the values' offset off

  std::int64_t tile_begin(std::int64_t index) const { return rows * index / tiles; }
};

struct Kernel {
  const char* name;
  int tile_rows, element_bytes;
  void (*quantize)(const Plan&, std::int64_t row);
  // Compute panel `now` for all rows; `next` will come later on this thread and is fetched, or is `now`.
  void (*panel)(const Plan&, std::int64_t now, std::int64_t next);
};

extern const Kernel plain_kernel;
extern const Kernel avx2_kernel;
extern const Kernel avx512_kernel;
extern const Kernel vnni_kernel;

}  // namespace longgraft::int8
