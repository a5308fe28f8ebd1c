// The plain twin: the sum of order.hpp written out, one output element at a time. The oracle of the others.

#include <cmath>

#include "kernel.hpp"

namespace longgraft {
namespace {

float panel_sum(const Linear& linear, std::int64_t row, std::int64_t column, std::int64_t begin, std::int64_t end) {
  float lanes[kLanes] = {};
  for (std::int64_t block = begin; block < end; block += kBlock)
    for (int half = 0; half < 2; ++half)
      for (int lane = 0; lane < kLanes; ++lane) {
        const std::int64_t at = block + lane_element(linear.dtype, half, lane);
        const bool inside = at < end;  // the last block is filled up with products of zeros
        const float left = inside ? load_element(linear.x, row * linear.in + at, linear.dtype) : 0.0f;
        const float right =
            inside ? load_element(linear.weight, column * linear.weight_stride + at, linear.dtype) : 0.0f;
        lanes[lane] = std::fma(left, right, lanes[lane]);
      }
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

float output(const Linear& linear, std::int64_t row, std::int64_t column) {
  const Panels panels(linear.in);
  float sum = 0.0f;
  for (std::int64_t panel = 0; panel < panels.count; ++panel) {
    const float part = panel_sum(linear, row, column, panels.begin(panel), panels.end(panel));
    sum = panel == 0 ? part : sum + part;
  }
  return linear.bias ? sum + load_element(linear.bias, column, linear.dtype) : sum;
}

void pack(const Plan&, std::int64_t) {}

void columns(const Plan& plan, float*, Range now, Range) {
  const Linear& linear = plan.linear;
  for (std::int64_t row = plan.rows.begin; row < plan.rows.end; ++row)
    for (std::int64_t column = now.begin; column < now.end; ++column)
      store_element(linear.y, row * linear.out + column, linear.dtype, output(linear, row, column));
}

}  // namespace

const Kernel plain_kernel{"plain", 1, pack, columns};

}  // namespace longgraft
