// One job: a part of the keys against a stripe's rows. Walks the blocks, puts keys and values where the inner
// loops want them, and lays out the tail per row. Included like attention_tile.hpp.
#pragma once

#include "attention_tile.hpp"

namespace longgraft::attention {
namespace {

constexpr int kWideTiles = 3;              // from so many tiles on, values are widened once instead of per tile

template <class Isa, Dtype dtype>
struct Worker {
  static constexpr int kElements = dtype == Dtype::f32 ? 16 : 32;  // of a 64-byte line
  const Context& c;
  const Problem& p;
  const Stripe& s;
  Scratch scratch;
  Score<Isa> score;
  std::int64_t group, pairs, vecs;
  bool ragged;
  Ahead coming{};  // the next block

  Worker(const Context& context, const Stripe& stripe, char* memory)
      : c(context), p(context.problem), s(stripe), scratch(p, c.sizes, stripe, memory), score(p) {
    group = p.group();
    pairs = s.rows() * group;
    const int unit = dtype == Dtype::bf16 ? kBlock : kLanes;
    vecs = ceil_div(p.value_size, unit) * (unit / kLanes);
    ragged = p.value_size % unit != 0;
    __builtin_memset(const_cast<char*>(scratch.zeros), 0, (c.sizes.key_floats + c.sizes.lanes) * 4);
  }

  void run(const Job& job) {
    const std::int64_t heads = job.head_last - job.head_first, parts = job.tail ? s.first_part + s.parts - job.part : 1;
    for (std::int64_t i = 0; i < parts * heads; ++i) c.sizes.clear(state(job, i), pairs);
    const std::int64_t begin = first_block(job), end = end_block(job);
    if (begin < end) locate(job.head_first, begin, kBlockKeys, scratch.next, scratch.next + kBlockKeys);
    for (std::int64_t block = begin; block < end; block += kBlockKeys)
      for (std::int64_t h = 0; h < heads; ++h) {
        if (h + 1 < heads)
          advance(block, job.head_first + h + 1);
        else if (block + kBlockKeys < end)
          advance(block + kBlockKeys, job.head_first);
        else
          advance(job.next && first_block(*job.next) < end_block(*job.next) ? first_block(*job.next) : -1,
                  job.next ? job.next->head_first : 0);
        shared_block(block, job.head_first + h, state(job, h));
      }
    coming = {};
    if (job.tail)
      for (std::int64_t h = 0; h < heads; ++h) tail(job, h);
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

  const float* query(std::int64_t head) const {
    return c.query + (head * p.rows + s.first) * group * p.key_size;
  }

  // Addresses of keys and values at positions [begin, begin + count) of the stripe's shared keys.
  void locate(std::int64_t head, std::int64_t begin, std::int64_t count, const char** k, const char** v) {
    std::int64_t run = 0, done = 0;
    std::int64_t high = p.run_count;
    while (high - run > 1) {
      const std::int64_t middle = (run + high) / 2;
      (c.starts[middle] <= begin ? run : high) = middle;
    }
    for (; done < count && run < p.run_count; ++run) {
      const std::int64_t at = begin + done - c.starts[run], left = c.starts[run + 1] - begin - done;
      const std::int64_t now = left < count - done ? left : count - done;
      if (now > 0) point(p.runs[run], head, at, now, k + done, v + done), done += now;
    }
    if (done < count) point(p.tree, head, begin + done - c.starts[p.run_count], count - done, k + done, v + done);
  }

  // Turn to the next block, and find the one after it (-1: none), which is fetched meanwhile.
  void advance(std::int64_t begin, std::int64_t head) {
    swap(scratch.now, scratch.next);
    coming = {};
    if (begin < 0) return;
    locate(head, begin, kBlockKeys, scratch.next, scratch.next + kBlockKeys);
    const std::int64_t size = p.key_size < p.value_size ? p.value_size : p.key_size;
    coming = {scratch.next, 2 * kBlockKeys, int(ceil_div(size * kBytes<dtype>, 64))};
  }

  static void swap(const char**& a, const char**& b) {
    const char** const old = a;
    a = b;
    b = old;
  }

  void point(const Run& run, std::int64_t head, std::int64_t at, std::int64_t count, const char** k, const char** v) {
    const char* key = static_cast<const char*>(run.keys) + (at * run.key_row + head * run.key_head) * kBytes<dtype>;
    const char* value =
        static_cast<const char*>(run.values) + (at * run.value_row + head * run.value_head) * kBytes<dtype>;
    for (std::int64_t i = 0; i < count; ++i) {
      k[i] = key + i * run.key_row * kBytes<dtype>;
      v[i] = value + i * run.value_row * kBytes<dtype>;
    }
  }

  // scratch.keys[element, 64] = the `count` keys at `rows`, widened; there are addresses up to a multiple of 16.
  void transpose(const char* const* rows, std::int64_t count, const Ahead& ahead) {
    const std::int64_t steps = c.sizes.key_floats / kElements * (kBlockKeys / kLanes);
    for (std::int64_t d = 0, step = 0; d < p.key_size; d += kElements) {
      float* to = scratch.keys + d * kBlockKeys;
      for (std::int64_t key = 0; key < count; key += kLanes, ++step) {
        ahead.share(step, steps).fetch_all();
        if (p.key_size - d >= kElements)
          Isa::template transpose<dtype>(rows + key, d * kBytes<dtype>, to + key);
        else
          transpose_last(rows + key, d, to + key);
      }
    }
  }

  void transpose_last(const char* const* rows, std::int64_t d, float* to) {
    alignas(64) char lines[kLanes][64] = {};
    const char* filled[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      __builtin_memcpy(lines[i], rows[i] + d * kBytes<dtype>, (p.key_size - d) * kBytes<dtype>);
      filled[i] = lines[i];
    }
    Isa::template transpose<dtype>(filled, 0, to);
  }

  // Widen `count` values into scratch and let their addresses point there.
  void widen(const char** rows, std::int64_t count) {
    for (std::int64_t j = 0; j < count; ++j) {
      float* const to = scratch.wide + j * c.sizes.lanes;
      const char* row = rows[j];
      for (std::int64_t block = 0; block * kBlock < p.value_size; ++block) {
        alignas(64) char filled[kBlock * kBytes<dtype>] = {};
        const char* from = row + block * kBlock * kBytes<dtype>;
        const std::int64_t left = p.value_size - block * kBlock;
        if (left < kBlock) {
          __builtin_memcpy(filled, from, left * kBytes<dtype>);
          from = filled;
        }
        for (int half = 0; half < 2; ++half)
          Isa::store(to + block * kBlock + half * kLanes, Isa::template value<dtype>(from, half));
      }
      rows[j] = reinterpret_cast<const char*>(to);
    }
  }

  bool widens() const { return ragged || pairs > kTileRows * (kWideTiles - 1); }

  void tiles_values(const float* weights, std::int64_t rows, const char* const* from, int count, float* sum,
                    const Ahead& ahead) {
    if (widens())
      all_values<Dtype::f32>(weights, rows, from, count, sum, ahead);
    else
      all_values<dtype>(weights, rows, from, count, sum, ahead);
  }

  // All value elements of `rows` pairs: a few registers of them at a time, so that values stay in L1.
  template <Dtype stored>
  void all_values(const float* weights, std::int64_t rows, const char* const* from, int count, float* sum,
                  const Ahead& ahead) {
    const std::int64_t tiles = ceil_div(rows, kTileRows), lanes = c.sizes.lanes;
    const std::int64_t steps = tiles * ceil_div(vecs, Isa::kVecs);
    by_registers<Isa>(vecs, [&](auto registers, std::int64_t vec) {
      for (std::int64_t i = 0; i < tiles; ++i) {
        const std::int64_t row = rows * i / tiles;
        values<Isa, decltype(registers)::count, stored>(
            int(rows * (i + 1) / tiles - row), weights + row * kBlockKeys, from, count, vec, sum + row * lanes, lanes,
            scratch.scale + row, ahead.share(vec / Isa::kVecs * tiles + i, steps));
      }
    });
  }

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

  void weigh(State at, std::int64_t first, std::int64_t rows, const char* const* from, int count, const Ahead& ahead) {
    tile_weights<Isa>(int(rows), scratch.weights, at.top + first, at.mass + first, scratch.scale);
    tiles_values(scratch.weights, rows, from, count, at.sum + first * c.sizes.lanes, ahead);
  }

  void shared_block(std::int64_t begin, std::int64_t head, State at) {
    const char** const from = scratch.now + kBlockKeys;
    const std::int64_t tiles = ceil_div(pairs, kTileRows), early = coming.rows * 2 / (2 + 3 * tiles);
    transpose(scratch.now, kBlockKeys, coming.part(0, early));
    if (widens()) widen(from, kBlockKeys);
    if (begin < s.low_most) return edge_block(begin, head, at);
    const Ahead rest = coming.part(early, coming.rows);
    for (std::int64_t first = 0; first < pairs; first += kBatchRows) {
      const std::int64_t rows = pairs - first < kBatchRows ? pairs - first : kBatchRows;
      const Ahead share = rest.share(first / kBatchRows, ceil_div(pairs, kBatchRows));
      all_logits(head, first, rows, kBlockKeys, scratch.weights, kBlockKeys, share.part(0, share.rows / 3));
      weigh(at, first, rows, from, kBlockKeys, share.part(share.rows / 3, share.rows));
    }
  }

  // A block where some row's window begins, or which lies before it.
  void edge_block(std::int64_t begin, std::int64_t head, State at) {
    all_logits(head, 0, pairs, kBlockKeys, scratch.logits, scratch.logit_stride, {});
    const char* const* from = scratch.now + kBlockKeys;
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
    const std::int64_t head = job.head_first + h, keys = s.tail_keys(), cached = s.shared - s.edge;
    if (keys == 0) return;
    locate(head, s.edge, cached, scratch.key_rows, scratch.value_rows);
    for (std::int64_t i = 0; i < s.own_count; ++i) point(p.tree, head, s.own[i], 1, scratch.key_rows + cached + i, scratch.value_rows + cached + i);
    for (std::int64_t i = keys; i < scratch.logit_stride; ++i) scratch.key_rows[i] = scratch.zeros;
    for (std::int64_t begin = 0; begin < keys; begin += kBlockKeys) {
      const std::int64_t count = keys - begin < kBlockKeys ? keys - begin : kBlockKeys;
      transpose(scratch.key_rows + begin, count, {});
      all_logits(head, 0, pairs, count, scratch.logits + begin, scratch.logit_stride, {});
    }
    if (widens()) widen(scratch.value_rows, keys);
    const std::int64_t heads = job.head_last - job.head_first;
    for (std::int64_t row = 0; row < s.rows(); ++row) {
      const std::int32_t* slots = s.slots + row * s.slot_stride;
      for (std::int64_t begin = 0; begin < s.slot_count[row]; begin += kBlockKeys) {
        const std::int64_t left = s.slot_count[row] - begin, part = (s.edge + begin) / kPartKeys - job.part;
        row_block(row, slots + begin, int(left < kBlockKeys ? left : kBlockKeys), scratch.value_rows,
                  state(job, part * heads + h));
      }
    }
  }
};

}  // namespace
}  // namespace longgraft::attention
