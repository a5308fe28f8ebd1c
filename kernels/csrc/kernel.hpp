// What a kernel for one instruction set offers, and the plan it works from. Knows neither threads nor Python.
#pragma once

#include "order.hpp"

namespace longgraft {

struct Range {
  std::int64_t begin, end;
  std::int64_t size() const { return end - begin; }
};

// A block of rows against the whole weight. Its rows are cut into `tiles` tiles of nearly equal height, none
// higher than the kernel's `tile_rows`; `packed` holds them widened to fp32, filled by `pack`.
struct Plan {
  Linear linear;
  Panels panels;
  Range rows;
  std::int64_t tiles;
  float* packed;

  Plan(const Linear& linear_, Range rows_, int tile_rows, float* packed_)
      : linear(linear_), panels(linear_.in), rows(rows_), tiles(ceil_div(rows_.size(), tile_rows)), packed(packed_) {}
  Range tile(std::int64_t index) const {
    return {rows.begin + rows.size() * index / tiles, rows.begin + rows.size() * (index + 1) / tiles};
  }
  // Where the packed rows of a tile and panel start: panels follow one another, tiles within a panel.
  float* packed_tile(std::int64_t panel, std::int64_t index) const {
    const std::int64_t height = panels.blocks(panel) * kBlock;
    return packed + panels.begin(panel) * rows.size() + (tile(index).begin - rows.begin) * height;
  }
  std::int64_t packed_floats() const { return ceil_div(linear.in, kBlock) * kBlock * rows.size(); }
};

constexpr int kColumns = 3;  // weight rows per tile
constexpr std::int64_t kChunk = 96;  // weight rows a thread takes at a time, at most; a multiple of kColumns
// Floats of scratch a thread needs: a chunk's panel widened to fp32, and the sums of `rows` rows.
inline std::int64_t scratch_floats(std::int64_t rows) { return kChunk * (kPanel + rows); }

struct Kernel {
  const char* name;
  int tile_rows;
  void (*pack)(const Plan&, std::int64_t tile);
  // Compute columns `now` of y for the plan's rows; `next` will come later on this thread (prefetched; may be empty).
  void (*columns)(const Plan&, float* scratch, Range now, Range next);
};

extern const Kernel plain_kernel;
extern const Kernel avx2_kernel;
extern const Kernel avx512_kernel;

}  // namespace longgraft
