// AVX2 with FMA: two registers hold the 16 lanes, 8 lanes to a pass; 4 x 3 sums of a pass fill 12 of the 16 registers.

#include "kernel.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

// Only what stands between these pragmas may use the wider instructions.
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "tile.hpp"

namespace longgraft {
namespace {

struct Avx2 {
  using Vec = __m256;
  static constexpr int kWidth = 8;
  static constexpr int kTileRows = 4;
  static constexpr int kSums = 12;  // registers for sums

  static Vec zero() { return _mm256_setzero_ps(); }
  static Vec load(const float* from) { return _mm256_loadu_ps(from); }
  // Into a register: left to itself the compiler would load it again for every product.
  static Vec load_once(const float* from) {
    Vec value = _mm256_loadu_ps(from);
    __asm__("" : "+x"(value));
    return value;
  }
  static void store(float* to, Vec value) { _mm256_storeu_ps(to, value); }
  static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

  // 8 of the 16 lanes (`pass` 0: the lower) of half `half` of the block of 32 elements at `from`, widened.
  template <Dtype dtype>
  static Vec widen(const char* from, int half, int pass) {
    if constexpr (dtype == Dtype::f32) {
      return _mm256_loadu_ps(reinterpret_cast<const float*>(from) + half * 16 + pass * 8);
    } else if constexpr (dtype == Dtype::f16) {
      return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + half * 32 + pass * 16)));
    } else {
      const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + pass * 32));
      if (half == 0) return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
      return _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(int(0xffff0000u))));
    }
  }

  // Add up the lanes of 3 sums as the tree of order.hpp.
  static void add_lanes(const Vec (&lanes)[2][kColumns], float* sums, bool first) {
    __m128 quad[4] = {_mm_setzero_ps(), _mm_setzero_ps(), _mm_setzero_ps(), _mm_setzero_ps()};
    for (int c = 0; c < kColumns; ++c) {
      const Vec eight = _mm256_add_ps(lanes[0][c], lanes[1][c]);
      quad[c] = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    }
    // Lanes 0+2 and 1+3 of two sums side by side, then the last addition for all at once.
    const __m128 ab = _mm_add_ps(_mm_movelh_ps(quad[0], quad[1]), _mm_movehl_ps(quad[1], quad[0]));
    const __m128 c = _mm_add_ps(_mm_movelh_ps(quad[2], quad[3]), _mm_movehl_ps(quad[3], quad[2]));
    __m128 three = _mm_add_ps(_mm_shuffle_ps(ab, c, 0x88), _mm_shuffle_ps(ab, c, 0xdd));
    const __m128i mask = _mm_set_epi32(0, -1, -1, -1);
    if (!first) three = _mm_add_ps(_mm_maskload_ps(sums, mask), three);
    _mm_maskstore_ps(sums, mask, three);
  }

  template <Dtype dtype>
  static Vec widen_bias(const void* bias, std::int64_t column) {
    if constexpr (dtype == Dtype::f32) {
      return _mm256_loadu_ps(static_cast<const float*>(bias) + column);
    } else {
      const __m128i half =
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const std::uint16_t*>(bias) + column));
      if constexpr (dtype == Dtype::f16) return _mm256_cvtph_ps(half);
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    }
  }

  template <Dtype dtype>
  static void store_rounded(void* y, std::int64_t index, Vec value) {
    if constexpr (dtype == Dtype::f32) {
      _mm256_storeu_ps(static_cast<float*>(y) + index, value);
    } else {
      __m128i half;
      if constexpr (dtype == Dtype::f16) {
        half = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      } else {
        const __m256i bits = _mm256_castps_si256(value);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        __m256i top = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
        const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
        top = _mm256_blendv_epi8(_mm256_srli_epi32(top, 16), _mm256_set1_epi32(0x7fc0), is_nan);
        half = _mm_packus_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
      }
      _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<std::uint16_t*>(y) + index), half);
    }
  }
};

}  // namespace

const Kernel avx2_kernel{"avx2", Avx2::kTileRows, pack<Avx2>, columns<Avx2>};

}  // namespace longgraft

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
namespace longgraft {
const Kernel avx2_kernel{nullptr, 0, nullptr, nullptr};
}
#endif
