// The blocked kernel, written once over an instruction set `Isa`; included by one source file per set, between
// that file's pragmas. Everything is in an anonymous namespace and nothing of the standard library is used, so
// that no code for a newer processor leaks out of such a file. Knows neither threads nor Python.
//
// A tile is up to `Isa::kTileRows` rows of x against 3 to 12 rows of the weight, all sums in registers. For each
// panel a tile's rows of x stay in L1 while a chunk of the weight streams past from L2, where the tiles before
// have fetched it from memory bit by bit: memory and arithmetic overlap. Few rows read the weight in its own
// dtype, widening in registers; many rows widen the chunk's panel once and read that.
#pragma once

#include "kernel.hpp"

namespace longgraft {
namespace {

// From this many tiles on, widening a 16-bit chunk once is cheaper than once per tile.
constexpr std::int64_t kStagedTiles = 9;

template <Dtype dtype>
constexpr int kBytes = dtype == Dtype::f32 ? 4 : 2;

// What to fetch while a tile computes, a little per block of 32 products, of what comes after it.
struct Ahead {
  const char* weight;  // `rows` weight rows, `stride` bytes apart
  std::int64_t stride;
  int rows, block_bytes;
  const char* x;  // packed rows of the next tile: 64 bytes per block

  void fetch(std::int64_t block) const {
    __builtin_prefetch(x + block * 64, 0, 2);
    const char* line = weight + block * block_bytes;
    for (int r = 0; r < rows; ++r, line += stride) {
      __builtin_prefetch(line, 0, 2);
      if (block_bytes > 64) __builtin_prefetch(line + 64, 0, 2);
    }
  }
};

// The weight rows of a tile, in their own dtype where they lie (`Direct`), or widened and interleaved in scratch
// (`Staged`, 3 rows). `load` gives 16 (or a pass's) products of row `c`.
template <class Isa, Dtype dtype>
struct Direct {
  static constexpr int kElementBytes = kBytes<dtype>;
  static constexpr bool kAnyWidth = true;
  const char* data;
  std::int64_t stride;

  typename Isa::Vec load(int c, std::int64_t block, int half, int pass) const {
    return Isa::template widen<dtype>(data + c * stride + block * (kBlock * kBytes<dtype>), half, pass);
  }
};

template <class Isa>
struct Staged {
  static constexpr int kElementBytes = 4;
  static constexpr bool kAnyWidth = false;
  const float* data;

  typename Isa::Vec load(int c, std::int64_t block, int half, int pass) const {
    return Isa::load(data + ((block * 2 + half) * kColumns + c) * kLanes + pass * Isa::kWidth);
  }
};

// Add 16 (or a pass's) products to each of kRows x kWide sums, holding the shorter side in registers.
template <class Isa, int kRows, int kWide, class Weight>
inline void add_products(typename Isa::Vec (&sum)[kRows][kWide], const float* x, const Weight& weight,
                         std::int64_t block, int half, int pass) {
  using Vec = typename Isa::Vec;
  x += (block * 2 + half) * kRows * kLanes + pass * Isa::kWidth;
  if constexpr (kRows <= kWide) {
    Vec left[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) left[r] = Isa::load_once(x + r * kLanes);
#pragma GCC unroll 12
    for (int c = 0; c < kWide; ++c) {
      const Vec right = weight.load(c, block, half, pass);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sum[r][c] = Isa::fma(left[r], right, sum[r][c]);
    }
  } else {
    Vec right[kWide];
#pragma GCC unroll 3
    for (int c = 0; c < kWide; ++c) right[c] = weight.load(c, block, half, pass);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec left = Isa::load_once(x + r * kLanes);
#pragma GCC unroll 3
      for (int c = 0; c < kWide; ++c) sum[r][c] = Isa::fma(left, right[c], sum[r][c]);
    }
  }
}

// sums[r * kChunk + c] of one panel, added to what is there unless `first`. `x`: kRows rows, interleaved by 16.
template <class Isa, int kRows, int kWide, class Weight>
inline void tile_sums(const float* x, const Weight& weight, const Ahead& ahead, std::int64_t blocks, float* sums,
                      bool first) {
  using Vec = typename Isa::Vec;
  constexpr int kPasses = kLanes / Isa::kWidth;
  // Of many streams the processor's own prefetcher makes more (measured: 10 to 15 %).
  constexpr bool kFetch = kWide * Weight::kElementBytes < 24;
  Vec total[kPasses][kRows][kWide];
#pragma GCC unroll 2
  for (int pass = 0; pass < kPasses; ++pass) {
    Vec sum[kRows][kWide];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 12
      for (int c = 0; c < kWide; ++c) sum[r][c] = Isa::zero();
    for (std::int64_t block = 0; block < blocks; ++block) {
      if (kFetch && pass == 0) ahead.fetch(block);
      add_products<Isa>(sum, x, weight, block, 0, pass);
      add_products<Isa>(sum, x, weight, block, 1, pass);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 12
      for (int c = 0; c < kWide; ++c) total[pass][r][c] = sum[r][c];
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < kWide; c += kColumns) {
      Vec three[kPasses][kColumns];
#pragma GCC unroll 2
      for (int pass = 0; pass < kPasses; ++pass)
#pragma GCC unroll 3
        for (int i = 0; i < kColumns; ++i) three[pass][i] = total[pass][r][c + i];
      Isa::add_lanes(three, sums + r * kChunk + c, first);
    }
}

// Weight rows a tile of `rows` rows takes at once where it can: as many streams from memory as there are registers.
template <class Isa>
constexpr int wide_columns(std::int64_t rows) {
  const int most = int(Isa::kSums / rows);
  return most >= 12 ? 12 : most >= 6 ? 6 : kColumns;
}

template <class Isa, int kRows, class Weight>
inline void tile_of(int columns, const float* x, const Weight& weight, const Ahead& ahead, std::int64_t blocks,
                    float* sums, bool first) {
  constexpr int kWide = wide_columns<Isa>(kRows);
  if (columns == kColumns) {
    tile_sums<Isa, kRows, kColumns>(x, weight, ahead, blocks, sums, first);
  } else if constexpr (kWide > kColumns && Weight::kAnyWidth) {
    tile_sums<Isa, kRows, kWide>(x, weight, ahead, blocks, sums, first);
  }
}

template <class Isa, class Weight>
inline void tile(std::int64_t rows, int columns, const float* x, const Weight& weight, const Ahead& ahead,
                 std::int64_t blocks, float* sums, bool first) {
  switch (rows) {
    case 1: return tile_of<Isa, 1>(columns, x, weight, ahead, blocks, sums, first);
    case 2: return tile_of<Isa, 2>(columns, x, weight, ahead, blocks, sums, first);
    case 3: return tile_of<Isa, 3>(columns, x, weight, ahead, blocks, sums, first);
    case 4: return tile_of<Isa, 4>(columns, x, weight, ahead, blocks, sums, first);
    default: break;
  }
  if constexpr (Isa::kTileRows > 4) {
    switch (rows) {
      case 5: return tile_of<Isa, 5>(columns, x, weight, ahead, blocks, sums, first);
      case 6: return tile_of<Isa, 6>(columns, x, weight, ahead, blocks, sums, first);
      case 7: return tile_of<Isa, 7>(columns, x, weight, ahead, blocks, sums, first);
      default: return tile_of<Isa, 8>(columns, x, weight, ahead, blocks, sums, first);
    }
  }
}

// Widen `count` products of one row into every `step`-th group of 16 floats at `to`; zeros fill the last block.
template <class Isa, Dtype dtype>
inline void widen_row(const char* from, std::int64_t count, float* to, int step) {
  for (std::int64_t done = 0; done < count; done += kBlock) {
    alignas(64) char filled[kBlock * kBytes<dtype>] = {};
    const char* block = from + done * kBytes<dtype>;
    if (count - done < kBlock) {
      __builtin_memcpy(filled, block, (count - done) * kBytes<dtype>);
      block = filled;
    }
    for (int half = 0; half < 2; ++half, to += step * kLanes)
      for (int pass = 0; pass < kLanes / Isa::kWidth; ++pass)
        Isa::store(to + pass * Isa::kWidth, Isa::template widen<dtype>(block, half, pass));
  }
}

template <class Isa, Dtype dtype>
inline void pack_tile(const Plan& plan, std::int64_t index) {
  const Range rows = plan.tile(index);
  const char* x = static_cast<const char*>(plan.linear.x);
  for (std::int64_t panel = 0; panel < plan.panels.count; ++panel) {
    const std::int64_t begin = plan.panels.begin(panel), count = plan.panels.end(panel) - begin;
    float* to = plan.packed_tile(panel, index);
    for (std::int64_t row = rows.begin; row < rows.end; ++row, to += kLanes)
      widen_row<Isa, dtype>(x + (row * plan.linear.in + begin) * kBytes<dtype>, count, to, int(rows.size()));
  }
}

// All rows of a plan against a chunk of weight rows.
template <class Isa, Dtype dtype>
struct Chunk {
  const Plan& plan;
  Range now, next;
  float* sums;    // [rows, kChunk]
  float* staged;  // [group of 3 columns, block, half, 3, 16]

  void compute() const {
    for (std::int64_t panel = 0; panel < plan.panels.count; ++panel) {
      const bool whole = (plan.panels.end(panel) - plan.panels.begin(panel)) % kBlock == 0;
      const bool in_place = whole && (dtype == Dtype::f32 || plan.tiles < kStagedTiles);
      const std::int64_t from = in_place ? now.size() / kColumns : 0;  // 3 rows that reach past the last are staged
      for (std::int64_t g = from; g < ceil_div(now.size(), kColumns); ++g) stage(panel, g);
      for (std::int64_t index = 0; index < plan.tiles; ++index) columns(panel, index, from * kColumns);
    }
    for (std::int64_t row = plan.rows.begin; row < plan.rows.end; ++row)
      finish_row(row * plan.linear.out, sums + (row - plan.rows.begin) * kChunk);
  }

  const char* weight(std::int64_t column, std::int64_t panel) const {
    return static_cast<const char*>(plan.linear.weight) +
           (column * plan.linear.weight_stride + plan.panels.begin(panel)) * kBytes<dtype>;
  }

  float* staged_group(std::int64_t panel, std::int64_t g) const {
    return staged + g * plan.panels.blocks(panel) * kBlock * kColumns;
  }

  void stage(std::int64_t panel, std::int64_t g) const {
    const std::int64_t count = plan.panels.end(panel) - plan.panels.begin(panel);
    for (int c = 0; c < kColumns; ++c) {
      const std::int64_t column = now.begin + g * kColumns + c, last = plan.linear.out - 1;
      widen_row<Isa, dtype>(weight(column < last ? column : last, panel), count,
                            staged_group(panel, g) + c * kLanes, kColumns);
    }
  }

  // One tile of rows against all columns of the chunk, the first `in_place` of them read where they lie.
  void columns(std::int64_t panel, std::int64_t index, std::int64_t in_place) const {
    const Range rows = plan.tile(index);
    const int wide = wide_columns<Isa>(rows.size());
    const std::int64_t stride = plan.linear.weight_stride * kBytes<dtype>, blocks = plan.panels.blocks(panel);
    const float* x = plan.packed_tile(panel, index);
    float* to = sums + (rows.begin - plan.rows.begin) * kChunk;
    for (std::int64_t c = 0; c < now.size();) {
      const int step = c + wide <= in_place ? wide : kColumns;
      const Ahead next_bytes = ahead(panel, index, c, step);
      if (c < in_place) {
        const Direct<Isa, dtype> group{weight(now.begin + c, panel), stride};
        tile<Isa>(rows.size(), step, x, group, next_bytes, blocks, to + c, panel == 0);
      } else {
        const Staged<Isa> group{staged_group(panel, c / kColumns)};
        tile<Isa>(rows.size(), step, x, group, next_bytes, blocks, to + c, panel == 0);
      }
      c += step;
    }
  }

  // A tile's share of the weight that comes next (the chunk's next panel, or the next chunk) and of the next
  // tile's rows of x.
  Ahead ahead(std::int64_t panel, std::int64_t index, std::int64_t column, int step) const {
    const bool last = panel + 1 == plan.panels.count;
    const Range coming = last ? next : now;
    const std::int64_t work = now.size() * plan.tiles, done = index * now.size() + column, end = done + step;
    const std::int64_t from = coming.size() * done / work, to = coming.size() * (end < work ? end : work) / work;
    const std::int64_t rows = plan.tile(index).size(), part = column / kColumns < 2 * rows ? column / kColumns : 0;
    const float* x = plan.packed_tile(panel, index + 1 < plan.tiles ? index + 1 : index);
    return {weight(coming.begin + from, last ? 0 : panel + 1), plan.linear.weight_stride * kBytes<dtype>,
            int(to - from), kBlock * kBytes<dtype>,
            reinterpret_cast<const char*>(x + part * plan.panels.blocks(panel) * kLanes)};
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
  float* staged = scratch + kChunk * plan.rows.size();
  switch (plan.linear.dtype) {
    case Dtype::f32: return Chunk<Isa, Dtype::f32>{plan, now, next, scratch, staged}.compute();
    case Dtype::bf16: return Chunk<Isa, Dtype::bf16>{plan, now, next, scratch, staged}.compute();
    case Dtype::f16: return Chunk<Isa, Dtype::f16>{plan, now, next, scratch, staged}.compute();
  }
}

}  // namespace
}  // namespace longgraft
