// AVX-512 without VNNI: values widened to 16 bits, since the instruction for bytes saturates. 8 outputs per register,
// the two pairs of inputs of an output in neighbouring lanes until the end.

#include <utility>

#include "int4.hpp"
#include "int8.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#pragma GCC diagnostic ignored "-Wuninitialized"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

// Only what stands between these pragmas may use the wider instructions.
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#include "int4_tile.hpp"
#include "int8_tile.hpp"

namespace longgraft::packed {
namespace {

struct Avx512 {
  using Element = std::int16_t;
  using Sum = __m512i;
  using Floats = __m256;
  static constexpr int kRows = 5, kVecs = 4, kVecColumns = 8;

  static Sum start(std::int32_t number) { return _mm512_set1_epi64(std::int64_t(std::uint32_t(number))); }
  static __m512i load(const std::uint8_t* values) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values)));
  }
  static __m512i low(const std::uint8_t* values) { return _mm512_and_si512(load(values), _mm512_set1_epi16(15)); }
  static __m512i high(const std::uint8_t* values) { return _mm512_srli_epi16(load(values), 4); }
  static __m512i spread(const Element* row) {
    long long four;
    std::memcpy(&four, row, sizeof four);
    return _mm512_set1_epi64(four);
  }
  static Sum add(Sum sum, __m512i values, __m512i row) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(values, row));
  }
  static Floats floats(const float* at) { return _mm256_loadu_ps(at); }
  static Floats whole(Sum sum) {
    const __m512i both = _mm512_add_epi32(sum, _mm512_srli_epi64(sum, 32));
    return _mm256_cvtepi32_ps(_mm512_cvtepi64_epi32(both));
  }
  static Floats bfloats(const std::uint8_t* values) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }
  static void add_group(float* totals, Floats part, float scale) {
    _mm256_storeu_ps(totals, _mm256_add_ps(floats(totals), _mm256_mul_ps(part, _mm256_set1_ps(scale))));
  }
  static void add_block(float* part, Floats sum, Floats d, Floats m, float x) {
    _mm256_storeu_ps(part, _mm256_fmadd_ps(_mm256_set1_ps(x), m, _mm256_fmadd_ps(sum, d, floats(part))));
  }
};

}  // namespace

}  // namespace longgraft::packed

namespace longgraft {
const packed::Kernel int4::avx512_kernel = packed::kernel_of<packed::Avx512, int4::Form>("avx512");
const packed::Kernel int8::avx512_kernel = packed::kernel_of<packed::Avx512, int8::Form>("avx512");
}  // namespace longgraft

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
namespace longgraft {
const packed::Kernel int4::avx512_kernel{};
const packed::Kernel int8::avx512_kernel{};
}  // namespace longgraft
#endif
