// The plain twin: 16 lanes as an array. Right everywhere, and slow; the oracle of the others' bits.

#include <cmath>

#include "attention_isa.hpp"

namespace longgraft::attention {
namespace {

struct Plain {
  struct Vec {
    float lane[kLanes];
  };
  static constexpr int kVecs = 1;

  template <class Function>
  static Vec each(Function function) {
    Vec result;
    for (int i = 0; i < kLanes; ++i) result.lane[i] = function(i);
    return result;
  }
  static Vec all(float value) {
    return each([&](int) { return value; });
  }
  static Vec load(const float* from) {
    return each([&](int i) { return from[i]; });
  }
  static void store(float* to, const Vec& value) { std::memcpy(to, value.lane, sizeof value.lane); }
  static Vec add(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  static Vec sub(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.lane[i] - b.lane[i]; });
  }
  static Vec mul(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.lane[i] * b.lane[i]; });
  }
  static Vec div(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.lane[i] / b.lane[i]; });
  }
  static Vec max(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  static Vec fma(const Vec& a, const Vec& b, const Vec& c) {
    return each([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
  }
  static float first(const Vec& a) { return a.lane[0]; }
  static float top(const Vec& a) {
    float most = a.lane[0];
    for (float lane : a.lane) most = lane > most ? lane : most;
    return most;
  }
  static float total(Vec a) {
    for (int width = kLanes / 2; width > 0; width /= 2)
      for (int i = 0; i < width; ++i) a.lane[i] += a.lane[i + width];
    return a.lane[0];
  }
  static Vec times_power(const Vec& value, const Vec& shifted) {
    return each([&](int i) { return bits_to_float(float_to_bits(value.lane[i]) + (float_to_bits(shifted.lane[i]) << 23)); });
  }
  static Vec zero_below(const Vec& value, const Vec& x, float limit) {
    return each([&](int i) { return x.lane[i] < limit ? 0.0f : value.lane[i]; });
  }
  static Vec below(const Vec& x, float limit, const Vec& yes, const Vec& no) {
    return each([&](int i) { return x.lane[i] < limit ? yes.lane[i] : no.lane[i]; });
  }
  static Vec magnitude(const Vec& x) {
    return each([&](int i) { return std::fabs(x.lane[i]); });
  }
  static Vec with_sign(const Vec& size, const Vec& x) {
    return each([&](int i) { return std::copysign(size.lane[i], x.lane[i]); });
  }

  template <Dtype dtype>
  static Vec natural(const char* from) {
    return each([&](int i) { return load_element(from, i, dtype); });
  }
  template <Dtype dtype>
  static Vec value(const char* row, std::int64_t vec) {
    return each([&](int i) { return load_element(row, (vec >> 1) * kBlock + lane_element(dtype, vec & 1, i), dtype); });
  }
  template <Dtype dtype>
  static void round(char* to, const Vec& a, const Vec& b) {
    for (int i = 0; i < kLanes; ++i) {
      store_element(to, lane_element(dtype, 0, i), dtype, a.lane[i]);
      store_element(to, lane_element(dtype, 1, i), dtype, b.lane[i]);
    }
  }
  template <Dtype dtype>
  static void transpose(const char* const* rows, std::int64_t offset, float* to) {
    for (int i = 0; i < kLanes; ++i)
      for (int e = 0; e < 64 / kBytes<dtype>; ++e) to[e * kBlockKeys + i] = load_element(rows[i] + offset, e, dtype);
  }
};

}  // namespace

const Kernel plain_kernel = make_kernel<Plain>("plain");

}  // namespace longgraft::attention
