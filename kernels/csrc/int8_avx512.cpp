// AVX-512 without VNNI: values widened to 16 bits, since the instruction for bytes saturates. 8 outputs per register,
// the two pairs of inputs of an output in neighbouring lanes until the end.

#include <utility>

#include "int8_kernel.hpp"

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

#include "int8_tile.hpp"

namespace longgraft::int8 {
namespace {

struct Avx512 {
  using Element = std::int16_t;
  using Sum = __m512i;
  using Values = __m512i;
  static constexpr int kRows = 5, kVecs = 4, kVecColumns = 8;

  static Sum start(std::int32_t number) { return _mm512_set1_epi64(std::int64_t(std::uint32_t(number))); }
  static Values load(const std::uint8_t* values) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values)));
  }
  static __m512i spread(const Element* row) {
    long long four;
    std::memcpy(&four, row, sizeof four);
    return _mm512_set1_epi64(four);
  }
  static Sum add(Sum sum, Values values, __m512i row) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(values, row));
  }
  static void add_group(float* totals, Sum sum, float scale) {
    const __m512i both = _mm512_add_epi32(sum, _mm512_srli_epi64(sum, 32));
    const __m256 whole = _mm256_cvtepi32_ps(_mm512_cvtepi64_epi32(both));
    _mm256_storeu_ps(totals, _mm256_add_ps(_mm256_loadu_ps(totals), _mm256_mul_ps(whole, _mm256_set1_ps(scale))));
  }
};

}  // namespace

const Kernel avx512_kernel = kernel_of<Avx512>("avx512");

}  // namespace longgraft::int8

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
namespace longgraft::int8 {
const Kernel avx512_kernel{nullptr, 0, 0, nullptr, nullptr};
}
#endif
