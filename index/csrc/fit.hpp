// Fits weight tables to recorded lists: Adagrad on the conditional log-likelihood. Host only.
//
// A record: number of options, which of them came (-1: none), number of "none" entries, those entries; then for
// each option its number of entries and the entries.
#pragma once
#include "learnt.hpp"

namespace longgraft {

inline void record(const List& list, const std::vector<Recent>& recents, int32_t token, std::vector<int16_t>& out) {
  int32_t came = -1, n = (int32_t)list.options.size();
  for (int32_t i = 0; i < n; ++i)
    if (list.options[i].token == token) came = i;
  for (size_t k = 0; k < list.recent.size(); ++k)
    if (recents[list.recent[k]].token == token) came = n + (int32_t)k;
  out.push_back((int16_t)(n + (int32_t)list.recent.size()));
  out.push_back((int16_t)came);
  out.push_back((int16_t)list.num_none);
  out.insert(out.end(), list.none, list.none + list.num_none);
  for (const Listed& o : list.options) {
    out.push_back((int16_t)o.n);
    out.insert(out.end(), o.features, o.features + o.n);
  }
  for (int32_t i : list.recent)
    out.insert(out.end(), {3, recents[i].rank, recent_classes(list.last_class, recents[i]), list.recent_match});
}

// Is this a whole number of records, with entries that there are?
inline bool are_records(const int16_t* r, int64_t length) {
  auto are_entries = [r, length](int64_t at, int32_t n) {
    if (n < 0 || at + n > length) return false;
    for (int64_t i = at; i < at + n; ++i)
      if (r[i] < 0 || r[i] >= kNumWeights) return false;
    return true;
  };
  for (int64_t i = 0; i < length;) {
    if (i + 3 > length || r[i] < 0 || r[i + 1] < -1 || r[i + 1] >= r[i] || !are_entries(i + 3, r[i + 2])) return false;
    int64_t at = i + 3 + r[i + 2];
    for (int32_t k = 0; k < r[i]; ++k) {
      if (at >= length || !are_entries(at + 1, r[at])) return false;
      at += 1 + r[at];
    }
    i = at;
  }
  return true;
}

class Fit {
 public:
  std::vector<double> weights;
  Fit(std::vector<double> start, double rate, double ridge)
      : weights(std::move(start)), squares_(weights.size(), 1e-2), is_held_(weights.size(), 0), rate_(rate), ridge_(ridge) {}

  // Weights that are held stay as they are. `flags` [kNumWeights]
  void hold(const uint8_t* flags) { is_held_.assign(flags, flags + weights.size()); }

  // One pass over records in a shuffled order; returns the mean loss in nats. `seed` decides the order.
  double pass(const int16_t* records, int64_t length, uint64_t seed) {
    std::vector<int64_t> offsets;
    for (int64_t i = 0; i < length;) {
      offsets.push_back(i);
      int64_t at = i + 3 + records[i + 2];
      for (int32_t k = 0; k < records[i]; ++k) at += 1 + records[at];
      i = at;
    }
    for (size_t i = offsets.size(); i > 1; --i) {
      seed = seed * 6364136223846793005ull + 1442695040888963407ull;
      std::swap(offsets[i - 1], offsets[(seed >> 33) % i]);
    }
    double loss = 0.0;
    for (int64_t at : offsets) loss += learn(records + at);
    return offsets.empty() ? 0.0 : loss / (double)offsets.size();
  }

 private:
  std::vector<double> squares_;
  std::vector<uint8_t> is_held_;
  double rate_, ridge_;
  std::vector<double> p_;

  double sum(const int16_t* at, int32_t n) const {
    double z = 0.0;
    for (int32_t i = 0; i < n; ++i) z += weights[at[i]];
    return z;
  }

  void step(const int16_t* at, int32_t n, double slope) {
    for (int32_t i = 0; i < n; ++i) {
      if (is_held_[at[i]]) continue;
      double g = slope + ridge_ * weights[at[i]];
      squares_[at[i]] += g * g;
      weights[at[i]] -= rate_ * g / std::sqrt(squares_[at[i]]);
    }
  }

  double learn(const int16_t* r) {
    int32_t n = r[0], came = r[1], num_none = r[2];
    const int16_t* none = r + 3;
    double rest = sum(none, num_none), most = rest;
    p_.resize(n);
    const int16_t* at = none + num_none;
    for (int32_t k = 0; k < n; at += 1 + at[0], ++k) most = std::max(most, p_[k] = sum(at + 1, at[0]));
    double total = rest = std::exp(rest - most);
    for (double& p : p_) total += p = std::exp(p - most);
    rest /= total;
    for (double& p : p_) p /= total;
    step(none, num_none, rest - (came < 0));
    at = none + num_none;
    for (int32_t k = 0; k < n; at += 1 + at[0], ++k)
      if (double slope = p_[k] - (k == came); std::fabs(slope) > 1e-4) step(at + 1, at[0], slope);
    return -std::log(std::max(1e-9, came < 0 ? rest : p_[came]));
  }
};

}  // namespace longgraft
