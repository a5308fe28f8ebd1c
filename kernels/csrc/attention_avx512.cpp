// AVX-512: 6 rows x 4 registers of sums fill 24 of the 32 registers.

#include "attention_kernel.hpp"

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

#include "attention_isa.hpp"

namespace longgraft::attention {
namespace {

struct Avx512 {
  using Vec = __m512;
  static constexpr int kVecs = 4;

  static Vec all(float value) { return _mm512_set1_ps(value); }
  static Vec load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, Vec value) { _mm512_storeu_ps(to, value); }
  static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
  static Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static float first(Vec a) { return _mm512_cvtss_f32(a); }
  static float top(Vec a) { return _mm512_reduce_max_ps(a); }

  // Lanes added as a tree: i + 8, i + 4, i + 2, i + 1.
  static float total(Vec a) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }

  // value * 2^n, where n is in the low bits of `shifted`.
  static Vec times_power(Vec value, Vec shifted) {
    const __m512i power = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(value), power));
  }
  static Vec zero_below(Vec value, Vec x, float limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, all(limit), _CMP_NLT_UQ), value);
  }
  static Vec below(Vec x, float limit, Vec yes, Vec no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, all(limit), _CMP_LT_OQ), no, yes);
  }
  static Vec magnitude(Vec x) { return _mm512_andnot_ps(all(-0.0f), x); }
  static Vec with_sign(Vec size, Vec x) { return _mm512_or_ps(size, _mm512_and_ps(all(-0.0f), x)); }

  static __m512i low_half(__m512i words) { return _mm512_slli_epi32(words, 16); }
  static __m512i high_half(__m512i words) { return _mm512_and_si512(words, _mm512_set1_epi32(int(0xffff0000u))); }

  // 16 elements in their own order, widened.
  template <Dtype dtype>
  static Vec natural(const char* from) {
    if constexpr (dtype == Dtype::f32) {
      return _mm512_loadu_ps(from);
    } else {
      const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      if constexpr (dtype == Dtype::f16) return _mm512_cvtph_ps(half);
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
  }

  // Register `vec` of a row of values. bf16: two registers share 32 elements, the even and the odd ones.
  template <Dtype dtype>
  static Vec value(const char* row, std::int64_t vec) {
    if constexpr (dtype == Dtype::bf16) {
      const __m512i words = _mm512_loadu_si512(row + (vec >> 1) * 64);
      return _mm512_castsi512_ps(vec & 1 ? high_half(words) : low_half(words));
    } else {
      return natural<dtype>(row + vec * (dtype == Dtype::f32 ? 64 : 32));
    }
  }

  // Round two registers of sums, in the order of `value`, to 32 elements.
  template <Dtype dtype>
  static void round(char* to, Vec a, Vec b) {
    if constexpr (dtype == Dtype::f32) {
      _mm512_storeu_ps(to, a);
      _mm512_storeu_ps(to + 64, b);
    } else if constexpr (dtype == Dtype::f16) {
      constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
      const __m512i low = _mm512_castsi256_si512(_mm512_cvtps_ph(a, nearest));
      _mm512_storeu_si512(to, _mm512_inserti64x4(low, _mm512_cvtps_ph(b, nearest), 1));
    } else {
      const __m512i even = _mm512_srli_epi32(rounded(a), 16);
      _mm512_storeu_si512(to, _mm512_or_si512(even, high_half(rounded(b))));
    }
  }
  // To nearest even in the upper 16 bits.
  static __m512i rounded(Vec value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(sum, is_nan, _mm512_set1_epi32(0x7fc00000));
  }

  // to[e * 64 + i] = element e of the 64 bytes at rows[i] + offset, 16 rows.
  template <Dtype dtype>
  static void transpose(const char* const* rows, std::int64_t offset, float* to) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i] + offset);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
      b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
      a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
      a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
      a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
      a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      const __m512i even = _mm512_shuffle_i32x4(a[c], a[c + 4], 0x88), odd = _mm512_shuffle_i32x4(a[c], a[c + 4], 0xdd);
      const __m512i even2 = _mm512_shuffle_i32x4(a[c + 8], a[c + 12], 0x88);
      const __m512i odd2 = _mm512_shuffle_i32x4(a[c + 8], a[c + 12], 0xdd);
      put<dtype>(to, c, _mm512_shuffle_i32x4(even, even2, 0x88));
      put<dtype>(to, c + 4, _mm512_shuffle_i32x4(odd, odd2, 0x88));
      put<dtype>(to, c + 8, _mm512_shuffle_i32x4(even, even2, 0xdd));
      put<dtype>(to, c + 12, _mm512_shuffle_i32x4(odd, odd2, 0xdd));
    }
  }
  // Word `word` of 16 keys: one element, or two.
  template <Dtype dtype>
  static void put(float* to, int word, __m512i keys) {
    if constexpr (dtype == Dtype::f32) {
      _mm512_store_ps(to + word * kBlockKeys, _mm512_castsi512_ps(keys));
    } else {
      float* const even = to + 2 * word * kBlockKeys;
      if constexpr (dtype == Dtype::bf16) {
        _mm512_store_ps(even, _mm512_castsi512_ps(low_half(keys)));
        _mm512_store_ps(even + kBlockKeys, _mm512_castsi512_ps(high_half(keys)));
      } else {
        _mm512_store_ps(even, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(keys)));
        _mm512_store_ps(even + kBlockKeys, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(keys, 16))));
      }
    }
  }
};

}  // namespace

const Kernel avx512_kernel = make_kernel<Avx512>("avx512");

}  // namespace longgraft::attention

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
namespace longgraft::attention {
const Kernel avx512_kernel{};
}
#endif
