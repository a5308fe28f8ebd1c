// AVX2 with FMA: a pair of registers is the 16 lanes; 6 rows x 1 pair of sums fill 12 of the 16 registers.

#include "attention_kernel.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

// Only what stands between these pragmas may use the wider instructions.
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "attention_isa.hpp"

namespace longgraft::attention {
namespace {

struct Avx2 {
  struct Vec {
    __m256 a, b;
  };
  static constexpr int kVecs = 1;

  static Vec all(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  static Vec load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
  static void store(float* to, Vec value) {
    _mm256_storeu_ps(to, value.a);
    _mm256_storeu_ps(to + 8, value.b);
  }
  static Vec add(Vec x, Vec y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  static Vec sub(Vec x, Vec y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
  static Vec mul(Vec x, Vec y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  static Vec div(Vec x, Vec y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
  static Vec max(Vec x, Vec y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
  static Vec fma(Vec x, Vec y, Vec z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
  static float first(Vec x) { return _mm256_cvtss_f32(x.a); }

  static float top(Vec x) {
    const __m256 eight = _mm256_max_ps(x.a, x.b);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }
  // Lanes added as a tree: i + 8, i + 4, i + 2, i + 1.
  static float total(Vec x) {
    const __m256 eight = _mm256_add_ps(x.a, x.b);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }

  // value * 2^n, where n is in the low bits of `shifted`.
  static __m256 times_power(__m256 value, __m256 shifted) {
    const __m256i power = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(value), power));
  }
  static Vec times_power(Vec value, Vec shifted) {
    return {times_power(value.a, shifted.a), times_power(value.b, shifted.b)};
  }
  static Vec zero_below(Vec value, Vec x, float limit) {
    const __m256 least = _mm256_set1_ps(limit);
    return {_mm256_and_ps(_mm256_cmp_ps(x.a, least, _CMP_NLT_UQ), value.a),
            _mm256_and_ps(_mm256_cmp_ps(x.b, least, _CMP_NLT_UQ), value.b)};
  }
  static Vec below(Vec x, float limit, Vec yes, Vec no) {
    const __m256 most = _mm256_set1_ps(limit);
    return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, most, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, most, _CMP_LT_OQ))};
  }
  static Vec magnitude(Vec x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
  }
  static Vec with_sign(Vec size, Vec x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_or_ps(size.a, _mm256_and_ps(sign, x.a)), _mm256_or_ps(size.b, _mm256_and_ps(sign, x.b))};
  }

  static __m256 low_half(__m256i words) { return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16)); }
  static __m256 high_half(__m256i words) {
    return _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(int(0xffff0000u))));
  }
  static __m128i eight_halves(const char* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
  static __m256i eight_words(const char* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }

  // 16 elements in their own order, widened.
  template <Dtype dtype>
  static Vec natural(const char* from) {
    if constexpr (dtype == Dtype::f32) return load(reinterpret_cast<const float*>(from));
    if constexpr (dtype == Dtype::f16)
      return {_mm256_cvtph_ps(eight_halves(from)), _mm256_cvtph_ps(eight_halves(from + 16))};
    return {low_half(_mm256_cvtepu16_epi32(eight_halves(from))),
            low_half(_mm256_cvtepu16_epi32(eight_halves(from + 16)))};
  }

  // Register `vec` of a row of values. bf16: two share 32 elements, the even and the odd ones.
  template <Dtype dtype>
  static Vec value(const char* row, std::int64_t vec) {
    if constexpr (dtype == Dtype::bf16) {
      const __m256i first = eight_words(row + (vec >> 1) * 64), second = eight_words(row + (vec >> 1) * 64 + 32);
      if (vec & 1) return {high_half(first), high_half(second)};
      return {low_half(first), low_half(second)};
    } else {
      return natural<dtype>(row + vec * (dtype == Dtype::f32 ? 64 : 32));
    }
  }

  // Round two registers of sums, in the order of `value`, to 32 elements.
  template <Dtype dtype>
  static void round(char* to, Vec x, Vec y) {
    if constexpr (dtype == Dtype::f32) {
      store(reinterpret_cast<float*>(to), x);
      store(reinterpret_cast<float*>(to) + 16, y);
    } else if constexpr (dtype == Dtype::f16) {
      const __m256 parts[4] = {x.a, x.b, y.a, y.b};
      for (int i = 0; i < 4; ++i)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + i, _mm256_cvtps_ph(parts[i], _MM_FROUND_TO_NEAREST_INT));
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), interleaved(x.a, y.a));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to) + 1, interleaved(x.b, y.b));
    }
  }
  static __m256i interleaved(__m256 even, __m256 odd) {
    const __m256i upper = _mm256_and_si256(rounded(odd), _mm256_set1_epi32(int(0xffff0000u)));
    return _mm256_or_si256(_mm256_srli_epi32(rounded(even), 16), upper);
  }
  // To nearest even in the upper 16 bits.
  static __m256i rounded(__m256 value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(sum, _mm256_set1_epi32(0x7fc00000), is_nan);
  }

  // to[e * 64 + i] = element e of the 64 bytes at rows[i] + offset, 16 rows.
  template <Dtype dtype>
  static void transpose(const char* const* rows, std::int64_t offset, float* to) {
    for (int half = 0; half < 2; ++half)
      for (int part = 0; part < 2; ++part)
        eight<dtype>(rows + half * 8, offset + part * 32, to + half * 8 + part * (32 / kBytes<dtype>) * kBlockKeys);
  }
  template <Dtype dtype>
  static void eight(const char* const* rows, std::int64_t offset, float* to) {
    __m256 a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) a[i] = _mm256_castsi256_ps(eight_words(rows[i] + offset));
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
      b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
      a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
      a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
      a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
      a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      put<dtype>(to, c, _mm256_castps_si256(_mm256_permute2f128_ps(a[c], a[c + 4], 0x20)));
      put<dtype>(to, c + 4, _mm256_castps_si256(_mm256_permute2f128_ps(a[c], a[c + 4], 0x31)));
    }
  }
  // Word `word` of 8 keys: one element, or two.
  template <Dtype dtype>
  static void put(float* to, int word, __m256i keys) {
    if constexpr (dtype == Dtype::f32) {
      _mm256_store_ps(to + word * kBlockKeys, _mm256_castsi256_ps(keys));
    } else {
      float* const even = to + 2 * word * kBlockKeys;
      if constexpr (dtype == Dtype::bf16) {
        _mm256_store_ps(even, low_half(keys));
        _mm256_store_ps(even + kBlockKeys, high_half(keys));
      } else {
        const __m256i low = _mm256_and_si256(keys, _mm256_set1_epi32(0xffff));
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, _mm256_srli_epi32(keys, 16)), 0xd8);
        _mm256_store_ps(even, _mm256_cvtph_ps(_mm256_castsi256_si128(packed)));
        _mm256_store_ps(even + kBlockKeys, _mm256_cvtph_ps(_mm256_extracti128_si256(packed, 1)));
      }
    }
  }
};

}  // namespace

const Kernel avx2_kernel = make_kernel<Avx2>("avx2");

}  // namespace longgraft::attention

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
namespace longgraft::attention {
const Kernel avx2_kernel{};
}
#endif
