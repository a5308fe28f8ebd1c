// The plain kernel: the sums written out. Slow, for processors without a kernel of their own and for tests.

#include "int8_tile.hpp"

namespace longgraft::int8 {
namespace {

struct Plain {
  using Element = std::int8_t;
  static constexpr int kOffset = 0, kRows = 1, kVecs = 1, kVecColumns = 16;
  struct Sum {
    std::int32_t of[kVecColumns];
  };
  using Values = const std::int8_t*;

  static Sum zero() { return {}; }
  static Values load(const std::int8_t* values) { return values; }
  static const Element* spread(const Element* row) { return row; }
  static Sum add(Sum sum, Values values, const Element* row) {
    for (int column = 0; column < kVecColumns; ++column)
      for (int k = 0; k < kInputs; ++k) sum.of[column] += std::int32_t(values[column * kInputs + k]) * row[k];
    return sum;
  }
  static void store(std::int32_t* to, const Sum& sum) { std::memcpy(to, sum.of, sizeof sum.of); }
};

}  // namespace

const Kernel plain_kernel = kernel_of<Plain>("plain");

}  // namespace longgraft::int8
