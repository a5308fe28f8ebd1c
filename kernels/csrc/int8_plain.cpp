// The plain kernel: the sums written out. Slow, for processors without a kernel of their own and for tests.

#include "int8_tile.hpp"

namespace longgraft::int8 {
namespace {

struct Plain {
  using Element = std::int8_t;
  static constexpr int kRows = 1, kVecs = 1, kVecColumns = 16;
  struct Sum {
    std::int32_t of[kVecColumns];
  };
  using Values = const std::uint8_t*;

  static Sum start(std::int32_t number) {
    Sum sum;
    for (std::int32_t& of : sum.of) of = number;
    return sum;
  }
  static Values load(const std::uint8_t* values) { return values; }
  static const Element* spread(const Element* row) { return row; }
  static Sum add(Sum sum, Values values, const Element* row) {
    for (int column = 0; column < kVecColumns; ++column)
      for (int k = 0; k < kInputs; ++k) sum.of[column] += std::int32_t(values[column * kInputs + k]) * row[k];
    return sum;
  }
  static void add_group(float* totals, const Sum& sum, float scale) {
    for (int column = 0; column < kVecColumns; ++column) totals[column] += float(sum.of[column]) * scale;
  }
};

}  // namespace

const Kernel plain_kernel = kernel_of<Plain>("plain");

}  // namespace longgraft::int8
