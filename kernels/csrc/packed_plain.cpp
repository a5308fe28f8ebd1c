// The plain kernel: the sums written out. Slow, for processors without a kernel of their own and for tests.

#include "int4_tile.hpp"
#include "int8_tile.hpp"

namespace longgraft::packed {
namespace {

struct Plain {
  using Element = std::int8_t;
  static constexpr int kRows = 1, kVecs = 1, kVecColumns = 16;
  struct Sum {
    std::int32_t of[kVecColumns];
  };
  struct Floats {
    float of[kVecColumns];
  };
  struct Halves {
    std::uint8_t of[kVecColumns * kInputs];
    operator const std::uint8_t*() const { return of; }
  };

  static Sum start(std::int32_t number) {
    Sum sum;
    for (std::int32_t& of : sum.of) of = number;
    return sum;
  }
  static const std::uint8_t* load(const std::uint8_t* values) { return values; }
  static Halves low(const std::uint8_t* values) {
    Halves found;
    for (int k = 0; k < kVecColumns * kInputs; ++k) found.of[k] = values[k] & 15;
    return found;
  }
  static Halves high(const std::uint8_t* values) {
    Halves found;
    for (int k = 0; k < kVecColumns * kInputs; ++k) found.of[k] = values[k] >> 4;
    return found;
  }
  static const Element* spread(const Element* row) { return row; }
  static Sum add(Sum sum, const std::uint8_t* values, const Element* row) {
    for (int column = 0; column < kVecColumns; ++column)
      for (int k = 0; k < kInputs; ++k) sum.of[column] += std::int32_t(values[column * kInputs + k]) * row[k];
    return sum;
  }
  static Floats floats(const float* at) {
    Floats found;
    std::memcpy(found.of, at, sizeof found.of);
    return found;
  }
  static Floats whole(const Sum& sum) {
    Floats found;
    for (int column = 0; column < kVecColumns; ++column) found.of[column] = float(sum.of[column]);
    return found;
  }
  static Floats bfloats(const std::uint8_t* values) {
    Floats found;
    for (int column = 0; column < kVecColumns; ++column) found.of[column] = load_element(values, column, Dtype::bf16);
    return found;
  }
  static void add_group(float* totals, const Floats& part, float scale) {
    for (int column = 0; column < kVecColumns; ++column) totals[column] += part.of[column] * scale;
  }
  static void add_block(float* part, const Floats& sum, const Floats& d, const Floats& m, float x) {
    for (int column = 0; column < kVecColumns; ++column)
      part[column] = part[column] + sum.of[column] * d.of[column] + x * m.of[column];
  }
};

}  // namespace

}  // namespace longgraft::packed

namespace longgraft {
const packed::Kernel int4::plain_kernel = packed::kernel_of<packed::Plain, int4::Form>("plain");
const packed::Kernel int8::plain_kernel = packed::kernel_of<packed::Plain, int8::Form>("plain");
}  // namespace longgraft
