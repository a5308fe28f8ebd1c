// A kernel from an instruction set: what attention_kernel.hpp asks for. Included like attention_tile.hpp.
#pragma once

#include "attention_job.hpp"

namespace longgraft::attention {
namespace {

template <class Isa, Dtype dtype>
inline void pack_as(const Context& c, std::int64_t head) {
  const Problem& p = c.problem;
  const std::int64_t group = p.group(), whole = p.key_size / kLanes * kLanes;
  float* to = c.query + head * p.rows * group * p.key_size;
  for (std::int64_t row = 0; row < p.rows; ++row)
    for (std::int64_t g = 0; g < group; ++g, to += p.key_size) {
      const std::int64_t at = row * p.query_row + (head * group + g) * p.query_head;
      const char* from = static_cast<const char*>(p.query) + at * kBytes<dtype>;
      for (std::int64_t d = 0; d < whole; d += kLanes)
        Isa::store(to + d, Isa::template natural<dtype>(from + d * kBytes<dtype>));
      for (std::int64_t d = whole; d < p.key_size; ++d) to[d] = load_element(p.query, at + d, dtype);
    }
}

template <class Isa, Dtype dtype>
inline void compute_as(const Context& c, const Job& job, char* scratch) {
  Worker<Isa, dtype>(c, *job.stripe, scratch).run(job);
}

template <class Isa, Dtype dtype>
inline void finish_as(const Context& c, const Stripe& s, std::int64_t head, State total) {
  const Problem& p = c.problem;
  const std::int64_t group = p.group();
  for (std::int64_t row = 0; row < s.rows(); ++row)
    for (std::int64_t g = 0; g < group; ++g) {
      const std::int64_t pair = row * group + g;
      float mass = total.mass[pair], shrink = 1.0f;
      if (p.sinks && mass > 0.0f) {
        const float sink = load_element(p.sinks, head * group + g, p.sink_dtype) * 1.44269504f;
        const float top = sink > total.top[pair] ? sink : total.top[pair];
        shrink = Isa::first(exp2<Isa>(Isa::all(total.top[pair] - top)));
        mass = __builtin_fmaf(mass, shrink, Isa::first(exp2<Isa>(Isa::all(sink - top))));
      }
      const typename Isa::Vec inverse = Isa::all(mass == 0.0f ? 0.0f : shrink / mass);
      char* out = static_cast<char*>(p.out) +
                  ((s.first + row) * p.heads + head * group + g) * p.value_size * kBytes<dtype>;
      const float* sum = total.sum + pair * c.sizes.lanes;
      for (std::int64_t d = 0; d < p.value_size; d += kBlock) {
        alignas(64) char rounded[kBlock * kBytes<dtype>];
        const std::int64_t left = p.value_size - d;
        char* to = left < kBlock ? rounded : out + d * kBytes<dtype>;
        Isa::template round<dtype>(to, Isa::mul(Isa::load(sum + d), inverse),
                                   Isa::mul(Isa::load(sum + d + kLanes), inverse));
        if (left < kBlock) __builtin_memcpy(out + d * kBytes<dtype>, rounded, left * kBytes<dtype>);
      }
    }
}

template <class Isa>
void pack(const Context& c, std::int64_t head) {
  switch (c.problem.dtype) {
    case Dtype::f32: return pack_as<Isa, Dtype::f32>(c, head);
    case Dtype::bf16: return pack_as<Isa, Dtype::bf16>(c, head);
    case Dtype::f16: return pack_as<Isa, Dtype::f16>(c, head);
  }
}

template <class Isa>
void compute(const Context& c, const Job& job, char* scratch) {
  switch (c.problem.dtype) {
    case Dtype::f32: return compute_as<Isa, Dtype::f32>(c, job, scratch);
    case Dtype::bf16: return compute_as<Isa, Dtype::bf16>(c, job, scratch);
    case Dtype::f16: return compute_as<Isa, Dtype::f16>(c, job, scratch);
  }
}

// total = total and then part. A side that saw nothing leaves the other as it is.
template <class Isa>
void merge(const Context& c, State total, State part, std::int64_t pairs) {
  const std::int64_t lanes = c.sizes.lanes;
  for (std::int64_t i = 0; i < pairs; ++i) {
    if (part.top[i] == kNever) continue;
    const float before = total.top[i], top = part.top[i] > before ? part.top[i] : before;
    const auto old = exp2<Isa>(Isa::all(before - top)), fresh = exp2<Isa>(Isa::all(part.top[i] - top));
    total.top[i] = top;
    total.mass[i] = __builtin_fmaf(total.mass[i], Isa::first(old), part.mass[i] * Isa::first(fresh));
    float* to = total.sum + i * lanes;
    const float* from = part.sum + i * lanes;
    for (std::int64_t d = 0; d < lanes; d += kLanes)
      Isa::store(to + d, Isa::fma(Isa::load(to + d), old, Isa::mul(Isa::load(from + d), fresh)));
  }
}

template <class Isa>
void finish(const Context& c, const Stripe& s, std::int64_t head, State total) {
  switch (c.problem.dtype) {
    case Dtype::f32: return finish_as<Isa, Dtype::f32>(c, s, head, total);
    case Dtype::bf16: return finish_as<Isa, Dtype::bf16>(c, s, head, total);
    case Dtype::f16: return finish_as<Isa, Dtype::f16>(c, s, head, total);
  }
}

template <class Isa>
constexpr Kernel make_kernel(const char* name) {
  return {name, pack<Isa>, compute<Isa>, merge<Isa>, finish<Isa>};
}

}  // namespace
}  // namespace longgraft::attention
