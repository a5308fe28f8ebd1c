// The part of the kernel that 4-bit weights have to themselves. Included as packed_tile.hpp is.
#pragma once

#include "int4.hpp"
#include "packed_tile.hpp"

namespace longgraft::int4 {
namespace {

using namespace longgraft::packed;

struct Form {
  static constexpr Layout kLayout = int4::kLayout;
  using Number = float;
  static constexpr std::int32_t kTimes = 1;
  static constexpr int kLines = int(kLayout.block_bytes) / kPairs / 64;

  // Add a block's products to the tile's part of the group, all sums in registers.
  template <class Isa, int rows, int lines>
  static inline __attribute__((always_inline)) void add_block(const Group<Isa, Form>& g, std::int64_t block,
                                                              float* part) {
    constexpr int kVecs = Isa::kVecs;
    const std::uint8_t *const values = g.values + block * kLayout.block_bytes, *pair = values + g.column * kInputs;
    const std::uint8_t* ahead = g.ahead + block * kLayout.block_bytes;
    const typename Isa::Element* x = g.x + block * kBlock;
    typename Isa::Sum sum[rows * kVecs];
    each<rows * kVecs>([&](auto i) __attribute__((always_inline)) { sum[i] = Isa::start(0); });
    for (int left = kPairs; left > 0; --left, x += 2 * kInputs, pair += kStepValues, ahead += kLines * 64) {
      fetch<lines>(ahead);
      decltype(Isa::low(pair)) loaded[kVecs];
      each<kVecs>([&](auto i) __attribute__((always_inline)) {
        loaded[i] = Isa::low(pair + i * (Isa::kVecColumns * kInputs));
      });
      add_step<Isa, rows>(sum, loaded, x, g.width);
      each<kVecs>([&](auto i) __attribute__((always_inline)) {
        loaded[i] = Isa::high(pair + i * (Isa::kVecColumns * kInputs));
      });
      add_step<Isa, rows>(sum, loaded, x + kInputs, g.width);
    }
    each<kVecs>([&](auto i) __attribute__((always_inline)) {
      const std::uint8_t* const factors = values + kHalves + 2 * (g.column + i * Isa::kVecColumns);
      const auto d = Isa::bfloats(factors), m = Isa::bfloats(factors + kFactors);
      each<rows>([&](auto row) __attribute__((always_inline)) {
        float* const to = part + (row * kVecs + i) * Isa::kVecColumns;
        Isa::add_block(to, Isa::whole(sum[row * kVecs + i]), d, m, g.sums[row * g.sums_per_row + block]);
      });
    });
  }

  // Add a group's products to totals; meanwhile `lines` cache lines a pair of steps are fetched.
  template <class Isa, int rows, int lines>
  static __attribute__((noinline)) void add_products(const Group<Isa, Form>& g, float* totals) {
    constexpr int kVecs = Isa::kVecs;
    alignas(64) float part[rows * kVecs * Isa::kVecColumns] = {};
    for (std::int64_t block = 0; block < g.blocks; ++block) add_block<Isa, rows, lines>(g, block, part);
    each<rows * kVecs>([&](auto i) __attribute__((always_inline)) {
      float* const to = totals + i / kVecs * kColumns + i % kVecs * Isa::kVecColumns;
      Isa::add_group(to, Isa::floats(part + i * Isa::kVecColumns), g.scales[i / kVecs * g.groups]);
    });
  }
};

}  // namespace
}  // namespace longgraft::int4
