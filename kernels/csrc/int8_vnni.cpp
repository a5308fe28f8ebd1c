// AVX-512 VNNI: 64 products of an unsigned and a signed byte per instruction, added without saturation. Rows are
// q + 128, unsigned; 128 times the sum of the weight row's values is taken off at the end, modulo 2^32.

#include "int8_kernel.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#pragma GCC diagnostic ignored "-Wuninitialized"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

// Only what stands between these pragmas may use the wider instructions.
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,prefer-vector-width=512")
#endif

#include "int8_tile.hpp"

namespace longgraft::int8 {
namespace {

struct Vnni {
  using Element = std::uint8_t;
  using Sum = __m512i;
  using Values = __m512i;
  static constexpr int kOffset = 128, kRows = 6, kVecs = 4, kVecColumns = 16;  // 24 of the 32 registers hold sums

  static Sum zero() { return _mm512_setzero_si512(); }
  static Values load(const std::int8_t* values) { return _mm512_loadu_si512(values); }
  static __m512i spread(const Element* row) {
    std::int32_t four;
    std::memcpy(&four, row, sizeof four);
    return _mm512_set1_epi32(four);
  }
  static Sum add(Sum sum, Values values, __m512i row) { return _mm512_dpbusd_epi32(sum, row, values); }
  static void store(std::int32_t* to, Sum sum) { _mm512_storeu_si512(to, sum); }
};

}  // namespace

const Kernel vnni_kernel = kernel_of<Vnni>("vnni");

}  // namespace longgraft::int8

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
namespace longgraft::int8 {
const Kernel vnni_kernel{nullptr, 0, 0, nullptr, nullptr};
}
#endif
