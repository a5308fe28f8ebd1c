// Finds a stripe's keys and values in the cache and puts them where the inner loops want them. Included like
// attention_tile.hpp.
#pragma once

#include "attention_tile.hpp"

namespace longgraft::attention {
namespace {

template <class Isa, Dtype dtype>
struct Loader {
  static constexpr int kElements = dtype == Dtype::f32 ? 16 : 32;  // of a 64-byte line
  const Context& c;
  const Problem& p;

  // Addresses of the keys and values of `count` rows of a run.
  void point(const Run& run, std::int64_t head, std::int64_t at, std::int64_t count, const char** keys,
             const char** values) const {
    const char* key = static_cast<const char*>(run.keys) + (at * run.key_row + head * run.key_head) * kBytes<dtype>;
    const char* value =
        static_cast<const char*>(run.values) + (at * run.value_row + head * run.value_head) * kBytes<dtype>;
    for (std::int64_t i = 0; i < count; ++i) {
      keys[i] = key + i * run.key_row * kBytes<dtype>;
      values[i] = value + i * run.value_row * kBytes<dtype>;
    }
  }

  // The same for positions [begin, begin + count); behind the cached runs come the tree's rows.
  void locate(std::int64_t head, std::int64_t begin, std::int64_t count, const char** keys, const char** values) const {
    std::int64_t run = 0, high = p.run_count, done = 0;
    while (high - run > 1) {
      const std::int64_t middle = (run + high) / 2;
      (c.starts[middle] <= begin ? run : high) = middle;
    }
    for (; done < count && run < p.run_count; ++run) {
      const std::int64_t left = c.starts[run + 1] - begin - done, now = left < count - done ? left : count - done;
      if (now <= 0) continue;
      point(p.runs[run], head, begin + done - c.starts[run], now, keys + done, values + done);
      done += now;
    }
    if (done < count)
      point(p.tree, head, begin + done - c.starts[p.run_count], count - done, keys + done, values + done);
  }

  // to[element, 64] = the `count` keys at `rows`, widened; there are addresses up to a multiple of 16.
  void transpose(const char* const* rows, std::int64_t count, float* to, const Ahead& ahead) const {
    const std::int64_t steps = c.sizes.key_floats / kElements * (kBlockKeys / kLanes);
    for (std::int64_t d = 0, step = 0; d < p.key_size; d += kElements, to += kElements * kBlockKeys)
      for (std::int64_t key = 0; key < count; key += kLanes, ++step) {
        ahead.share(step, steps).fetch_all();
        if (p.key_size - d >= kElements)
          Isa::template transpose<dtype>(rows + key, d * kBytes<dtype>, to + key);
        else
          transpose_last(rows + key, d, to + key);
      }
  }

  // The elements from `d` on, fewer than a line.
  void transpose_last(const char* const* rows, std::int64_t d, float* to) const {
    alignas(64) char lines[kLanes][64] = {};
    const char* filled[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      __builtin_memcpy(lines[i], rows[i] + d * kBytes<dtype>, (p.key_size - d) * kBytes<dtype>);
      filled[i] = lines[i];
    }
    Isa::template transpose<dtype>(filled, 0, to);
  }

  // Widen `count` rows of values to `to` and let their addresses point there.
  void widen(const char** rows, std::int64_t count, float* to) const {
    for (std::int64_t j = 0; j < count; ++j, to += c.sizes.lanes) {
      for (std::int64_t e = 0; e < p.value_size; e += kBlock) {
        const char* from = rows[j] + e * kBytes<dtype>;
        if (p.value_size - e >= kBlock) {
          widen_block(from, to + e);
        } else {
          alignas(64) char filled[kBlock * kBytes<dtype>] = {};
          __builtin_memcpy(filled, from, (p.value_size - e) * kBytes<dtype>);
          widen_block(filled, to + e);
        }
      }
      rows[j] = reinterpret_cast<const char*>(to);
    }
  }

  static void widen_block(const char* from, float* to) {
    Isa::store(to, Isa::template value<dtype>(from, 0));
    Isa::store(to + kLanes, Isa::template value<dtype>(from, 1));
  }
};

}  // namespace
}  // namespace longgraft::attention
