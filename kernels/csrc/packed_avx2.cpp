// AVX2: as AVX-512 without VNNI, 4 outputs per register.

#include <utility>

#include "int4.hpp"
#include "int8.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

// Only what stands between these pragmas may use the wider instructions.
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "int4_tile.hpp"
#include "int8_tile.hpp"

namespace longgraft::packed {
namespace {

struct Avx2 {
  using Element = std::int16_t;
  using Sum = __m256i;
  using Floats = __m128;
  static constexpr int kRows = 4, kVecs = 2, kVecColumns = 4;

  static Sum start(std::int32_t number) { return _mm256_set1_epi64x(std::int64_t(std::uint32_t(number))); }
  static __m256i load(const std::uint8_t* values) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
  }
  static __m256i low(const std::uint8_t* values) { return _mm256_and_si256(load(values), _mm256_set1_epi16(15)); }
  static __m256i high(const std::uint8_t* values) { return _mm256_srli_epi16(load(values), 4); }
  static __m256i spread(const Element* row) {
    long long four;
    std::memcpy(&four, row, sizeof four);
    return _mm256_set1_epi64x(four);
  }
  static Sum add(Sum sum, __m256i values, __m256i row) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(values, row));
  }
  static Floats floats(const float* at) { return _mm_loadu_ps(at); }
  static Floats whole(Sum sum) {
    const __m256i both = _mm256_add_epi32(sum, _mm256_srli_epi64(sum, 32));
    const __m256i low = _mm256_permutevar8x32_epi32(both, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6));
    return _mm_cvtepi32_ps(_mm256_castsi256_si128(low));
  }
  static Floats bfloats(const std::uint8_t* values) {
    const __m128i halves = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(values));
    return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(halves), 16));
  }
  static void add_group(float* totals, Floats part, float scale) {
    _mm_storeu_ps(totals, _mm_add_ps(floats(totals), _mm_mul_ps(part, _mm_set1_ps(scale))));
  }
  static void add_block(float* part, Floats sum, Floats d, Floats m, float x) {
    _mm_storeu_ps(part, _mm_fmadd_ps(_mm_set1_ps(x), m, _mm_fmadd_ps(sum, d, floats(part))));
  }
};

}  // namespace

}  // namespace longgraft::packed

namespace longgraft {
const packed::Kernel int4::avx2_kernel = packed::kernel_of<packed::Avx2, int4::Form>("avx2");
const packed::Kernel int8::avx2_kernel = packed::kernel_of<packed::Avx2, int8::Form>("avx2");
}  // namespace longgraft

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
namespace longgraft {
const packed::Kernel int4::avx2_kernel{};
const packed::Kernel int8::avx2_kernel{};
}  // namespace longgraft
#endif
