// Functions of one register, the same bits in every instruction set. Included by attention_tile.hpp only.
#pragma once

#include "attention_kernel.hpp"

namespace longgraft::attention {
namespace {

// 2^x for x <= 0, to 8e-8; below -125 it is 0. Exact at 0.
template <class Isa>
inline typename Isa::Vec exp2(typename Isa::Vec x) {
  using Vec = typename Isa::Vec;
  const Vec magic = Isa::all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  const Vec shifted = Isa::add(x, magic), f = Isa::sub(x, Isa::sub(shifted, magic));
  Vec value = Isa::all(0.00015353361959569156f);
  value = Isa::fma(value, f, Isa::all(0.0013398873852565885f));
  value = Isa::fma(value, f, Isa::all(0.00961843691766262f));
  value = Isa::fma(value, f, Isa::all(0.055503323674201965f));
  value = Isa::fma(value, f, Isa::all(0.24022647738456726f));
  value = Isa::fma(value, f, Isa::all(0.6931471824645996f));
  value = Isa::fma(value, f, Isa::all(1.0f));
  return Isa::zero_below(Isa::times_power(value, shifted), x, -125.0f);
}

template <class Isa>
inline typename Isa::Vec tanh(typename Isa::Vec x) {
  using Vec = typename Isa::Vec;
  const Vec size = Isa::magnitude(x), z = Isa::mul(x, x);
  Vec small = Isa::all(-0.005905868485569954f);
  small = Isa::fma(small, z, Isa::all(0.02080538496375084f));
  small = Isa::fma(small, z, Isa::all(-0.053786683827638626f));
  small = Isa::fma(small, z, Isa::all(0.13331958651542664f));
  small = Isa::fma(small, z, Isa::all(-0.33333298563957214f));
  small = Isa::fma(Isa::mul(small, z), size, size);
  const Vec e = exp2<Isa>(Isa::mul(size, Isa::all(-2.885390043258667f)));
  const Vec large = Isa::div(Isa::sub(Isa::all(1.0f), e), Isa::add(Isa::all(1.0f), e));
  return Isa::with_sign(Isa::below(size, 0.6f, small, large), x);
}

// From a product q . k to a logit in powers of two.
template <class Isa>
struct Score {
  typename Isa::Vec inner, outer;
  bool capped;

  explicit Score(const Problem& problem) : capped(problem.softcap > 0) {
    const double log2e = 1.4426950408889634;
    inner = Isa::all(capped ? float(double(problem.scale) / problem.softcap) : float(problem.scale * log2e));
    outer = Isa::all(float(problem.softcap * log2e));
  }
  typename Isa::Vec operator()(typename Isa::Vec product) const {
    const typename Isa::Vec x = Isa::mul(product, inner);
    return capped ? Isa::mul(tanh<Isa>(x), outer) : x;
  }
};

}  // namespace
}  // namespace longgraft::attention
