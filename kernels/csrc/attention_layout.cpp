#include "attention_layout.hpp"

#include <algorithm>

namespace longgraft::attention {

Layout::Layout(const Problem& problem, std::int64_t prefix, std::int64_t first, std::int64_t last) {
  Stripe& s = stripe;
  s.first = first;
  s.last = last;
  // To later rows of a chain, the earlier ones are as good as cached.
  s.shared = prefix + (problem.mask || problem.tree.rows == 0 ? 0 : first);
  s.edge = s.shared / kBlockKeys * kBlockKeys;
  find_windows(problem);
  collect_own(problem);
  s.slot_stride = s.tail_keys();
  slots_.assign(s.rows() * s.slot_stride, -1);
  for (std::int64_t row = 0; row < s.rows(); ++row) list_row(problem, row);
  s.low = low_.data();
  s.own = own_.data();
  s.slots = slots_.data();
  s.slot_count = counts_.data();
  s.most_slots = *std::max_element(counts_.begin(), counts_.end());
  s.first_part = std::min(s.low_least, s.edge) / kPartKeys;
  s.parts = (s.edge + std::max<std::int64_t>(s.most_slots, 1) - 1) / kPartKeys - s.first_part + 1;
}

void Layout::find_windows(const Problem& problem) {
  low_.assign(stripe.rows(), 0);
  for (std::int64_t row = 0; problem.window > 0 && row < stripe.rows(); ++row)
    low_[row] = std::max<std::int64_t>(0, problem.positions[stripe.first + row] - problem.window + 1);
  stripe.low_least = *std::min_element(low_.begin(), low_.end());
  stripe.low_most = *std::max_element(low_.begin(), low_.end());
}

bool Layout::sees(const Problem& problem, std::int64_t row, std::int64_t key) const {
  return problem.mask ? problem.mask[row * problem.mask_row + key * problem.mask_column] != 0 : key <= row;
}

// Tree rows that some row of the stripe sees, and that are not among its shared keys.
void Layout::collect_own(const Problem& problem) {
  const std::int64_t begin = problem.mask ? 0 : stripe.first;
  const std::int64_t end = problem.mask ? problem.tree.rows : std::min(stripe.last, problem.tree.rows);
  for (std::int64_t key = begin; key < end; ++key)
    for (std::int64_t row = stripe.first; row < stripe.last; ++row)
      if (sees(problem, row, key)) {
        own_.push_back(std::int32_t(key));
        break;
      }
  stripe.own_count = std::int64_t(own_.size());
}

// A row's keys from `edge` on: cached ones, then its ancestors in order; -1 where its window has passed.
void Layout::list_row(const Problem& problem, std::int64_t row) {
  std::int32_t* const to = slots_.data() + row * stripe.slot_stride;
  const std::int64_t cached = stripe.shared - stripe.edge;
  std::int64_t count = 0;
  for (; count < cached; ++count)
    if (stripe.edge + count >= low_[row]) to[count] = std::int32_t(count);
  for (std::int64_t i = 0; i < stripe.own_count; ++i) {
    if (!sees(problem, stripe.first + row, own_[i])) continue;
    if (problem.window == 0 || problem.positions[own_[i]] >= low_[row]) to[count] = std::int32_t(cached + i);
    ++count;
  }
  counts_.push_back(std::int32_t(count));
}

std::vector<Layout> lay_out(const Problem& problem, std::int64_t prefix) {
  const std::int64_t count = ceil_div(problem.rows, kStripeRows);
  std::vector<Layout> stripes;
  stripes.reserve(count);
  for (std::int64_t i = 0; i < count; ++i)
    stripes.emplace_back(problem, prefix, problem.rows * i / count, problem.rows * (i + 1) / count);
  return stripes;
}

}  // namespace longgraft::attention
