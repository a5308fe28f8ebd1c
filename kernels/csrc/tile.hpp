// The blocked kernel, written once over an instruction set `Isa`; included by one source file per set, each
// compiled with its own flags. Everything is in an anonymous namespace and nothing of the standard library is
// used, so that no code for a newer processor leaks out of such a file. Knows neither threads nor Python.
//
// A tile is up to `Isa::tile_rows` rows of x against 4 rows of the weight, all their sums in registers. Few rows
// (one tile) read the weight where it lies; more rows first widen a chunk of it to fp32, once, into L2, and
// fetch the next chunk from memory while they compute.
#pragma once

#include "kernel.hpp"

namespace longgraft {
namespace {

constexpr int kColumns = 4;  // weight rows per tile
constexpr std::int64_t kDirectTiles = 8;  // up to so many tiles of rows read the weight where it lies

struct Ahead {  // weight bytes to prefetch during one tile: `rows` rows of a chunk's panel
  const char* data;
  std::int64_t stride;
  int rows;
};

// Where the 4 weight rows of a tile lie, in their own dtype (`Direct`) or widened and interleaved (`Staged`).
template <class Isa, Dtype dtype>
struct Direct {
  static constexpr int kBytes = dtype == Dtype::f32 ? 4 : 2;
  const char* row[kColumns];
  std::int64_t ahead;  // distance in bytes to the same place in the next 4 rows

  void load(typename Isa::Vec (&w)[kColumns], std::int64_t block, int half, int pass) const {
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c)
      w[c] = Isa::template widen<dtype>(row[c] + block * (kBlock * kBytes), half, pass);
  }
  void fetch(std::int64_t block) const {
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) {
      const char* line = row[c] + ahead + block * (kBlock * kBytes);
      __builtin_prefetch(line, 0, 2);
      if (kBytes == 4) __builtin_prefetch(line + 64, 0, 2);
    }
  }
};

template <class Isa, Dtype dtype>
struct Staged {
  static constexpr int kBytes = dtype == Dtype::f32 ? 4 : 2;
  const float* data;
  Ahead ahead;

  void load(typename Isa::Vec (&w)[kColumns], std::int64_t block, int half, int pass) const {
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c)
      w[c] = Isa::load(data + ((block * 2 + half) * kColumns + c) * kLanes + pass * Isa::kWidth);
  }
  void fetch(std::int64_t block) const {
    const char* line = ahead.data + block * (kBlock * kBytes);
    for (int r = 0; r < ahead.rows; ++r, line += ahead.stride) {
      __builtin_prefetch(line, 0, 2);
      if (kBytes == 4) __builtin_prefetch(line + 64, 0, 2);
    }
  }
};

// sums[r * stride + c] of one panel. `x` holds kRows rows, interleaved in groups of 16.
template <class Isa, int kRows, class Weight>
inline void tile_sums(const float* x, const Weight& weight, std::int64_t blocks, float* sums, std::int64_t stride,
                      bool first) {
  using Vec = typename Isa::Vec;
  constexpr int kPasses = kLanes / Isa::kWidth;
  Vec total[kPasses][kRows][kColumns];
#pragma GCC unroll 2
  for (int pass = 0; pass < kPasses; ++pass) {
    Vec sum[kRows][kColumns];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) sum[r][c] = Isa::zero();
    for (std::int64_t block = 0; block < blocks; ++block) {
      if (pass == 0) weight.fetch(block);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        Vec w[kColumns];
        weight.load(w, block, half, pass);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const Vec left = Isa::load(x + ((block * 2 + half) * kRows + r) * kLanes + pass * Isa::kWidth);
#pragma GCC unroll 4
          for (int c = 0; c < kColumns; ++c) sum[r][c] = Isa::fma(left, w[c], sum[r][c]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) total[pass][r][c] = sum[r][c];
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    Vec lanes[kPasses][kColumns];
#pragma GCC unroll 2
    for (int pass = 0; pass < kPasses; ++pass)
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) lanes[pass][c] = total[pass][r][c];
    Isa::add_lanes(lanes, sums + r * stride, first);
  }
}

template <class Isa, class Weight>
inline void tile(std::int64_t rows, const float* x, const Weight& weight, std::int64_t blocks, float* sums,
                 std::int64_t stride, bool first) {
  static_assert(Isa::kTileRows <= 6);
  switch (rows) {
    case 1: return tile_sums<Isa, 1>(x, weight, blocks, sums, stride, first);
    case 2: return tile_sums<Isa, 2>(x, weight, blocks, sums, stride, first);
    case 3: return tile_sums<Isa, 3>(x, weight, blocks, sums, stride, first);
    default: break;
  }
  if constexpr (Isa::kTileRows > 3) {
    switch (rows) {
      case 4: return tile_sums<Isa, 4>(x, weight, blocks, sums, stride, first);
      case 5: return tile_sums<Isa, 5>(x, weight, blocks, sums, stride, first);
      default: return tile_sums<Isa, 6>(x, weight, blocks, sums, stride, first);
    }
  }
}

// Widen `count` products of one row into every `step`-th group of 16 floats at `to`; the last block is zero-filled.
template <class Isa, Dtype dtype>
inline void widen_row(const char* from, std::int64_t count, float* to, int step) {
  constexpr int kBytes = dtype == Dtype::f32 ? 4 : 2;
  for (std::int64_t done = 0; done < count; done += kBlock) {
    alignas(64) char filled[kBlock * kBytes] = {};
    const char* block = from + done * kBytes;
    if (count - done < kBlock) {
      __builtin_memcpy(filled, block, (count - done) * kBytes);
      block = filled;
    }
    for (int half = 0; half < 2; ++half, to += step * kLanes)
      for (int pass = 0; pass < kLanes / Isa::kWidth; ++pass)
        Isa::store(to + pass * Isa::kWidth, Isa::template widen<dtype>(block, half, pass));
  }
}

template <class Isa, Dtype dtype>
inline void pack_tile(const Plan& plan, std::int64_t index) {
  constexpr int kBytes = dtype == Dtype::f32 ? 4 : 2;
  const Range rows = plan.tile(index);
  const char* x = static_cast<const char*>(plan.linear.x);
  for (std::int64_t panel = 0; panel < plan.panels.count; ++panel) {
    const std::int64_t begin = plan.panels.begin(panel), count = plan.panels.end(panel) - begin;
    float* to = plan.packed_tile(panel, index);
    for (std::int64_t row = rows.begin; row < rows.end; ++row, to += kLanes)
      widen_row<Isa, dtype>(x + (row * plan.linear.in + begin) * kBytes, count, to, int(rows.size()));
  }
}

// The weight of one plan, with the chunk at hand and its scratch.
template <class Isa, Dtype dtype>
struct Chunk {
  static constexpr int kBytes = dtype == Dtype::f32 ? 4 : 2;
  const Plan& plan;
  Range now, next;
  float* sums;    // [rows, kChunk]
  float* staged;  // [group of 4 columns, block, half, 4, 16]

  const char* weight(std::int64_t column, std::int64_t panel) const {
    if (column >= plan.linear.out) column = plan.linear.out - 1;  // a group may reach past the last column
    return static_cast<const char*>(plan.linear.weight) +
           (column * plan.linear.weight_stride + plan.panels.begin(panel)) * kBytes;
  }

  // Few rows: no staging, each group of 4 weight rows meets all packed rows while it lies in L1.
  void direct() const {
    for (std::int64_t panel = 0; panel < plan.panels.count; ++panel)
      for (std::int64_t column = now.begin; column < now.end; column += kColumns) direct_group(column, panel);
  }

  void direct_group(std::int64_t column, std::int64_t panel) const {
    const std::int64_t len = plan.panels.end(panel) - plan.panels.begin(panel), blocks = plan.panels.blocks(panel);
    float* to = sums + (column - now.begin);
    if (len % kBlock != 0) {
      stage(column, panel, staged);
      return tiles(Staged<Isa, dtype>{staged, {nullptr, 0, 0}}, panel, blocks, to);
    }
    Direct<Isa, dtype> group;
    for (int c = 0; c < kColumns; ++c) group.row[c] = weight(column + c, panel);
    group.ahead = kColumns * plan.linear.weight_stride * kBytes;
    tiles(group, panel, blocks, to);
  }

  template <class Weight>
  void tiles(const Weight& group, std::int64_t panel, std::int64_t blocks, float* to) const {
    for (std::int64_t index = 0; index < plan.tiles; ++index) {
      const Range rows = plan.tile(index);
      tile<Isa>(rows.size(), plan.packed_tile(panel, index), group, blocks, to + (rows.begin - plan.rows.begin) * kChunk,
                kChunk, panel == 0);
    }
  }

  void stage(std::int64_t column, std::int64_t panel, float* to) const {
    const std::int64_t len = plan.panels.end(panel) - plan.panels.begin(panel);
    for (int c = 0; c < kColumns; ++c)
      widen_row<Isa, dtype>(weight(column + c, panel), len, to + c * kLanes, kColumns);
  }

  void through_staging() const {
    for (std::int64_t panel = 0; panel < plan.panels.count; ++panel) {
      const std::int64_t group_floats = plan.panels.blocks(panel) * kBlock * kColumns;
      float* to = staged;
      for (std::int64_t column = now.begin; column < now.end; column += kColumns, to += group_floats)
        stage(column, panel, to);
      panel_tiles(panel, group_floats);
    }
  }

  void panel_tiles(std::int64_t panel, std::int64_t group_floats) const {
    const bool last = panel + 1 == plan.panels.count;
    const Range coming = last ? next : now;
    const std::int64_t groups = ceil_div(now.size(), kColumns), ahead_panel = last ? 0 : panel + 1;
    const std::int64_t share = ceil_div(coming.size(), groups * plan.tiles);
    std::int64_t fetched = coming.begin;
    for (std::int64_t index = 0; index < plan.tiles; ++index) {
      const Range rows = plan.tile(index);
      const float* x = plan.packed_tile(panel, index);
      for (std::int64_t g = 0; g < groups; ++g) {
        const std::int64_t left = coming.end - fetched, rows_ahead = left < share ? left : share;
        const Ahead ahead{weight(fetched, ahead_panel), plan.linear.weight_stride * kBytes, int(rows_ahead)};
        fetched += rows_ahead;
        float* to = sums + (rows.begin - plan.rows.begin) * kChunk + g * kColumns;
        tile<Isa>(rows.size(), x, Staged<Isa, dtype>{staged + g * group_floats, ahead}, plan.panels.blocks(panel), to,
                  kChunk, panel == 0);
      }
    }
  }

  void finish() const {
    for (std::int64_t row = plan.rows.begin; row < plan.rows.end; ++row)
      finish_row(row * plan.linear.out, sums + (row - plan.rows.begin) * kChunk);
  }

  void finish_row(std::int64_t y_row, const float* from) const {
    const Linear& linear = plan.linear;
    std::int64_t column = now.begin;
    for (; column + Isa::kWidth <= now.end; column += Isa::kWidth, from += Isa::kWidth) {
      typename Isa::Vec value = Isa::load(from);
      if (linear.bias) value = Isa::add(value, Isa::template widen_bias<dtype>(linear.bias, column));
      Isa::template store_rounded<dtype>(linear.y, y_row + column, value);
    }
    for (; column < now.end; ++column, ++from) {
      const float value = linear.bias ? *from + load_element(linear.bias, column, dtype) : *from;
      store_element(linear.y, y_row + column, dtype, value);
    }
  }
};

template <class Isa, Dtype dtype>
inline void chunk_columns(const Plan& plan, float* scratch, Range now, Range next) {
  const Chunk<Isa, dtype> chunk{plan, now, next, scratch, scratch + kChunk * plan.rows.size()};
  if (plan.tiles <= kDirectTiles) {
    chunk.direct();
  } else {
    chunk.through_staging();
  }
  chunk.finish();
}

template <class Isa>
void pack(const Plan& plan, std::int64_t tile) {
  switch (plan.linear.dtype) {
    case Dtype::f32: return pack_tile<Isa, Dtype::f32>(plan, tile);
    case Dtype::bf16: return pack_tile<Isa, Dtype::bf16>(plan, tile);
    case Dtype::f16: return pack_tile<Isa, Dtype::f16>(plan, tile);
  }
}

template <class Isa>
void columns(const Plan& plan, float* scratch, Range now, Range next) {
  switch (plan.linear.dtype) {
    case Dtype::f32: return chunk_columns<Isa, Dtype::f32>(plan, scratch, now, next);
    case Dtype::bf16: return chunk_columns<Isa, Dtype::bf16>(plan, scratch, now, next);
    case Dtype::f16: return chunk_columns<Isa, Dtype::f16>(plan, scratch, now, next);
  }
}

}  // namespace
}  // namespace longgraft
