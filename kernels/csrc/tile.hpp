// The blocked kernel, written once over an instruction set `Isa`; included by one source file per set, between
// that file's pragmas. Everything is in an anonymous namespace and nothing of the standard library is used, so
// that no code for a newer processor leaks out of such a file. Knows neither threads nor Python.
//
// A tile is up to `Isa::kTileRows` rows of x against 3 rows of the weight, all their sums in registers. For each
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

// Where the 3 weight rows of a tile lie: in their own dtype in the weight (`Direct`), or widened and interleaved
// in scratch (`Staged`).
template <class Isa, Dtype dtype>
struct Direct {
  const char* row[kColumns];

  void load(typename Isa::Vec (&w)[kColumns], std::int64_t block, int half, int pass) const {
#pragma GCC unroll 3
    for (int c = 0; c < kColumns; ++c)
      w[c] = Isa::template widen<dtype>(row[c] + block * (kBlock * kBytes<dtype>), half, pass);
  }
};

template <class Isa>
struct Staged {
  const float* data;

  void load(typename Isa::Vec (&w)[kColumns], std::int64_t block, int half, int pass) const {
#pragma GCC unroll 3
    for (int c = 0; c < kColumns; ++c)
      w[c] = Isa::load(data + ((block * 2 + half) * kColumns + c) * kLanes + pass * Isa::kWidth);
  }
};

// sums[r * kChunk + c] of one panel, added to what is there unless `first`. `x`: kRows rows, interleaved by 16.
template <class Isa, int kRows, class Weight>
inline void tile_sums(const float* x, const Weight& weight, const Ahead& ahead, std::int64_t blocks, float* sums,
                      bool first) {
  using Vec = typename Isa::Vec;
  constexpr int kPasses = kLanes / Isa::kWidth;
  Vec total[kRows][kPasses][kColumns];
#pragma GCC unroll 2
  for (int pass = 0; pass < kPasses; ++pass) {
    Vec sum[kRows][kColumns];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 3
      for (int c = 0; c < kColumns; ++c) sum[r][c] = Isa::zero();
    for (std::int64_t block = 0; block < blocks; ++block) {
      if (pass == 0) ahead.fetch(block);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        Vec w[kColumns];
        weight.load(w, block, half, pass);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const Vec left = Isa::load_once(x + ((block * 2 + half) * kRows + r) * kLanes + pass * Isa::kWidth);
#pragma GCC unroll 3
          for (int c = 0; c < kColumns; ++c) sum[r][c] = Isa::fma(left, w[c], sum[r][c]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 3
      for (int c = 0; c < kColumns; ++c) total[r][pass][c] = sum[r][c];
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) Isa::add_lanes(total[r], sums + r * kChunk, first);
}

template <class Isa, class Weight>
inline void tile(std::int64_t rows, const float* x, const Weight& weight, const Ahead& ahead, std::int64_t blocks,
                 float* sums, bool first) {
  switch (rows) {
    case 1: return tile_sums<Isa, 1>(x, weight, ahead, blocks, sums, first);
    case 2: return tile_sums<Isa, 2>(x, weight, ahead, blocks, sums, first);
    case 3: return tile_sums<Isa, 3>(x, weight, ahead, blocks, sums, first);
    case 4: return tile_sums<Isa, 4>(x, weight, ahead, blocks, sums, first);
    default: break;
  }
  if constexpr (Isa::kTileRows > 4) {
    switch (rows) {
      case 5: return tile_sums<Isa, 5>(x, weight, ahead, blocks, sums, first);
      case 6: return tile_sums<Isa, 6>(x, weight, ahead, blocks, sums, first);
      case 7: return tile_sums<Isa, 7>(x, weight, ahead, blocks, sums, first);
      default: return tile_sums<Isa, 8>(x, weight, ahead, blocks, sums, first);
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
      if (whole && (dtype == Dtype::f32 || plan.tiles < kStagedTiles)) {
        tiles(panel, [&](std::int64_t g) { return direct(now.begin + g * kColumns, panel); });
      } else {
        stage(panel);
        tiles(panel, [&](std::int64_t g) { return Staged<Isa>{staged + g * group_floats(panel)}; });
      }
    }
    for (std::int64_t row = plan.rows.begin; row < plan.rows.end; ++row)
      finish_row(row * plan.linear.out, sums + (row - plan.rows.begin) * kChunk);
  }

  std::int64_t groups() const { return ceil_div(now.size(), kColumns); }
  std::int64_t group_floats(std::int64_t panel) const { return plan.panels.blocks(panel) * kBlock * kColumns; }

  const char* weight(std::int64_t column, std::int64_t panel) const {
    if (column >= plan.linear.out) column = plan.linear.out - 1;  // a group may reach past the last column
    return static_cast<const char*>(plan.linear.weight) +
           (column * plan.linear.weight_stride + plan.panels.begin(panel)) * kBytes<dtype>;
  }

  Direct<Isa, dtype> direct(std::int64_t column, std::int64_t panel) const {
    return {{weight(column, panel), weight(column + 1, panel), weight(column + 2, panel)}};
  }

  void stage(std::int64_t panel) const {
    const std::int64_t count = plan.panels.end(panel) - plan.panels.begin(panel);
    for (std::int64_t g = 0; g < groups(); ++g)
      for (int c = 0; c < kColumns; ++c)
        widen_row<Isa, dtype>(weight(now.begin + g * kColumns + c, panel), count,
                              staged + g * group_floats(panel) + c * kLanes, kColumns);
  }

  // All tiles of a panel; each fetches its share of the weight that comes next (the chunk's next panel, or the
  // next chunk) and of the next tile's rows.
  template <class Groups>
  void tiles(std::int64_t panel, const Groups& group) const {
    const bool last = panel + 1 == plan.panels.count;
    const Range coming = last ? next : now;
    const std::int64_t blocks = plan.panels.blocks(panel), steps = groups() * plan.tiles;
    std::int64_t step = 0, fetched = 0;
    for (std::int64_t index = 0; index < plan.tiles; ++index) {
      const Range rows = plan.tile(index);
      const float* x = plan.packed_tile(panel, index);
      const float* x_next = index + 1 < plan.tiles ? plan.packed_tile(panel, index + 1) : x;
      for (std::int64_t g = 0; g < groups(); ++g) {
        const std::int64_t due = coming.size() * ++step / steps, x_share = g < 2 * rows.size() ? g : 0;
        const Ahead ahead{weight(coming.begin + fetched, last ? 0 : panel + 1),
                          plan.linear.weight_stride * kBytes<dtype>, int(due - fetched), kBlock * kBytes<dtype>,
                          reinterpret_cast<const char*>(x_next + x_share * blocks * kLanes)};
        fetched = due;
        tile<Isa>(rows.size(), x, group(g), ahead, blocks,
                  sums + (rows.begin - plan.rows.begin) * kChunk + g * kColumns, panel == 0);
      }
    }
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
