// Lists what may come next after one context and fills in each option's table entries. Host only.
#pragma once
#include "features.hpp"

namespace longgraft {

// What a look-up knows besides the occurrences it found.
struct Context {
  const int32_t* end;  // one past the last token of the context
  int32_t length;      // tokens there are before it
  const Copy& copy;
  const int32_t* row;  // successor row of the last token, or null
  int32_t row_width;
  bool is_root;        // hints hold for the root alone
};

// A place proposed from elsewhere (dense store), and how alike the target's state there was to its newest one.
struct Hint {
  int32_t place;
  double cosine;
};

// Options of equal rank keep the order they were listed in. (Numbering of the bits is the tables' own.)
class Lister {
 public:
  const Library& texts;
  const Substitutions& pairs;
  const uint8_t* classes = nullptr;  // [num_classed] kind of each token's text, or null
  int32_t num_classed = 0;
  int32_t prompt_len = 1 << 30;      // places before it are the prompt's
  std::vector<Hint> hints;           // best first, at most kMaxHints; for the root of the text as it is now

  Lister(const Library& t, const Substitutions& p) : texts(t), pairs(p) {}

  const std::vector<Recent>& recents() const { return recents_; }

  // Collects the last distinct tokens of the own text; they are the same for all nodes of a draft.
  void collect_recents(Scratch& seen) {
    const std::vector<int32_t>& own = texts.own.tokens;
    int32_t size = (int32_t)own.size(), rank = 0;
    recents_.clear();
    seen.clear();
    for (int32_t i = size - 1; i >= 0 && i > size - kRecentsScan && rank < kMaxRecents; --i)
      if (own[i] != kSentinel && seen.add(own[i]))
        recents_.push_back({own[i], i, (int16_t)(table_base(kRecentRank) + 18 + bin(kRecentEdges, ++rank)), class_of(own[i])});
  }

  void list(const Context& c, std::vector<Occurrence>& found, Scratch& scratch, List& out) {
    out.options.clear();
    scratch.clear();
    group(c, found, scratch, out);
    substitute(c, scratch, out);
    out.is_hinted = c.is_root && !hints.empty() && out.longest < kHintMatch;
    if (out.is_hinted) hint(scratch, out);
    add_row(c, scratch, out);
    out.distinct = (int32_t)out.options.size();
    add_recent(scratch, out);
    out.last_class = class_of(c.end[-1]);
    out.recent_match = (int16_t)(table_base(kRecentMatch) + length_bin(out.longest));
    for (size_t i = 0; i < out.options.size(); ++i) describe(c, out, (int32_t)i);
    describe_none(c, out);
  }

 private:
  std::vector<Recent> recents_;

  uint8_t class_of(int32_t token) const { return token >= 0 && token < num_classed ? classes[token] % kNumClasses : 0; }

  void group(const Context& c, std::vector<Occurrence>& found, Scratch& by_token, List& out) {
    const Copy& copy = c.copy;
    Occurrence best = longest_of(found);
    std::fill(out.totals, out.totals + 5, 0);
    out.longest = best.length;
    out.top_place = best.place;
    out.newest_place = out.ahead = out.behind = -1;
    out.ahead_len = 0;
    int32_t ahead = kNoDistance, behind = kNoDistance;
    for (const Occurrence& o : found) {
      int32_t token = texts.at(o.place), m = o.length;
      int32_t levels = (m >= 1) + (m >= 2) + (m >= 4) + (m >= 8);
      for (int32_t k = 0; k < levels; ++k) ++out.totals[k];
      out.totals[4] += m == best.length;
      out.newest_place = std::max(out.newest_place, o.place);
      if (token == kSentinel) continue;
      Listed& option = option_of(out, by_token, token);
      for (int32_t k = 0; k < levels; ++k) ++option.counts[k];
      option.counts[4] += m == best.length;
      option.newest = std::max(option.newest, o.place);
      if (option.place == kNowhere || m > option.match_len || (m == option.match_len && o.place > option.place))
        option.place = o.place, option.match_len = m;
      if (copy.source != kNowhere) {
        int32_t d = o.place - copy.source, i = (int32_t)(&option - out.options.data());
        if (first_nearer(d, option.nearest)) option.nearest = d, option.nearest_len = m;
        if (d >= 0 && d < ahead) ahead = d, out.ahead = i, out.ahead_len = m;
        if (d < 0 && -d < behind && m > 0) behind = -d, out.behind = i;
      }
      if (copy.second != kNowhere && std::abs(o.place - copy.second) < std::abs(option.second))
        option.second = o.place - copy.second;
    }
    if (out.options.size() > kMaxGroups) keep_best(by_token, out);
  }

  // Keeps the options with the longest, then newest matches.
  void keep_best(Scratch& by_token, List& out) {
    auto precedes = [](const Listed& a, const Listed& b) {
      return a.match_len != b.match_len ? a.match_len > b.match_len : a.place > b.place;
    };
    int32_t ahead = out.ahead < 0 ? -1 : out.options[out.ahead].token;
    int32_t behind = out.behind < 0 ? -1 : out.options[out.behind].token;
    std::nth_element(out.options.begin(), out.options.begin() + kMaxGroups, out.options.end(), precedes);
    out.options.resize(kMaxGroups);
    std::sort(out.options.begin(), out.options.end(), precedes);
    out.ahead = out.behind = -1;
    by_token.clear();
    for (int32_t i = 0; i < kMaxGroups; ++i) {
      int32_t token = out.options[i].token;
      by_token[token] = i;
      if (token == ahead) out.ahead = i;
      if (token == behind) out.behind = i;
    }
  }

  void substitute(const Context& c, Scratch& by_token, List& out) {
    const Copy& copy = c.copy;
    if (copy.pair >= 0) {
      int32_t place = pairs[copy.pair].written + copy.offset;
      Listed& option = option_of(out, by_token, texts.at(place));
      option.substitution = 1;
      if (option.place == kNowhere) option.place = place;
      return;
    }
    int32_t id = pairs.find(texts, copy.source, -1);
    if (copy.source == kNowhere || id < 0) return;
    const Pair& pair = pairs[id];
    int32_t often = pair.hits <= 1 ? 0 : pair.hits <= 3 ? 1 : 2;
    int32_t written = texts.at(pair.written), source = texts.at(copy.source);
    Listed& option = option_of(out, by_token, written);
    option.substitution = 2 + often;
    if (option.place == kNowhere) option.place = pair.written;
    if (source != written && by_token[source] >= 0) out.options[by_token[source]].substitution = 5 + often;
  }

  void hint(Scratch& by_token, List& out) {
    for (size_t i = 0; i < hints.size(); ++i) {
      int32_t token = texts.at(hints[i].place);
      if (token == kSentinel) continue;
      if (by_token[token] < 0 && (i >= (size_t)kHintsAdded || out.options.size() >= kMaxGroups + 4)) continue;
      Listed& option = option_of(out, by_token, token);
      if (option.hint == 0) option.hint = 1 + (int32_t)i, option.cosine = hints[i].cosine;
      if (option.place == kNowhere) option.place = option.newest = hints[i].place;
    }
  }

  void add_row(const Context& c, Scratch& by_token, List& out) {
    out.row_len = 0;
    for (int32_t k = 0; c.row != nullptr && k < c.row_width && k < kMaxRow; ++k) {
      if (c.row[k] < 0) continue;
      Listed& option = option_of(out, by_token, c.row[k]);
      if (option.row == 0) option.row = 1 + k;
      ++out.row_len;
    }
  }

  // Takes the recent tokens that are options already out of the list of them.
  void add_recent(Scratch& by_token, List& out) {
    out.recent.resize(recents_.size());
    size_t n = 0;
    for (size_t i = 0; i < recents_.size(); ++i) {
      int32_t known = by_token.get(recents_[i].token);
      if (known >= 0) {
        out.options[known].recent = 1 + (int32_t)i;
      } else {
        out.recent[n++] = (int32_t)i;
      }
    }
    out.recent.resize(n);
  }

  // Entries of one option; those of tables that say nothing about it are left out.
  void describe(const Context& c, List& list, int32_t i) {
    Listed& o = list.options[i];
    o.n = 0;
    auto put = [&o](Table table, int32_t entry) { o.features[o.n++] = (int16_t)(table_base(table) + entry); };
    int32_t last = class_of(c.end[-1]), own = class_of(o.token);
    if (o.row) put(kRow, o.row), put(kRowMatch, o.row * 11 + length_bin(list.longest));
    if (o.recent) put(kRecentRank, bin(kRecentEdges, o.recent));
    if (o.newest == kNowhere && o.substitution == 0) {  // only in the row
      put(kRecentClasses, last * kNumClasses + own);
      return;
    }
    const Copy& copy = c.copy;
    bool top = list.longest > 0 && o.match_len == list.longest;
    int32_t m = coarse_bin(o.match_len), acc = success_bin(copy.success);
    put(kLength, top * 11 + length_bin(o.match_len));
    for (int32_t k = 0; k < 4; ++k)
      put((Table)(kShare1 + k), share_bin(o.counts[k], list.totals[k]) * 6 + count_bin(list.totals[k]));
    put(kShareTop, (share_bin(o.counts[4], list.totals[4]) * 6 + count_bin(list.totals[4])) * 6 + coarse_bin(list.longest));
    put(kNewestTop, (o.newest != kNowhere && o.place == list.top_place) * 6 + m);
    put(kHistory, (o.newest != kNowhere && o.place >= prompt_len && o.place < kElsewhere) * 6 + m);
    put(kAge, o.place >= kElsewhere || o.newest == kNowhere ? 11 : age_bin(texts.own.size() - o.place));
    put(kNewest, o.newest == list.newest_place);
    if (o.place >= kElsewhere) put(kElse, 6 + m);
    int32_t d = copy.source == kNowhere ? 8 : distance_bin(o.nearest);
    put(kDistance, d * 6 + coarse_bin(o.nearest_len));
    if (d == 0) {
      put(kAtSource, copy.lost ? 7 + std::min(6, copy.lost / 2) : run_bin(copy.run));
      put(kSourceSuccess, top * 12 + acc * 2 + (copy.lost > 0));
    } else {
      put(kOffSource, (copy.lost > 0) * 9 + d);
    }
    if (o.substitution) put(kSubstitution, o.substitution);
    put(kLengthSuccess, acc * 11 + length_bin(o.match_len) + (top ? 66 : 0));
    put(kClasses, last * kNumClasses + own);
    put(kClassLength, last * 6 + m);
    put(kNearest, (i == list.ahead ? 1 + coarse_bin(list.ahead_len) : 0) * kNumClasses + last);
    if (i == list.behind) put(kNearestBack, 0);
    put(kSecond, copy.second == kNowhere ? 8 : distance_bin(o.second));
    if (!list.is_hinted) return;
    int32_t alike = o.hint ? 1 + bin(kCosineEdges, o.cosine) : 0;
    if (o.hint) put(kHint, bin(kHintEdges, o.hint) * 9 + alike - 1);
    put(kAlike, alike * 3 + m);
  }

  void describe_none(const Context& c, List& list) {
    const Copy& copy = c.copy;
    list.num_none = 0;
    auto put = [&list](Table table, int32_t entry) { list.none[list.num_none++] = (int16_t)(table_base(table) + entry); };
    put(kNoneLength, length_bin(list.longest));
    put(kNoneTop, count_bin(list.totals[4]) * 6 + std::min(5, list.distinct / 4));
    put(kNoneTwo, count_bin(list.totals[1]));
    put(kNoneSuccess, length_bin(list.longest) * 6 + success_bin(copy.success));
    put(kNoneSource, copy.source == kNowhere ? 0 : copy.lost ? 1 + std::min(6, copy.lost / 2) : 8 + run_bin(copy.run));
    put(kNoneClass, class_of(c.end[-1]));
    if (list.row_len) put(kNoneRow, 1 + (list.longest > 0 ? std::min(list.longest, 10) : 0));
  }
};

}  // namespace longgraft
