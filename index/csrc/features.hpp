// What may come next after a context, and what is known of each option, as entries of additive weight tables.
// Host only; knows no weights.
//
// The idea: occurrences of the context are grouped by the token that followed. Options compete in one conditional
// logit: the log-odds of each is a sum of table entries, one a table, and "none of these" is one more option.
// `Table` is the only place that says which tables there are; `features.py` of the Python twin mirrors it.
#pragma once
#include <cmath>

#include "copying.hpp"

namespace longgraft {

constexpr int32_t kNumClasses = 8;       // coarse kinds of token text; 0 = unknown
constexpr int32_t kMaxGroups = 24;       // options taken from occurrences
constexpr int32_t kMaxRecents = 96;      // options that are only recent ...
constexpr int32_t kRecentsScan = 640;    // ... looked for in the last so many tokens
constexpr int32_t kMaxRow = 8;           // options of the successor row
constexpr int32_t kMaxHints = 16;       // places proposed from elsewhere that are looked at ...
constexpr int32_t kHintsAdded = 4;      // ... and the first of them, which may add an option
constexpr int32_t kHintMatch = 4;       // hints count where the longest match is shorter: a long one knows better
constexpr int32_t kMaxFeatures = 28;

template <class T, size_t N>
inline int32_t bin(const T (&edges)[N], T value) {
  int32_t b = 0;
  for (T edge : edges) b += value >= edge;
  return b;
}
constexpr int32_t kLengthEdges[] = {1, 2, 3, 4, 5, 7, 9, 13, 21, 32};
constexpr int32_t kCoarseEdges[] = {1, 2, 4, 8, 16};
constexpr int32_t kCountEdges[] = {1, 2, 3, 5, 17};
constexpr double kShareEdges[] = {1e-9, 0.05, 0.15, 0.35, 0.6, 0.9, 0.9999999};
constexpr int32_t kRunEdges[] = {1, 2, 4, 8, 16, 32};
constexpr double kSuccessEdges[] = {0.2, 0.4, 0.6, 0.8, 0.93};
constexpr int32_t kAgeEdges[] = {4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192};
constexpr double kCosineEdges[] = {0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9};
constexpr int32_t kHintEdges[] = {2, 5, 9};
constexpr int32_t kRecentEdges[] = {2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 36, 48, 60, 72, 84};

// Bins of the small numbers that are asked for all the time, looked up.
struct SmallBins {
  static constexpr int32_t kRoom = 64;
  uint8_t length[kRoom], coarse[kRoom], count[kRoom], share[kRoom][kRoom];
  SmallBins() {
    for (int32_t n = 0; n < kRoom; ++n) {
      length[n] = (uint8_t)bin(kLengthEdges, n), coarse[n] = (uint8_t)bin(kCoarseEdges, n);
      count[n] = (uint8_t)bin(kCountEdges, n);
      for (int32_t k = 0; k < kRoom; ++k) share[n][k] = n ? (uint8_t)bin(kShareEdges, (double)k / (double)n) : 0;
    }
  }
};
inline const SmallBins kSmallBins;
inline bool is_small(int32_t n) { return (uint32_t)n < (uint32_t)SmallBins::kRoom; }

inline int32_t length_bin(int32_t n) { return is_small(n) ? kSmallBins.length[n] : bin(kLengthEdges, n); }  // 11
inline int32_t coarse_bin(int32_t n) { return is_small(n) ? kSmallBins.coarse[n] : bin(kCoarseEdges, n); }  // 6
inline int32_t count_bin(int32_t n) { return is_small(n) ? kSmallBins.count[n] : bin(kCountEdges, n); }     // 6
inline int32_t run_bin(int32_t n) { return bin(kRunEdges, n); }          // 7
inline int32_t success_bin(double s) { return bin(kSuccessEdges, s); }   // 6
inline int32_t age_bin(int32_t n) { return bin(kAgeEdges, n); }          // 12
inline int32_t share_bin(int32_t count, int32_t total) {                 // 8
  if (is_small(count) && is_small(total)) return kSmallBins.share[total][count];
  return total > 0 ? bin(kShareEdges, (double)count / (double)total) : 0;
}
constexpr int32_t kNoDistance = 1 << 29;
inline int32_t distance_bin(int32_t d) {  // 9; 8: far or none
  if (d >= 0) return d == 0 ? 0 : d == 1 ? 1 : d <= 4 ? 2 : d <= 16 ? 3 : d <= 64 ? 4 : d <= 256 ? 5 : 8;
  return d >= -4 ? 6 : d >= -64 ? 7 : 8;
}

// Tables of options, of recent tokens, then of "none".
enum Table : int32_t {
  kLength, kShare1, kShare2, kShare4, kShare8, kShareTop, kNewestTop, kHistory, kAge, kNewest,
  kDistance, kAtSource, kOffSource, kSourceSuccess, kSubstitution, kLengthSuccess, kClasses, kClassLength,
  kNearest, kNearestBack, kSecond, kRecentRank, kRecentClasses, kRecentMatch, kRow, kRowMatch, kElse, kHint, kAlike,
  kNoneLength, kNoneTop, kNoneTwo, kNoneSuccess, kNoneSource, kNoneClass, kNoneRow,
  kNumTables
};
constexpr int32_t kTableSizes[kNumTables] = {
    22, 48, 48, 48, 48, 288, 12, 12, 12, 2,
    54, 14, 18, 24, 8, 132, 64, 48,
    56, 1, 9, 36, 64, 11, 9, 99, 12, 36, 30,
    11, 36, 6, 66, 15, 8, 12};
constexpr int32_t table_base(int32_t table) {
  int32_t base = 0;
  for (int32_t i = 0; i < table; ++i) base += kTableSizes[i];
  return base;
}
constexpr int32_t kNumWeights = table_base(kNumTables);

struct Listed {
  Listed() {}  // set by option_of
  int32_t token;
  int32_t place;     // copied from here (-1: nowhere)
  int32_t match_len;
  int32_t newest, nearest, nearest_len, second;
  int32_t counts[5];  // occurrences matching >= 1, 2, 4, 8 tokens, and the longest
  int32_t substitution, recent, row, hint;
  double cosine;       // of its first hint
  double p;
  int32_t n;
  int16_t features[kMaxFeatures];  // only the first n are set
};

// A token that is listed only because it is recent: three entries, the same for all nodes of a draft but one.
struct Recent {
  int32_t token, place;
  int16_t rank, own_class;  // entry of kRecentRank, kind of its text
};

inline int32_t first_nearer(int32_t a, int32_t b) {  // is distance a nearer than b? ahead counts for less than behind
  int64_t x = a < 0 ? -2ll * a : a, y = b < 0 ? -2ll * b : b;  // from text to text it is 2**30 or more
  return x < y;
}

// One list of options under construction, with what all of them share.
struct List {
  std::vector<Listed> options;
  std::vector<int32_t> recent;    // numbers of the recent tokens that are not among the options ...
  std::vector<double> recent_p;   // ... and their probabilities
  int16_t last_class, recent_match;  // what their other two entries follow from
  int32_t totals[5];  // occurrences matching >= 1, 2, 4, 8 tokens, and the longest
  int32_t longest, top_place, newest_place;
  int32_t ahead, ahead_len, behind;  // option whose place is nearest after the pointer, and before it (-1: none)
  int32_t distinct, row_len;
  bool is_hinted;  // there are hints for this context
  int32_t num_none;
  int16_t none[8];
  double rest;  // probability of none of the options
};

inline Listed& option_of(List& list, Scratch& by_token, int32_t token) {
  int32_t& i = by_token[token];
  if (i >= 0) return list.options[i];
  i = (int32_t)list.options.size();
  Listed& fresh = list.options.emplace_back();
  fresh.token = token;
  fresh.place = fresh.newest = kNowhere;
  fresh.nearest = fresh.second = kNoDistance;
  fresh.match_len = fresh.nearest_len = fresh.substitution = fresh.recent = fresh.row = fresh.hint = fresh.n = 0;
  std::fill(fresh.counts, fresh.counts + 5, 0);
  return fresh;
}

}  // namespace longgraft
