// AVX-512: the plain loops, compiled for it.

#include <cmath>

#include "norm.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

// Only what stands between these pragmas may use the wider instructions.
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#include "norm_tile.hpp"

namespace longgraft::rms {
namespace {

struct Avx512 {
  static void widen(const std::uint16_t* from, float* to) {
    for (int i = 0; i < kBlockSize; i += 8)
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
  static void narrow(const float* from, std::uint16_t* to) {
    for (int i = 0; i < kBlockSize; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
  }
};

}  // namespace

const Kernel avx512_kernel = kernel_of<Avx512>("avx512");

}  // namespace longgraft::rms

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
namespace longgraft::rms {
const Kernel avx512_kernel{nullptr, nullptr};
}
#endif
