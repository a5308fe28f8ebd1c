// The conditional logit: additive weight tables that score a list and learn from what came. Host only.
#pragma once
#include "listing.hpp"

namespace longgraft {

inline int16_t recent_classes(int32_t last_class, const Recent& r) {
  return (int16_t)(table_base(kRecentClasses) + last_class * kNumClasses + r.own_class);
}

class Logit {
 public:
  std::vector<double> weights;
  double rate = 0.05;  // of the gradient steps; 0: the weights stay

  explicit Logit(std::vector<double> start) : weights(std::move(start)), start_(weights) {}

  // Forgets what was learnt.
  void reset() { weights = start_; }

  // To be told whenever the recent tokens are others, or the weights: what was computed of them is stale.
  void recents_changed() {
    for (auto& odds : recent_odds_) odds.clear();
  }

  // Gives every option, every recent token and "none of these" its probability.
  void score(List& list, const std::vector<Recent>& recents) {
    double none = sum(list.none, list.num_none), most = none;
    for (Listed& o : list.options) o.p = sum(o.features, o.n), most = std::max(most, o.p);
    double total = list.rest = std::exp(none - most);
    for (Listed& o : list.options) o.p = std::exp(o.p - most), total += o.p;
    const std::vector<double>& odds = recent_odds(list.last_class, recents);
    double shared = std::exp(weights[list.recent_match] - most);
    list.recent_p.resize(list.recent.size());
    for (size_t k = 0; k < list.recent.size(); ++k) total += list.recent_p[k] = shared * odds[list.recent[k]];
    for (Listed& o : list.options) o.p /= total;
    for (double& p : list.recent_p) p /= total;
    list.rest /= total;
  }

  // One gradient step on the log-likelihood of `token` among what is listed, and was scored.
  void learn(const List& list, const std::vector<Recent>& recents, int32_t token) {
    bool listed = false;
    for (const Listed& o : list.options) {
      step(o.features, o.n, o.p - (o.token == token ? 1.0 : 0.0));
      listed |= o.token == token;
    }
    for (size_t k = 0; k < list.recent.size(); ++k) {
      const Recent& r = recents[list.recent[k]];
      const int16_t at[3] = {r.rank, recent_classes(list.last_class, r), list.recent_match};
      step(at, 3, list.recent_p[k] - (r.token == token ? 1.0 : 0.0));
      listed |= r.token == token;
    }
    step(list.none, list.num_none, list.rest - (listed ? 0.0 : 1.0));
  }

 private:
  std::vector<double> start_;
  std::vector<double> recent_odds_[kNumClasses];  // by kind of the last token; empty: not computed

  double sum(const int16_t* at, int32_t n) const {
    double z = 0.0;
    for (int32_t i = 0; i < n; ++i) z += weights[at[i]];
    return z;
  }

  void step(const int16_t* at, int32_t n, double slope) {
    for (int32_t i = 0; i < n; ++i) weights[at[i]] -= rate * slope;
  }

  // exp of what recent token i weighs after a token of this class, without the entry that all share.
  const std::vector<double>& recent_odds(int32_t last_class, const std::vector<Recent>& recents) {
    std::vector<double>& odds = recent_odds_[last_class];
    if (odds.empty())
      for (const Recent& r : recents)
        odds.push_back(std::exp(weights[r.rank] + weights[recent_classes(last_class, r)]));
    return odds;
  }
};

}  // namespace longgraft
