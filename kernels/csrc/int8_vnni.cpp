// AVX-512 VNNI: 64 products of an unsigned and a signed byte per instruction, added without saturation.

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
  using Element = std::int8_t;
  using Sum = __m512i;
  using Values = __m512i;
  static constexpr int kRows = 6, kVecs = 4, kVecColumns = 16;  // 24 of the 32 registers hold sums

  static Sum start(std::int32_t number) { return _mm512_set1_epi32(number); }
  static Values load(const std::uint8_t* values) { return _mm512_loadu_si512(values); }
  static __m512i spread(const Element* row) {
    std::int32_t four;
    std::memcpy(&four, row, sizeof four);
    return _mm512_set1_epi32(four);
  }
  // Written out: of the intrinsic GCC 12 keeps two copies of every sum, which no longer fit the registers.
  static Sum add(Sum sum, Values values, __m512i row) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(values), "v"(row));
    return sum;
  }
  static void add_group(float* totals, Sum sum, float scale) {
    const __m512 part = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(scale));
    _mm512_storeu_ps(totals, _mm512_add_ps(_mm512_loadu_ps(totals), part));
  }
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
