// What a kernel for one width and instruction set offers, and the plan it works from. Knows neither threads nor Python.
#pragma once

#include "packed.hpp"

namespace longgraft::packed {

// How the weights of a width lie, and what it wants to know of a row besides its whole numbers.
struct Layout {
  std::int64_t block_inputs, block_bytes;
  std::int64_t sum_inputs;  // inputs of a row whose whole numbers are summed
};

// A block of rows against the whole weight, cut into tiles of nearly equal height.
struct Plan {
  Linear linear;
  std::int64_t first, rows, tiles;
  std::int64_t blocks, panel_bytes;
  std::int64_t width, groups, sums_per_row;  // of a row: elements, scales, sums
  char* elements;                            // [rows, width] of the kernel's own kind
  float* scales;                             // [rows, groups]
  void* sums;                                // [rows, sums_per_row] of 4 bytes each, of the width's own kind

  std::int64_t tile_begin(std::int64_t index) const { return rows * index / tiles; }
  const std::uint8_t* panel(std::int64_t index) const { return linear.values + index * panel_bytes; }
};

struct Kernel {
  const char* name;
  Layout layout;
  int tile_rows, element_bytes;
  void (*make_whole)(const Plan&, std::int64_t row);
  // Compute panel `now` for all rows; `next` will come later on this thread and is fetched, or is `now`.
  void (*panel)(const Plan&, std::int64_t now, std::int64_t next);
};

}  // namespace longgraft::packed
