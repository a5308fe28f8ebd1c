// What an attention kernel for one instruction set offers, and what it works from. Knows no thread.
#pragma once

#include "attention.hpp"

namespace longgraft::attention {

// Rows [first, last) of the tree, which go through the keys together. Keys before `edge` (a multiple of 64) are
// seen by all of them, but for the window; the tail behind it is laid out per row.
struct Stripe {
  std::int64_t first, last;
  std::int64_t shared;   // keys that come before any own key of these rows: prefix, and for a chain earlier rows
  std::int64_t edge;     // `shared` rounded down to whole blocks
  const std::int64_t* low;  // [rows] first position inside the row's window
  std::int64_t low_least, low_most;
  const std::int32_t* own;  // [own_count] tree rows whose keys some of these rows see
  std::int64_t own_count;
  const std::int32_t* slots;  // [rows, slot_stride]: index into the tail's keys, or -1, by position from `edge` on
  const std::int32_t* slot_count;  // [rows]
  std::int64_t slot_stride, most_slots;
  std::int64_t first_part, parts;  // parts on the grid that these rows meet

  std::int64_t rows() const { return last - first; }
  std::int64_t tail_keys() const { return shared - edge + own_count; }
};

// The state of an online softmax for M (row, head) pairs of one key head: a part, or what parts add up to.
struct State {
  float* top;   // [M] largest logit, in powers of two; -inf: nothing seen
  float* mass;  // [M]
  float* sum;   // [M, lanes]
};

// One part of a stripe for some key heads, and, if it is the stripe's last shared part, the tail.
struct Job {
  const Stripe* stripe;
  std::int64_t part;
  std::int64_t head_first, head_last;
  bool tail;
  const Job* next;  // probably this thread's next one, or null: fetched at the end of this one
  float* states;  // those of `part` for these heads; with a tail also of all later parts
};

// Sizes that follow from the problem.
struct Sizes {
  std::int64_t lanes;      // floats of one row of sums: value_size in whole registers
  std::int64_t key_floats;  // key_size filled up to whole tiles of the transposition

  explicit Sizes(const Problem& problem)
      : lanes(ceil_div(problem.value_size, kBlock) * kBlock), key_floats(ceil_div(problem.key_size, kBlock) * kBlock) {}
  std::int64_t state_floats(std::int64_t pairs) const { return ceil_div(pairs, 16) * 32 + pairs * lanes; }
  State state(float* at, std::int64_t pairs) const {
    const std::int64_t each = ceil_div(pairs, 16) * 16;
    return {at, at + each, at + 2 * each};
  }
  void clear(State state, std::int64_t pairs) const {
    for (std::int64_t i = 0; i < pairs; ++i) state.top[i] = -__builtin_inff(), state.mass[i] = 0.0f;
    std::memset(state.sum, 0, std::size_t(pairs * lanes) * sizeof(float));
  }
};

struct Context {
  const Problem& problem;
  const Sizes& sizes;
  const std::int64_t* starts;  // [run_count + 1] position of each run's first key
  float* query;                // [kv_heads, rows, group, key_size], widened
};

struct Kernel {
  const char* name;
  void (*pack)(const Context&, std::int64_t head);  // fill `query` for one key head
  void (*compute)(const Context&, const Job&, char* scratch);
  void (*merge)(const Context&, State total, State part, std::int64_t pairs);
  void (*finish)(const Context&, const Stripe&, std::int64_t head, State total);
};

constexpr int kBatchRows = 8 * kTileRows;  // pairs whose logits are held before their values are added

// A thread's scratch, cut up.
struct Scratch {
  float *keys, *wide, *weights, *logits, *scale;
  const char **key_rows, **value_rows, **row_values, **now, **next;
  char* zeros;
  std::int64_t logit_stride, bytes;

  Scratch(const Problem& problem, const Sizes& sizes, const Stripe& s, char* at) {
    std::uintptr_t end = reinterpret_cast<std::uintptr_t>(at);
    const std::int64_t most = s.tail_keys() > kBlockKeys ? s.tail_keys() : kBlockKeys;
    logit_stride = ceil_div(most, kBlockKeys) * kBlockKeys;
    const auto take = [&end](std::int64_t size) {
      char* const here = reinterpret_cast<char*>(end);
      end += std::uintptr_t(ceil_div(size, 64) * 64);
      return here;
    };
    const auto floats = [&](std::int64_t count) { return reinterpret_cast<float*>(take(count * 4)); };
    const auto pointers = [&](std::int64_t count) { return reinterpret_cast<const char**>(take(count * 8)); };
    keys = floats(sizes.key_floats * kBlockKeys);
    wide = floats(most * sizes.lanes);
    weights = floats(kBatchRows * kBlockKeys);
    logits = floats(s.rows() * problem.group() * logit_stride);
    scale = floats(kBatchRows);
    key_rows = pointers(logit_stride);
    value_rows = pointers(logit_stride);
    row_values = pointers(kBlockKeys);
    now = pointers(2 * kBlockKeys);
    next = pointers(2 * kBlockKeys);
    zeros = take((sizes.key_floats + sizes.lanes) * 4);
    bytes = std::int64_t(end - reinterpret_cast<std::uintptr_t>(at));
  }
};

extern const Kernel plain_kernel;
extern const Kernel avx2_kernel;
extern const Kernel avx512_kernel;

}  // namespace longgraft::attention
