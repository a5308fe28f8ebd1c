// One job: a part of the keys against a stripe's rows. Walks the blocks that rows share, then the tail, row by row.
// Included like attention_tile.hpp.
#pragma once

#include "attention_load.hpp"

namespace longgraft::attention {
namespace {

constexpr int kWideTiles = 3;  // from so many tiles on, values are widened once instead of per tile

template <class Isa, Dtype dtype>
struct Worker {
  const Context& c;
  const Problem& p;
  const Stripe& s;
  const Loader<Isa, dtype> load;
  Scratch scratch;
  Score<Isa> score;
  std::int64_t group, pairs, vecs;
  bool ragged;      // values do not fill their registers
  Ahead coming{};  // keys and values of the next block

  Worker(const Context& context, const Stripe& stripe, char* memory)
      : c(context), p(context.problem), s(stripe), load{c, p}, scratch(p, c.sizes, stripe, memory), score(p) {
    group = p.group();
    pairs = s.rows() * group;
    const int unit = dtype == Dtype::bf16 ? kBlock : kLanes;
    vecs = ceil_div(p.value_size, unit) * (unit / kLanes);
    ragged = p.value_size % unit != 0;
    __builtin_memset(scratch.zeros, 0, (c.sizes.key_floats + c.sizes.lanes) * sizeof(float));
  }

  void run(const Job& job) {
    const std::int64_t heads = job.head_last - job.head_first, parts = job.tail ? s.first_part + s.parts - job.part : 1;
    for (std::int64_t i = 0; i < parts * heads; ++i) c.sizes.clear(state(job, i), pairs);
    const std::int64_t begin = first_block(job), end = end_block(job);
    if (begin < end) find_next(begin, job.head_first);
    for (std::int64_t block = begin; block < end; block += kBlockKeys)
      for (std::int64_t h = 0; h < heads; ++h) {
        advance(job, block, h);
        shared_block(block, job.head_first + h, state(job, h));
      }
    for (std::int64_t h = 0; job.tail && h < heads; ++h) tail(job, h);
  }

  // The blocks of a job that rows share: all of its part, but what lies before every window or behind `edge`.
  static std::int64_t first_block(const Job& job) {
    const std::int64_t lowest = job.stripe->low_least / kBlockKeys * kBlockKeys, begin = job.part * kPartKeys;
    return lowest > begin ? lowest : begin;
  }
  static std::int64_t end_block(const Job& job) {
    const std::int64_t end = (job.part + 1) * kPartKeys;
    return end < job.stripe->edge ? end : job.stripe->edge;
  }

  State state(const Job& job, std::int64_t index) const {
    return c.sizes.state(job.states + index * c.sizes.state_floats(pairs), pairs);
  }
  const float* query(std::int64_t head) const { return c.query + (head * p.rows + s.first) * group * p.key_size; }

  // Turn to `block` of head `h` and find the block after it, which is fetched meanwhile.
  void advance(const Job& job, std::int64_t block, std::int64_t h) {
    const char** const old = scratch.now;
    scratch.now = scratch.next;
    scratch.next = old;
    if (job.head_first + h + 1 < job.head_last)
      find_next(block, job.head_first + h + 1);
    else if (block + kBlockKeys < end_block(job))
      find_next(block + kBlockKeys, job.head_first);
    else if (job.next && first_block(*job.next) < end_block(*job.next))
      find_next(first_block(*job.next), job.next->head_first);
    else
      coming = {};
  }

  void find_next(std::int64_t block, std::int64_t head) {
    load.locate(head, block, kBlockKeys, scratch.next, scratch.next + kBlockKeys);
    const std::int64_t size = p.key_size < p.value_size ? p.value_size : p.key_size;
    coming = {scratch.next, 2 * kBlockKeys, int(ceil_div(size * kBytes<dtype>, 64))};
  }

  bool widens() const { return ragged || pairs > kTileRows * (kWideTiles - 1); }

  // Logits of `rows` pairs from `first` on against the first `count` of the transposed keys.
  void all_logits(std::int64_t head, std::int64_t first, std::int64_t rows, std::int64_t count, float* to,
                  std::int64_t stride, const Ahead& ahead) {
    const std::int64_t tiles = ceil_div(rows, kTileRows);
    for (std::int64_t i = 0; i < tiles; ++i) {
      const std::int64_t row = rows * i / tiles;
      const float* q = query(head) + (first + row) * p.key_size;
      by_registers<Isa>(ceil_div(count, kLanes), [&](auto registers, std::int64_t vec) {
        logits<Isa, decltype(registers)::count>(int(rows * (i + 1) / tiles - row), q, p.key_size,
                                                scratch.keys + vec * kLanes, to + row * stride + vec * kLanes, stride,
                                                score, vec == 0 ? ahead.share(i, tiles) : Ahead{});
      });
    }
  }

  // Add the values that `rows` pairs weigh: a few registers of them at a time, so that values stay in L1.
  template <Dtype stored>
  void all_values(std::int64_t rows, const char* const* from, int count, float* sum, const Ahead& ahead) {
    const std::int64_t tiles = ceil_div(rows, kTileRows), lanes = c.sizes.lanes;
    const std::int64_t steps = tiles * ceil_div(vecs, Isa::kVecs);
    by_registers<Isa>(vecs, [&](auto registers, std::int64_t vec) {
      for (std::int64_t i = 0; i < tiles; ++i) {
        const std::int64_t row = rows * i / tiles;
        values<Isa, decltype(registers)::count, stored>(
            int(rows * (i + 1) / tiles - row), scratch.weights + row * kBlockKeys, from, count, vec, sum + row * lanes,
            lanes, scratch.scale + row, ahead.share(vec / Isa::kVecs * tiles + i, steps));
      }
    });
  }

  // From logits in scratch.weights to the state of pairs [first, first + rows).
  void weigh(State at, std::int64_t first, std::int64_t rows, const char* const* from, int count, const Ahead& ahead) {
    tile_weights<Isa>(int(rows), scratch.weights, at.top + first, at.mass + first, scratch.scale);
    float* const sum = at.sum + first * c.sizes.lanes;
    if (widens())
      all_values<Dtype::f32>(rows, from, count, sum, ahead);
    else
      all_values<dtype>(rows, from, count, sum, ahead);
  }

  void shared_block(std::int64_t begin, std::int64_t head, State at) {
    const char** const from = scratch.now + kBlockKeys;
    // What is fetched is spread by what takes how long: transposing 2, logits 1 and values 2 for each tile.
    const std::int64_t early = coming.rows * 2 / (2 + 3 * ceil_div(pairs, kTileRows));
    load.transpose(scratch.now, kBlockKeys, scratch.keys, coming.part(0, early));
    if (widens()) load.widen(from, kBlockKeys, scratch.wide);
    if (begin < s.low_most) return edge_block(begin, head, from, at);
    const Ahead rest = coming.part(early, coming.rows);
    for (std::int64_t first = 0; first < pairs; first += kBatchRows) {
      const std::int64_t rows = pairs - first < kBatchRows ? pairs - first : kBatchRows;
      const Ahead share = rest.share(first / kBatchRows, ceil_div(pairs, kBatchRows));
      all_logits(head, first, rows, kBlockKeys, scratch.weights, kBlockKeys, share.part(0, share.rows / 3));
      weigh(at, first, rows, from, kBlockKeys, share.part(share.rows / 3, share.rows));
    }
  }

  // A block where some row's window begins, or which lies before it.
  void edge_block(std::int64_t begin, std::int64_t head, const char* const* from, State at) {
    all_logits(head, 0, pairs, kBlockKeys, scratch.logits, scratch.logit_stride, {});
    std::int32_t slots[kBlockKeys];
    for (std::int64_t row = 0; row < s.rows(); ++row) {
      for (int j = 0; j < kBlockKeys; ++j) slots[j] = begin + j < s.low[row] ? -1 : j;
      row_block(row, slots, kBlockKeys, from, at);
    }
  }

  // A block of one row that lists its keys: slots[j] is the key at the block's position j, -1 none.
  void row_block(std::int64_t row, const std::int32_t* slots, int count, const char* const* from, State at) {
    bool any = false;
    int straight = 0;  // so many slots follow one another
    while (straight < count && slots[0] >= 0 && slots[straight] == slots[0] + straight) ++straight;
    for (int j = 0; j < count; ++j) {
      any |= slots[j] >= 0;
      scratch.row_values[j] = slots[j] < 0 ? scratch.zeros : from[slots[j]];
    }
    for (std::int64_t g = 0; any && g < group; g += kBatchRows) {
      const std::int64_t rows = group - g < kBatchRows ? group - g : kBatchRows, first = row * group + g;
      for (std::int64_t r = 0; r < rows; ++r) {
        const float* logit = scratch.logits + (first + r) * scratch.logit_stride;
        float* to = scratch.weights + r * kBlockKeys;
        __builtin_memcpy(to, logit + (straight ? slots[0] : 0), straight * sizeof(float));
        for (int j = straight; j < count; ++j) to[j] = slots[j] < 0 ? kNever : logit[slots[j]];
        for (int j = count; j < kBlockKeys; ++j) to[j] = kNever;
      }
      weigh(at, first, rows, scratch.row_values, count, {});
    }
  }

  // Keys from `edge` on: their products with all rows, then per row the blocks of those it sees.
  void tail(const Job& job, std::int64_t h) {
    tail_logits(job.head_first + h);
    const std::int64_t heads = job.head_last - job.head_first;
    for (std::int64_t row = 0; row < s.rows(); ++row)
      for (std::int64_t begin = 0; begin < s.slot_count[row]; begin += kBlockKeys) {
        const std::int64_t left = s.slot_count[row] - begin, part = (s.edge + begin) / kPartKeys - job.part;
        row_block(row, s.slots + row * s.slot_stride + begin, int(left < kBlockKeys ? left : kBlockKeys),
                  scratch.value_rows, state(job, part * heads + h));
      }
  }

  void tail_logits(std::int64_t head) {
    const char **const key_rows = scratch.key_rows, **const value_rows = scratch.value_rows;
    const std::int64_t keys = s.tail_keys(), cached = s.shared - s.edge;
    load.locate(head, s.edge, cached, key_rows, value_rows);
    for (std::int64_t i = 0; i < s.own_count; ++i)
      load.point(p.tree, head, s.own[i], 1, key_rows + cached + i, value_rows + cached + i);
    for (std::int64_t i = keys; i < scratch.logit_stride; ++i) key_rows[i] = scratch.zeros;
    for (std::int64_t begin = 0; begin < keys; begin += kBlockKeys) {
      const std::int64_t count = keys - begin < kBlockKeys ? keys - begin : kBlockKeys;
      load.transpose(key_rows + begin, count, scratch.keys, {});
      all_logits(head, 0, pairs, count, scratch.logits + begin, scratch.logit_stride, {});
    }
    if (widens()) load.widen(value_rows, keys, scratch.wide);
  }
};

}  // namespace
}  // namespace longgraft::attention
