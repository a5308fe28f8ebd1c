// Attention of a tree's rows over cached keys: the problem, and the arithmetic of one row, fixed once.
// Knows no instruction set, no thread and no Python.
//
// What a row gets is a function of its query and of its keys in order of position, nothing else: not of how many
// rows there are, where the row stands, where cached keys end and the rows' own begin, or how the cache is cut.
//   * Keys lie on a fixed grid of positions: blocks of 64, parts of 512 (8 blocks).
//   * logit = q . k, by fused multiply-add in order of the key's elements, times one constant (or through tanh).
//   * A part is an online softmax over its blocks: block maximum, exp2, sum of the weights as 4 x 16 lanes added
//     as a tree, values added by fused multiply-add in order of the keys, the state rescaled once per block.
//   * Parts are merged in order, then the sink; the result is rounded once.
// A key that a row does not see has weight 0 exactly, and another row's values are never multiplied with it.
#pragma once

#include "order.hpp"

namespace longgraft::attention {

constexpr int kBlockKeys = 64;
constexpr std::int64_t kPartKeys = 512;
constexpr std::int64_t kStripeRows = 64;  // rows that go through the keys together
constexpr int kTileRows = 6;              // (row, head) pairs in registers at a time

// Neighbouring keys [rows, heads, key size] and values; strides in elements, the last dimension contiguous.
struct Run {
  const void *keys, *values;
  std::int64_t rows, key_row, key_head, value_row, value_head;
};

// `mask` null: a causal chain. `positions` matter with a window only. `softcap` and `window` 0: none.
struct Problem {
  Dtype dtype;
  std::int64_t rows, heads, kv_heads, key_size, value_size;
  const void* query;
  std::int64_t query_row, query_head;
  void* out;  // [rows, heads, value_size], contiguous
  const Run* runs;
  std::int64_t run_count;
  Run tree;  // the rows' own keys; `rows` of it 0 where they are the prefix's last
  const std::uint8_t* mask;
  std::int64_t mask_row, mask_column;
  const std::int64_t* positions;
  const void* sinks;  // [heads] or null
  Dtype sink_dtype;
  float scale, softcap;
  std::int64_t window;

  std::int64_t group() const { return heads / kv_heads; }
};

// Compute `problem` with kernel `name` ("avx512", "avx2", "plain") on at most `threads` threads.
// False: there is no such kernel here. Throws std::bad_alloc.
bool attend(const char* name, const Problem& problem, int threads);

}  // namespace longgraft::attention
