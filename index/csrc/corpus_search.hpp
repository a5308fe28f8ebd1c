// Search in the sorted ends of immutable segments. Everything read from a file is checked before it is used as an index.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "pages.hpp"
#include "suffix_array.hpp"

namespace longgraft {

// Context, last token first; all tokens are 0 or more, so none equals a sentinel.
struct Query {
  const int32_t* tokens;
  int32_t n;
};

// n tokens and n ends in a file, and where its documents begin [num_documents + 1], held in memory.
struct Segment {
  Pages pages;
  int64_t tokens_at, ends_at;
  int32_t n;
  const int32_t* starts;
  int32_t num_documents;

  int32_t token(int32_t place) const { return pages.read(tokens_at + 4ll * place); }

  int32_t end(int32_t rank) const {
    int32_t value = pages.read(ends_at + 4ll * rank);
    if (value < 1 || value > n) throw Corrupted{-1};
    return value;
  }

  int32_t document(int32_t end) const {
    return (int32_t)(std::upper_bound(starts, starts + num_documents, end - 1) - starts) - 1;
  }

  // Fills `out` with the tokens behind an end (1 to n), and with -1 from the end of the document on.
  void follow(int32_t end, int32_t vocab_size, int32_t* out, int64_t length) const {
    int32_t stop = std::min(starts[document(end) + 1], n) - 1;
    for (int64_t i = 0; i < length; ++i) {
      out[i] = end + i < stop ? token((int32_t)(end + i)) : -1;
      if (end + i < stop && (out[i] < 0 || out[i] >= vocab_size)) throw Corrupted{-1};
    }
  }
};

// Ranks [begin, end) hold the occurrences of the last `match_len` tokens of the query; `at` is where the whole query would stand.
struct Range {
  int32_t match_len, at, begin, end;
};

// How many tokens, of which `from` are known to agree, the context at a rank shares with the query; `order`: how it sorts.
inline int32_t shared(const Segment& s, int32_t rank, Query q, int32_t from, int& order) {
  int32_t end = s.end(rank);
  for (int32_t j = from; j < q.n; ++j) {
    int32_t token = end - 1 - j < 0 ? -1 : s.token(end - 1 - j);
    if (token == q.tokens[j]) continue;
    order = token < q.tokens[j] ? -1 : 1;
    return j;
  }
  order = 0;
  return q.n;
}

// Find the longest match: it is shared by a neighbour of the place where the query would stand, and both are looked at.
inline Range find(const Segment& s, Query q) {
  int32_t low = 0, high = s.n, low_shared = 0, high_shared = 0, best = 0;
  while (low < high) {
    int32_t middle = low + (high - low) / 2;
    int order;
    int32_t here = shared(s, middle, q, std::min(low_shared, high_shared), order);
    best = std::max(best, here);
    if (order < 0) {
      low = middle + 1;
      low_shared = here;
    } else {
      high = middle;
      high_shared = here;
    }
  }
  return Range{best, low, low, low};
}

// How far from `at`, downwards (-1) or upwards (1), contexts share the query's last `match_len` tokens: strides, then halves.
inline int32_t reach(const Segment& s, Query q, int32_t at, int step) {
  int32_t room = step < 0 ? at : s.n - at;
  auto matches = [&](int32_t i) {
    int order;
    return shared(s, step < 0 ? at - i : at + i - 1, q, 0, order) == q.n;
  };
  int32_t good = 0, bad = room + 1;
  for (int64_t i = 1; i <= room; i *= 2) {
    if (!matches((int32_t)i)) {
      bad = (int32_t)i;
      break;
    }
    good = (int32_t)i;
  }
  while (bad - good > 1) {
    int32_t middle = good + (bad - good) / 2;
    (matches(middle) ? good : bad) = middle;
  }
  return good;
}

struct Pick {
  size_t segment;
  int32_t end, document;
};

// Segments that are searched together.
class Searcher {
 public:
  std::vector<Segment> segments;
  size_t reading = 0;  // the segment last read from, to say which one is corrupted

  // Returns the match length, or 0 where it is below `min_match`. Fills `count` and at most `limit` picks.
  int32_t lookup(Query q, int32_t min_match, size_t limit, int64_t& count, std::vector<Pick>& picks) {
    int32_t best = 0;
    count = 0;
    picks.clear();
    ranges_.clear();
    for (reading = 0; reading < segments.size(); ++reading) {
      ranges_.push_back(find(segments[reading], q));
      best = std::max(best, ranges_.back().match_len);
    }
    if (best < std::max(min_match, 1)) return 0;
    Query part{q.tokens, best};
    for (reading = 0; reading < segments.size(); ++reading) {
      Range& r = ranges_[reading];
      if (r.match_len < best) continue;
      r.begin = r.at - reach(segments[reading], part, r.at, -1);
      r.end = r.at + reach(segments[reading], part, r.at, 1);
      count += r.end - r.begin;
    }
    spread(limit, count, picks);
    return best;
  }

 private:
  // Looks at 2 * limit occurrences at even distances, newest segment first, and takes one a document before a second of any.
  void spread(size_t limit, int64_t count, std::vector<Pick>& picks) {
    int64_t num_seen = std::min<int64_t>(count, 2 * (int64_t)limit), before = 0, j = 0;
    later_.clear();
    for (size_t back = segments.size(); back-- > 0;) {
      const Range& r = ranges_[back];
      reading = back;
      for (; j < num_seen && j * count / num_seen < before + (r.end - r.begin); ++j) {
        int32_t end = segments[back].end((int32_t)(r.begin + j * count / num_seen - before));
        take(Pick{back, end, segments[back].document(end)}, limit, picks);
      }
      before += r.end - r.begin;
    }
    for (size_t i = 0; i < later_.size() && picks.size() < limit; ++i) picks.push_back(later_[i]);
  }

  void take(Pick pick, size_t limit, std::vector<Pick>& picks) {
    for (const Pick& other : picks) {
      if (other.segment == pick.segment && other.document == pick.document) {
        later_.push_back(pick);
        return;
      }
    }
    if (picks.size() < limit) picks.push_back(pick);
  }

  std::vector<Range> ranges_;
  std::vector<Pick> later_;
};

}  // namespace longgraft
