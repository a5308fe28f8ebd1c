// AVX-512 VNNI: 64 products of an unsigned and a signed byte per instruction, added without saturation.

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
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,prefer-vector-width=512")
#endif

#include "int4_tile.hpp"
#include "int8_tile.hpp"

namespace longgraft::packed {
namespace {

struct Vnni {
  using Element = std::int8_t;
  using Sum = __m512i;
  using Floats = __m512;
  static constexpr int kRows = 6, kVecs = 4, kVecColumns = 16;  // 24 of the 32 registers hold sums

  static Sum start(std::int32_t number) { return _mm512_set1_epi32(number); }
  static __m512i load(const std::uint8_t* values) { return _mm512_loadu_si512(values); }
  static __m512i low(const std::uint8_t* values) { return _mm512_and_si512(load(values), _mm512_set1_epi8(15)); }
  static __m512i high(const std::uint8_t* values) {
    return _mm512_and_si512(_mm512_srli_epi16(load(values), 4), _mm512_set1_epi8(15));
  }
  static __m512i spread(const Element* row) {
    std::int32_t four;
    std::memcpy(&four, row, sizeof four);
    return _mm512_set1_epi32(four);
  }
  // Written out: of the intrinsic GCC 12 keeps two copies of every sum, which no longer fit the registers.
  static Sum add(Sum sum, __m512i values, __m512i row) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(values), "v"(row));
    return sum;
  }
  static Floats floats(const float* at) { return _mm512_loadu_ps(at); }
  static Floats whole(Sum sum) { return _mm512_cvtepi32_ps(sum); }
  static Floats bfloats(const std::uint8_t* values) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
  static void add_group(float* totals, Floats part, float scale) {
    _mm512_storeu_ps(totals, _mm512_add_ps(floats(totals), _mm512_mul_ps(part, _mm512_set1_ps(scale))));
  }
  static void add_block(float* part, Floats sum, Floats d, Floats m, float x) {
    _mm512_storeu_ps(part, _mm512_fmadd_ps(_mm512_set1_ps(x), m, _mm512_fmadd_ps(sum, d, floats(part))));
  }
};

}  // namespace

}  // namespace longgraft::packed

namespace longgraft {
const packed::Kernel int4::vnni_kernel = packed::kernel_of<packed::Vnni, int4::Form>("vnni");
const packed::Kernel int8::vnni_kernel = packed::kernel_of<packed::Vnni, int8::Form>("vnni");
}  // namespace longgraft

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
namespace longgraft {
const packed::Kernel int4::vnni_kernel{};
const packed::Kernel int8::vnni_kernel{};
}  // namespace longgraft
#endif
