// AVX2: as AVX-512 without VNNI, 4 outputs per register.

#include <utility>

#include "int8_kernel.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

// Only what stands between these pragmas may use the wider instructions.
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "int8_tile.hpp"

namespace longgraft::int8 {
namespace {

struct Avx2 {
  using Element = std::int16_t;
  using Sum = __m256i;
  using Values = __m256i;
  static constexpr int kRows = 4, kVecs = 2, kVecColumns = 4;

  static Sum start(std::int32_t number) { return _mm256_set1_epi64x(std::int64_t(std::uint32_t(number))); }
  static Values load(const std::uint8_t* values) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
  }
  static __m256i spread(const Element* row) {
    long long four;
    std::memcpy(&four, row, sizeof four);
    return _mm256_set1_epi64x(four);
  }
  static Sum add(Sum sum, Values values, __m256i row) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(values, row));
  }
  static void add_group(float* totals, Sum sum, float scale) {
    const __m256i both = _mm256_add_epi32(sum, _mm256_srli_epi64(sum, 32));
    const __m256i low = _mm256_permutevar8x32_epi32(both, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6));
    const __m128 whole = _mm_cvtepi32_ps(_mm256_castsi256_si128(low));
    _mm_storeu_ps(totals, _mm_add_ps(_mm_loadu_ps(totals), _mm_mul_ps(whole, _mm_set1_ps(scale))));
  }
};

}  // namespace

const Kernel avx2_kernel = kernel_of<Avx2>("avx2");

}  // namespace longgraft::int8

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
namespace longgraft::int8 {
const Kernel avx2_kernel{nullptr, 0, 0, nullptr, nullptr};
}
#endif
