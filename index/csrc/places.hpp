// Texts whose earlier places can be looked up by the tokens before them. Host only; knows no Python, no ranking.
//
// A place is the number of tokens before it: tokens[place] is what came there. Each place is linked to the
// previous one after the same n tokens, n = 8, 4, 2, 1, and a table leads to the newest. So the occurrences of a
// context are a few short walks, newest first, whatever the length of the text.
#pragma once
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "suffix_automaton.hpp"

namespace longgraft {

constexpr int32_t kNumGrams = 4;
constexpr int32_t kGrams[kNumGrams] = {8, 4, 2, 1};
constexpr int32_t kVisits[kNumGrams] = {32, 64, 96, 64};  // links followed: more adds little on real text
constexpr int32_t kMostVisits = 96;
constexpr int32_t kMaxMatch = 32;                           // longer matches count as this long
constexpr int32_t kElsewhere = 1 << 30;  // places from here on lie in the side text
constexpr int32_t kNowhere = -1;

inline uint64_t hash_gram(const int32_t* end, int32_t n) {
  uint64_t h = (uint64_t)n;
  for (int32_t i = n; i > 0; --i) h = (h ^ (uint32_t)end[-i]) * 0x9e3779b97f4a7c15ull;
  return h ^ h >> 32;
}

// Newest place after each n-gram of a text; the n-gram itself is read from the text.
class GramTable {
 public:
  explicit GramTable(int32_t n) : n_(n), slots_(64, kNowhere) {}

  // Slot that holds, or would hold, the newest place after the gram that ends at `end`.
  size_t find(const std::vector<int32_t>& tokens, const int32_t* end) const {
    size_t mask = slots_.size() - 1;
    for (size_t i = hash_gram(end, n_) & mask;; i = (i + 1) & mask) {
      int32_t place = slots_[i];
      if (place == kNowhere || std::equal(end - n_, end, tokens.data() + place - n_)) return i;
    }
  }
  int32_t at(size_t slot) const { return slots_[slot]; }
  void expect(const int32_t* end) const { prefetch(&slots_[hash_gram(end, n_) & (slots_.size() - 1)]); }

  // Sets the newest place and returns the one before it.
  int32_t set(const std::vector<int32_t>& tokens, int32_t place) {
    size_t slot = find(tokens, tokens.data() + place);
    int32_t before = slots_[slot];
    slots_[slot] = place;
    if (before == kNowhere && ++used_ * 3 > slots_.size() * 2) grow(tokens);
    return before;
  }

  void clear() { slots_.assign(64, kNowhere), used_ = 0; }
  int64_t memory_bytes() const { return (int64_t)slots_.capacity() * 4; }

 private:
  int32_t n_;
  std::vector<int32_t> slots_;
  size_t used_ = 0;

  void grow(const std::vector<int32_t>& tokens) {
    std::vector<int32_t> old(slots_.size() * 2, kNowhere);
    old.swap(slots_);
    for (int32_t place : old)
      if (place != kNowhere) slots_[find(tokens, tokens.data() + place)] = place;
  }
};

class Text {
 public:
  std::vector<int32_t> tokens;

  int32_t size() const { return (int32_t)tokens.size(); }

  // Space for n more tokens. Raises std::length_error where they do not fit.
  void reserve(int64_t n) {
    if (size() + n > kMaxTokens) throw std::length_error("the index is full: a text may hold 2**29 tokens");
    int64_t room = (int64_t)tokens.capacity(), want = size() + n + n / 32;
    if (n <= 64 || room >= size() + n) return;  // few tokens: left to the vectors' own growth
    want = std::max(want, room + room / 8);     // a text that comes in chunks is not copied at each of them
    tokens.reserve(want);
    for (auto& links : links_) links.reserve(want);
  }

  // Appends one token, or kSentinel, across which nothing matches.
  void append(int32_t token) {
    tokens.push_back(token);
    run_ = token == kSentinel ? 0 : run_ + 1;
    for (int32_t k = 0; k < kNumGrams; ++k)
      links_[k].push_back(run_ < kGrams[k] ? kNowhere : newest_[k].set(tokens, size()));
  }

  // Asks for what `newest` will read.
  void expect(int32_t k, const int32_t* end) const { newest_[k].expect(end); }
  // Newest place after the last kGrams[k] tokens before `end`, and the one before a place.
  int32_t newest(int32_t k, const int32_t* end) const { return newest_[k].at(newest_[k].find(tokens, end)); }
  int32_t before(int32_t k, int32_t place) const { return links_[k][place - 1]; }

  // Tokens before `place` that equal those before `end`, of which there are `n`; at most kMaxMatch.
  int32_t match(int32_t place, const int32_t* end, int32_t n) const {
    int32_t most = std::min({n, place, kMaxMatch});
    const int32_t* here = tokens.data() + place;
    int32_t m = 0;
    while (m < most && here[-1 - m] == end[-1 - m] && here[-1 - m] != kSentinel) ++m;
    return m;
  }

  void clear() {
    tokens.clear();
    for (auto& links : links_) links.clear();
    for (auto& table : newest_) table.clear();
    run_ = 0;
  }

  // "" or a sentence naming the first broken invariant. O(size)
  const char* check() const {
    int32_t run = 0;
    for (int32_t place = 1; place <= size(); ++place) {
      const int32_t* end = tokens.data() + place;
      run = end[-1] == kSentinel ? 0 : run + 1;
      for (int32_t k = 0; k < kNumGrams; ++k) {
        int32_t n = kGrams[k], earlier = before(k, place);
        if (run < n && earlier != kNowhere) return "a place has a link for tokens across a sentinel";
        if (run < n) continue;
        if (earlier != kNowhere && (earlier >= place || !std::equal(end - n, end, tokens.data() + earlier - n)))
          return "a link leads to a place after other tokens";
        if (newest(k, end) < place) return "the newest place after some tokens is not the newest";
      }
    }
    return "";
  }

  int64_t memory_bytes() const {
    int64_t total = (int64_t)tokens.capacity() * 4;
    for (const auto& links : links_) total += (int64_t)links.capacity() * 4;
    for (const auto& table : newest_) total += table.memory_bytes();
    return total;
  }

 private:
  std::vector<int32_t> links_[kNumGrams];
  GramTable newest_[kNumGrams] = {GramTable(8), GramTable(4), GramTable(2), GramTable(1)};
  int32_t run_ = 0;  // tokens since the last sentinel
};

// The sequence's own text and, behind it, texts from elsewhere, under one numbering of places.
struct Library {
  Text own, side;

  int32_t end_of(int32_t place) const { return place < kElsewhere ? own.size() : kElsewhere + side.size(); }
  // The token that came at `place`; kSentinel where there is none.
  int32_t at(int32_t place) const {
    if (place < 0 || place >= end_of(place)) return kSentinel;
    return place < kElsewhere ? own.tokens[place] : side.tokens[place - kElsewhere];
  }
  int32_t match(int32_t place, const int32_t* end, int32_t n) const {
    return place < kElsewhere ? own.match(place, end, n) : side.match(place - kElsewhere, end, n);
  }
  // First place of the text that `place` lies in.
  int32_t first_of(int32_t place) const { return place < kElsewhere ? 0 : kElsewhere; }
};

struct Occurrence {
  int32_t place, length;
};

// A small map from ints to ints that is emptied at no cost.
class Scratch {
 public:
  Scratch() : entries_(kRoom, {0, 0, 0}) {}
  void clear() {
    if (++round_ != 0) return;
    entries_.assign(kRoom, {0, 0, 0});  // rounds are counted anew: no entry may seem to be of this one
    round_ = 1;
  }
  // Value of `key`; -1, to be set, the first time.
  int32_t& operator[](int32_t key) {
    for (uint32_t i = (uint32_t)key * 0x9e3779b1u >> 21;; i = (i + 1) & (kRoom - 1)) {
      Entry& e = entries_[i];
      if (e.round != round_) return e = {key, -1, round_}, e.value;
      if (e.key == key) return e.value;
    }
  }
  // The same without keeping the key.
  int32_t get(int32_t key) const {
    for (uint32_t i = (uint32_t)key * 0x9e3779b1u >> 21;; i = (i + 1) & (kRoom - 1)) {
      const Entry& e = entries_[i];
      if (e.round != round_) return -1;
      if (e.key == key) return e.value;
    }
  }
  // True the first time a key is met.
  bool add(int32_t key) {
    int32_t& value = (*this)[key];
    return value < 0 ? (value = 0, true) : false;
  }

 private:
  static constexpr uint32_t kRoom = 2048;  // look-ups meet at most some 1,300 places and tokens
  struct Entry {
    int32_t key, value;
    uint32_t round;
  };
  std::vector<Entry> entries_;
  uint32_t round_ = 1;
};

// Places after the longest, then shorter suffixes of the `n` tokens before `end`; newest first in each walk. The walks
// go side by side, because each step of one waits for memory.
inline void find_occurrences(const Text& text, int32_t base, const int32_t* end, int32_t n, Scratch& met,
                             std::vector<Occurrence>& out) {
  int32_t found[kNumGrams][kMostVisits], counts[kNumGrams] = {}, at[kNumGrams];
  for (int32_t k = 0; k < kNumGrams; ++k)
    if (n >= kGrams[k]) text.expect(k, end);
  for (int32_t k = 0; k < kNumGrams; ++k) at[k] = n < kGrams[k] ? kNowhere : text.newest(k, end);
  for (bool is_done = false; !is_done;) {
    is_done = true;
    for (int32_t k = 0; k < kNumGrams; ++k) {
      if (at[k] == kNowhere || counts[k] == kVisits[k]) continue;
      prefetch(text.tokens.data() + at[k]);
      found[k][counts[k]++] = at[k];
      at[k] = text.before(k, at[k]);
      is_done = false;
    }
  }
  for (int32_t k = 0; k < kNumGrams; ++k)
    for (int32_t i = 0; i < counts[k]; ++i)
      if (int32_t place = found[k][i]; place < text.size() && met.add(base + place))
        out.push_back({base + place, text.match(place, end, n)});
}

}  // namespace longgraft
