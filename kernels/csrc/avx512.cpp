// AVX-512: one register is the 16 lanes; 8 x 3 sums of a tile fill 24 of the 32 registers.

#include "kernel.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

// GCC's own header makes its undefined registers look like uninitialised variables.
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

#include "tile.hpp"

namespace longgraft {
namespace {

struct Avx512 {
  using Vec = __m512;
  static constexpr int kWidth = 16;
  static constexpr int kTileRows = 8;
  static constexpr int kSums = 24;  // registers for sums

  static Vec zero() { return _mm512_setzero_ps(); }
  static Vec load(const float* from) { return _mm512_loadu_ps(from); }
  // Into a register: left to itself the compiler would load it again for every product.
  static Vec load_once(const float* from) {
    Vec value = _mm512_loadu_ps(from);
    __asm__("" : "+v"(value));
    return value;
  }
  static void store(float* to, Vec value) { _mm512_storeu_ps(to, value); }
  static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }

  // Half `half` of the block of 32 elements at `from`, widened.
  template <Dtype dtype>
  static Vec widen(const char* from, int half, int) {
    if constexpr (dtype == Dtype::f32) {
      return _mm512_loadu_ps(from + half * 64);
    } else if constexpr (dtype == Dtype::f16) {
      return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + half * 32)));
    } else if (half == 0) {
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(from), 16));
    } else {
      return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(0xaaaaaaaau, from));
    }
  }

  // Add up the lanes of 3 sums as the tree of order.hpp. Quarters of a register: a0 a1 a2 a3.
  static void add_lanes(const Vec (&lanes)[1][kColumns], float* sums, bool first) {
    const Vec a = lanes[0][0], b = lanes[0][1], c = lanes[0][2];
    // a02 a13 b20 b31, c02 c13 c20 c31
    const Vec ab = _mm512_add_ps(_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4(a, b, 0x4e));
    const Vec cc = _mm512_add_ps(c, _mm512_shuffle_f32x4(c, c, 0x4e));
    const __m512i swapped = _mm512_set_epi32(19, 18, 17, 16, 15, 14, 13, 12, 19, 18, 17, 16, 7, 6, 5, 4);
    // a c b c
    Vec all = _mm512_add_ps(_mm512_mask_blend_ps(0xf0f0, ab, cc), _mm512_permutex2var_ps(ab, swapped, cc));
    all = _mm512_add_ps(all, _mm512_permute_ps(all, 0x4e));
    all = _mm512_add_ps(all, _mm512_permute_ps(all, 0xb1));
    const __m512i firsts = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 8, 0);
    __m128 three = _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, all));
    if (!first) three = _mm_add_ps(_mm_maskz_loadu_ps(7, sums), three);
    _mm_mask_storeu_ps(sums, 7, three);
  }

  template <Dtype dtype>
  static Vec widen_bias(const void* bias, std::int64_t column) {
    if constexpr (dtype == Dtype::f32) {
      return _mm512_loadu_ps(static_cast<const float*>(bias) + column);
    } else {
      const __m256i half = _mm256_loadu_si256(
          reinterpret_cast<const __m256i*>(static_cast<const std::uint16_t*>(bias) + column));
      if constexpr (dtype == Dtype::f16) return _mm512_cvtph_ps(half);
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
  }

  template <Dtype dtype>
  static void store_rounded(void* y, std::int64_t index, Vec value) {
    if constexpr (dtype == Dtype::f32) {
      _mm512_storeu_ps(static_cast<float*>(y) + index, value);
    } else {
      __m256i half;
      if constexpr (dtype == Dtype::f16) {
        half = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      } else {
        const __m512i bits = _mm512_castps_si512(value);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        __m512i top = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        top = _mm512_srli_epi32(top, 16);
        const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
        half = _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(top, is_nan, _mm512_set1_epi32(0x7fc0)));
      }
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<std::uint16_t*>(y) + index), half);
    }
  }
};

}  // namespace

const Kernel avx512_kernel{"avx512", Avx512::kTileRows, pack<Avx512>, columns<Avx512>};

}  // namespace longgraft

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
namespace longgraft {
const Kernel avx512_kernel{nullptr, 0, nullptr, nullptr};
}
#endif
