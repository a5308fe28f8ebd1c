// Copying that survives edits: where the text is being copied from, and what it replaces on the way.
// Host only; knows no probabilities.
//
// The ideas: after a token that was not copied, copying usually resumes in the same source a few tokens on, so
// a *source pointer* keeps its place through an edit. And what was replaced once is replaced again: when a copy
// rejoins its source, the pair (source tokens A, written tokens B) is kept and proposed wherever A comes next.
#pragma once
#include <cstdlib>
#include <unordered_map>

#include "places.hpp"

namespace longgraft {

constexpr int32_t kWindowBack = 32, kWindowAhead = 192;      // places round the pointer that are looked at
constexpr int32_t kSecondBack = 16, kSecondAhead = 96;       // the same round the pointer that was left last
constexpr int32_t kRejoinBack = 64, kRejoinAhead = 256;      // how far off a copy may rejoin its source
constexpr int32_t kRejoinMatch = 2;                          // tokens it takes to rejoin in the window ...
constexpr int32_t kElsewhereMatch = 4, kElsewhereLead = 6;   // ... and anywhere else, or ahead of the window's
constexpr int32_t kResume = 2;                               // places after the pointer that are tried while lost
constexpr int32_t kFar = 256;                                // a jump this far keeps the place that was left
constexpr int32_t kMaxSide = 8;                              // tokens of either side of a substitution
constexpr int32_t kPairsAToken = 4, kMaxPairs = 4096;
constexpr double kSuccessDecay = 0.875;

struct Copy {
  int32_t source = kNowhere;  // the next token is expected to be the one at this place
  int32_t run = 0;            // tokens copied in a row
  int32_t lost = 0;           // tokens since the copy was left, 0 while it goes on
  int32_t left = kNowhere;    // place where it was left, and ...
  int32_t since = 0;          // ... the length of the own text then
  int32_t pair = -1, offset = 0, resume = kNowhere;  // a substitution being written, its next token, where it ends
  int32_t second = kNowhere;  // the place left before the last far jump
  double success = 0.5;       // share of tokens copied lately
};

struct Pair {
  int32_t source, source_len, written, written_len, hits;
};

// Longest occurrence; of equal ones the newest.
inline Occurrence longest_of(const std::vector<Occurrence>& found) {
  Occurrence best{kNowhere, 0};
  for (const Occurrence& o : found)
    if (o.length > best.length || (o.length == best.length && o.length > 0 && o.place > best.place)) best = o;
  return best;
}

class Substitutions {
 public:
  const Pair& operator[](int32_t i) const { return pairs_[i]; }
  void count(int32_t i) { ++pairs_[i].hits; }
  size_t size() const { return pairs_.size(); }

  // Newest pair whose source tokens come at `place` and, if `token` >= 0, whose first written token is it; or -1.
  int32_t find(const Library& texts, int32_t place, int32_t token) const {
    auto known = by_token_.find(texts.at(place));
    if (known == by_token_.end()) return -1;
    const std::vector<int32_t>& ids = known->second;
    for (size_t i = ids.size(); i-- > 0;) {
      const Pair& pair = pairs_[ids[i]];
      if (token >= 0 && texts.at(pair.written) != token) continue;
      if (equal(texts, pair.source, place, pair.source_len)) return ids[i];
    }
    return -1;
  }

  void add(const Library& texts, int32_t source, int32_t source_len, int32_t written, int32_t written_len) {
    if (source_len < 1 || written_len < 1 || source_len > kMaxSide || written_len > kMaxSide) return;
    if (source < 0 || has_sentinel(texts, source, source_len) || has_sentinel(texts, written, written_len)) return;
    while (source_len > 1 && written_len > 1 &&
           texts.at(source + source_len - 1) == texts.at(written + written_len - 1))
      --source_len, --written_len;
    while (source_len > 1 && written_len > 1 && texts.at(source) == texts.at(written))
      ++source, ++written, --source_len, --written_len;
    if (source_len == written_len && equal(texts, source, written, source_len)) return;
    if (pairs_.size() >= kMaxPairs) clear();
    std::vector<int32_t>& ids = by_token_[texts.at(source)];
    for (size_t i = 0; i < ids.size(); ++i) {
      Pair& pair = pairs_[ids[i]];
      if (pair.source_len != source_len || pair.written_len != written_len) continue;
      if (!equal(texts, pair.source, source, source_len) || !equal(texts, pair.written, written, written_len)) continue;
      ++pair.hits;
      std::rotate(ids.begin() + i, ids.begin() + i + 1, ids.end());  // now the newest
      return;
    }
    ids.push_back((int32_t)pairs_.size());
    pairs_.push_back({source, source_len, written, written_len, 1});
    if (ids.size() > kPairsAToken) ids.erase(ids.begin());
  }

  void clear() { pairs_.clear(), by_token_.clear(); }

 private:
  std::vector<Pair> pairs_;
  std::unordered_map<int32_t, std::vector<int32_t>> by_token_;  // by first source token, newest last

  // Is one of the tokens a sentinel, or lies outside the text?
  static bool has_sentinel(const Library& texts, int32_t place, int32_t n) {
    for (int32_t i = 0; i < n; ++i)
      if (texts.at(place + i) == kSentinel) return true;
    return false;
  }

  static bool equal(const Library& texts, int32_t a, int32_t b, int32_t n) {
    for (int32_t i = 0; i < n; ++i)
      if (texts.at(a + i) != texts.at(b + i)) return false;
    return true;
  }
};

// Adds the places round the pointers that follow the same last token, and those where a lost copy may resume.
inline void find_nearby(const Library& texts, const Copy& copy, const int32_t* end, int32_t n, Scratch& met,
                        std::vector<Occurrence>& out) {
  if (copy.source == kNowhere) return;
  auto window = [&](int32_t center, int32_t back, int32_t ahead) {
    int32_t base = texts.first_of(center), token = end[-1];
    const std::vector<int32_t>& tokens = base ? texts.side.tokens : texts.own.tokens;  // asked for some 300 places
    int32_t first = std::max(1, center - base - back);
    int32_t last = std::min((int32_t)tokens.size() - 1, center - base + ahead);
    for (int32_t i = first; i <= last; ++i)
      if (tokens[i - 1] == token && met.add(base + i)) out.push_back({base + i, texts.match(base + i, end, n)});
  };
  window(copy.source, kWindowBack, kWindowAhead);
  if (copy.second != kNowhere) window(copy.second, kSecondBack, kSecondAhead);
  int32_t last = std::min(texts.end_of(copy.source) - 1, copy.source + (copy.lost ? kResume : 0));
  for (int32_t place = copy.source; place <= last; ++place)
    if (met.add(place)) out.push_back({place, texts.match(place, end, n)});
}

inline void jump(Copy& copy, int32_t from, int32_t to) {
  if (from != kNowhere && std::abs(to - from) > kFar) copy.second = from;
  copy.source = copy.left = to;
  copy.lost = 0;
}

// Where the copy stands after `token`. `found`: occurrences of the context that now ends with it; `length`: tokens
// of the own text with it; `committed`: it is part of the text and not only proposed, so pairs are learnt.
inline Copy follow_copy(const Library& texts, Substitutions& pairs, Copy copy, int32_t token,
                        const std::vector<Occurrence>& found, int32_t length, bool committed) {
  auto copied = [&] { copy.success = copy.success * kSuccessDecay + (1.0 - kSuccessDecay); };
  if (copy.pair >= 0) {
    const Pair& pair = pairs[copy.pair];
    if (texts.at(pair.written + copy.offset) == token) {
      copied();
      if (++copy.offset == pair.written_len) copy.source = copy.resume, copy.pair = -1, ++copy.run;
      return copy;
    }
    copy.pair = -1;
    copy.source = copy.resume;
  }
  // A substitution may have led past the end of the text: the token followed is not its own source.
  if (copy.source < kElsewhere && copy.source >= texts.own.size() - (int32_t)committed) copy.source = kNowhere;
  Occurrence best = longest_of(found);
  if (copy.source != kNowhere && texts.at(copy.source) == token) {
    ++copy.source, ++copy.run, copy.lost = 0;
    copied();
    int32_t here = 0;
    for (const Occurrence& o : found)
      if (o.place == copy.source) here = o.length;
    if (best.length >= 2 * here + 4 && here < kMaxMatch) jump(copy, copy.source, best.place);
    return copy;
  }
  if (copy.source != kNowhere && !copy.lost && token >= 0) {  // a sentinel is written for nothing
    int32_t id = pairs.find(texts, copy.source, token);
    if (id >= 0) {
      if (committed) pairs.count(id);
      copied();
      if (pairs[id].written_len == 1) {
        copy.source += pairs[id].source_len, ++copy.run;
      } else {
        copy.pair = id, copy.offset = 1, copy.resume = copy.source + pairs[id].source_len;
      }
      return copy;
    }
  }
  if (copy.source != kNowhere && ++copy.lost == 1) copy.left = copy.source, copy.since = length - 1;
  copy.success *= kSuccessDecay;
  copy.run = 0;
  Occurrence near{kNowhere, 0};
  int32_t nearest = kRejoinAhead * 4;
  for (const Occurrence& o : found) {
    int32_t distance = o.place - copy.left;
    if (copy.left == kNowhere || distance < -kRejoinBack || distance > kRejoinAhead || o.length < kRejoinMatch) continue;
    int32_t far = distance < 0 ? -2 * distance : distance;
    if (o.length > near.length || (o.length == near.length && far < nearest)) near = o, nearest = far;
  }
  if (near.place != kNowhere && best.length < near.length + kElsewhereLead) {
    if (committed && copy.lost) {
      int32_t shared = std::min(near.length, length - copy.since);
      pairs.add(texts, copy.left, near.place - shared - copy.left, copy.since, length - shared - copy.since);
    }
    copy.source = copy.left = near.place;
    copy.lost = 0;
  } else if (best.length >= kElsewhereMatch || (copy.source == kNowhere && best.length >= 2)) {
    jump(copy, copy.left, best.place);
  }
  return copy;
}

}  // namespace longgraft
