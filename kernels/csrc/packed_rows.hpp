// Makes rows whole, for any width and instruction set. Included as packed_tile.hpp is, so that these plain loops are
// compiled for each set. `Form` says: kLayout; Number, what a sum is kept as; kTimes, what it is multiplied with.
#pragma once

#include "packed_kernel.hpp"

namespace longgraft::packed {
namespace {

template <Dtype dtype>
inline float widened(const void* data, std::int64_t index) {
  return load_element(data, index, dtype);
}

// Adding 1.5 * 2^23 rounds to nearest even and leaves the whole number in the low bits.
inline std::int32_t nearest(float value) { return std::int32_t(float_to_bits(value + 0x1.8p23f) << 10) >> 10; }

// Largest magnitude of `count` elements; magnitudes compare like their bits.
template <Dtype dtype>
inline std::int32_t top_bits(const char* x, std::int64_t count) {
  std::int32_t most = 0;
  for (std::int64_t k = 0; k < count; ++k) {
    const std::int32_t bits = std::int32_t(float_to_bits(widened<dtype>(x, k)) & 0x7fffffffu);
    most = bits > most ? bits : most;
  }
  return most;
}

template <class Isa, class Form, Dtype dtype>
void make_whole_as(const Plan& plan, std::int64_t row) {
  using Element = typename Isa::Element;
  constexpr std::int64_t kSummed = Form::kLayout.sum_inputs;
  const std::int64_t in = plan.linear.in;
  const char* const x = static_cast<const char*>(plan.linear.x) + (plan.first + row) * in * element_bytes(dtype);
  Element* const to = reinterpret_cast<Element*>(plan.elements) + row * plan.width;
  auto* sum = static_cast<typename Form::Number*>(plan.sums) + row * plan.sums_per_row;
  for (std::int64_t group = 0; group < plan.groups; ++group) {
    const std::int64_t begin = group * kGroup, end = in - begin < kGroup ? in : begin + kGroup;
    const std::int32_t most = top_bits<dtype>(x + begin * element_bytes(dtype), end - begin);
    const float top = bits_to_float(std::uint32_t(most));
    const bool finite = most < 0x7f800000, any = finite && top >= kLeastTop;
    const float inverse = any ? 127.0f / top : 0.0f;
    for (std::int64_t from = begin; from < end; from += kSummed) {
      const std::int64_t until = end - from < kSummed ? end : from + kSummed;
      std::int32_t total = 0;
      for (std::int64_t k = from; k < until; ++k) {
        const std::int32_t whole = any ? nearest(widened<dtype>(x, k) * inverse) : 0;
        to[k] = Element(whole);
        total += whole;
      }
      *sum++ = typename Form::Number(Form::kTimes * total);
    }
    plan.scales[row * plan.groups + group] = any ? top / 127.0f : finite ? 0.0f : __builtin_nanf("");
  }
  for (std::int64_t k = in; k < plan.width; ++k) to[k] = 0;
}

template <class Isa, class Form>
void make_whole(const Plan& plan, std::int64_t row) {
  switch (plan.linear.dtype) {
    case Dtype::f32: return make_whole_as<Isa, Form, Dtype::f32>(plan, row);
    case Dtype::bf16: return make_whole_as<Isa, Form, Dtype::bf16>(plan, row);
    case Dtype::f16: return make_whole_as<Isa, Form, Dtype::f16>(plan, row);
  }
}

}  // namespace
}  // namespace longgraft::packed
