// What may come next after a context, in a fixed order with a learnt hazard each. Host or device.
//
// The idea: list possible next tokens (longest match first, then shorter ones; after them the successor row of
// the last token; after it the commonest of the recent tokens). Each falls into a cell by what is known of it,
// and the cell's hazard is P(it is the next token | none listed before it is). So the probability of the i-th
// is q_i * prod_{j<i} (1 - q_j): normalised by construction, the rest being "none of these".
// Where the bins lie and what the hazards are is not known here: both come in as tables (rank.py).
#pragma once
#include "suffix_automaton.hpp"

namespace longgraft {

constexpr int32_t kMaxLevels = 8;       // suffix links climbed for one context
constexpr int32_t kMaxChildren = kNewestEdges;  // newest edges looked at in one level
constexpr int32_t kMaxMatches = 16;     // tokens listed from matches
constexpr int32_t kMaxSuccessors = 8;   // tokens listed from the successor row
constexpr int32_t kMaxRecent = 16;      // tokens listed because they are recent
constexpr int32_t kRecentScan = 128;    // tokens looked back for them ...
constexpr int32_t kRecentDistinct = 32; // ... and distinct ones kept
constexpr int32_t kMaxOptions = kMaxMatches + kMaxSuccessors + kMaxRecent;

// Upper ends of bins: bin = number of edges <= value, so n edges make n + 1 bins.
template <class T>
struct Edges {
  const T* at;
  int32_t n;
};

template <class T>
LONGGRAFT_HD int32_t bin_of(const Edges<T>& edges, T value) {
  int32_t bin = 0;
  for (int32_t i = 0; i < edges.n; ++i) bin += value >= edges.at[i];  // no branch to mispredict
  return bin;
}

struct Ranking {
  Edges<int32_t> lengths, totals, ages, contexts;
  Edges<double> shares;
  int32_t num_orders;        // first listed, second, ... the last one stands for all later
  int32_t successor_base;    // first cell of the successor row: rank x context bins
  int32_t recent_base;       // first cell of recent tokens: rank
  int32_t num_cells;
  const double* priors;      // [num_cells]
  double *hazards, *trials, *hits;
  double prior_weight, decay;  // trials the prior counts for; kept share of earlier trials at each new one
};

struct Successors {
  const int32_t* rows;  // [vocab_size, width] or null; -1 = empty
  int32_t vocab_size, width;
};

struct Option {
  int32_t token, origin, match_len, cell;  // origin: offset of the token it copies, -1 = none
  Cursor next;                             // where the context stands with this token added
  double probability;
};

struct Child {
  int32_t token, target, count, end;
};

LONGGRAFT_HD bool precedes(const Child& a, const Child& b) {
  return a.count != b.count ? a.count > b.count : a.end > b.end;
}

// Inserts into a list sorted by count, then recency, of at most `room` entries; returns the new length.
LONGGRAFT_CALL int32_t insert_child(Child* list, int32_t n, int32_t room, const Child& child) {
  if (n == room && !precedes(child, list[n - 1])) return n;
  int32_t i = n < room ? n : n - 1;
  for (; i > 0 && precedes(child, list[i - 1]); --i) list[i] = list[i - 1];
  list[i] = child;
  return n < room ? n + 1 : n;
}

// The list under construction. `mask` has a bit per token modulo 64, so that most look-ups end there.
struct Listing {
  Option* options;
  int32_t n;
  double rest;  // probability that none listed so far comes
  uint64_t mask;
};

LONGGRAFT_CALL bool is_listed(const Listing& l, int32_t token) {
  if (!(l.mask >> (token & 63) & 1)) return false;
  for (int32_t i = 0; i < l.n; ++i)
    if (l.options[i].token == token) return true;
  return false;
}

LONGGRAFT_CALL void list_option(Listing& l, const Ranking& r, const Option& option) {
  double hazard = r.hazards[option.cell];
  l.options[l.n] = option;
  l.options[l.n++].probability = l.rest * hazard;
  l.rest *= 1.0 - hazard;
  l.mask |= 1ull << (option.token & 63);
}

// Edges of one state, newest first, the spine edge last; asks for their targets ahead of time.
LONGGRAFT_CALL int32_t newest_edges(const Automaton& a, int32_t state, Child* out) {
  int32_t n = 0;
  int32_t slot = a.states[state].head;
  const NewestEdges* list = nullptr;
  while (n < kMaxChildren && slot != kNone) {
    if (n == 2 && a.newest != nullptr) list = &newest_slots(a, state);  // most states have one or two
    const Edge& e = a.edges[slot];
    prefetch(&a.states[e.target]);
    out[n++] = Child{e.token, e.target, 0, 0};
    slot = list == nullptr ? e.next : n < list->n ? list->slots[n] : kNone;
  }
  bool spine = state >= 0 && state < a.size && a.tokens[state] != kSentinel;
  if (spine && n < kMaxChildren) out[n++] = Child{a.tokens[state], state + 1, 0, 0};
  return n;
}

// Children of one state whose token is not listed yet; takes the counts of listed ones out of `remaining`.
LONGGRAFT_CALL int32_t new_children(const Automaton& a, const Listing& l, int32_t state, Child* out,
                                  int32_t room, int32_t& remaining) {
  Child edges[kMaxChildren];
  int32_t n = 0, degree = newest_edges(a, state, edges);
  for (int32_t i = 0; i < degree; ++i) {
    const State& s = a.states[edges[i].target];
    if (is_listed(l, edges[i].token)) {
      remaining -= s.count;
    } else {
      n = insert_child(out, n, room, Child{edges[i].token, edges[i].target, s.count, s.last_end});
    }
  }
  return n;
}

LONGGRAFT_CALL int32_t match_cell(const Ranking& r, int32_t length_bin, const Child& child, int32_t remaining,
                                int32_t order, int32_t age) {
  int32_t rest = remaining > child.count ? remaining : child.count;
  int32_t cell = length_bin;
  cell = cell * (r.shares.n + 1) + bin_of(r.shares, (double)child.count / (double)rest);
  cell = cell * (r.totals.n + 1) + bin_of(r.totals, rest);
  cell = cell * r.num_orders + (order < r.num_orders ? order : r.num_orders - 1);
  return cell * (r.ages.n + 1) + bin_of(r.ages, age);
}

LONGGRAFT_CALL void list_matches(const Automaton& a, const Ranking& r, Cursor c, double floor, Listing& l) {
  Child children[kMaxMatches];
  for (int32_t level = 0; level < kMaxLevels && c.state != kRoot; ++level) {
    const State& s = a.states[c.state];
    // The newest end of the text has no follower yet.
    int32_t remaining = s.count - (s.last_end == a.size ? 1 : 0);
    int32_t n = new_children(a, l, c.state, children, kMaxMatches - l.n, remaining);
    int32_t length_bin = bin_of(r.lengths, c.length);
    for (int32_t i = 0; i < n; ++i) {
      const Child& child = children[i];
      int32_t cell = match_cell(r, length_bin, child, remaining, l.n, a.size - child.end);
      list_option(l, r, Option{child.token, child.end - 1, c.length, cell, {child.target, c.length + 1}, 0.0});
      remaining -= child.count;
      if (l.rest < floor || l.n == kMaxMatches) return;
    }
    c = Cursor{s.link, state_len(a, s.link)};
  }
}

LONGGRAFT_CALL void list_successors(const Automaton& a, const Ranking& r, const Successors& successors, Cursor c,
                                  int32_t last_token, double floor, Listing& l) {
  if (successors.rows == nullptr || last_token < 0 || last_token >= successors.vocab_size) return;
  const int32_t* row = successors.rows + (int64_t)last_token * successors.width;
  int32_t context = bin_of(r.contexts, c.length);
  for (int32_t k = 0; k < successors.width && k < kMaxSuccessors && l.rest >= floor; ++k) {
    if (row[k] < 0 || is_listed(l, row[k])) continue;
    int32_t cell = r.successor_base + k * (r.contexts.n + 1) + context;
    list_option(l, r, Option{row[k], -1, 0, cell, advance(a, Cursor{kRoot, 0}, row[k]), 0.0});
  }
}

// The commonest of the last distinct tokens. Returns how many, at most kMaxRecent.
LONGGRAFT_CALL int32_t find_recent(const Automaton& a, Child* out) {
  int32_t distinct[kRecentDistinct];
  int32_t seen = 0, n = 0;
  uint64_t mask = 0;
  int32_t first = a.size > kRecentScan ? a.size - kRecentScan : 0;
  for (int32_t i = a.size - 1; i >= first && seen < kRecentDistinct; --i) {
    int32_t token = a.tokens[i];
    int32_t k = mask >> (token & 63) & 1 ? 0 : seen;
    while (k < seen && distinct[k] != token) ++k;
    if (token == kSentinel || k < seen) continue;
    mask |= 1ull << (token & 63);
    distinct[seen++] = token;
    int32_t state = follow(a, kRoot, token);
    n = insert_child(out, n, kMaxRecent, Child{token, state, a.states[state].count, i + 1});
  }
  return n;
}

LONGGRAFT_CALL void list_recent(const Ranking& r, const Child* recent, int32_t n, double floor, Listing& l) {
  for (int32_t i = 0; i < n && l.rest >= floor; ++i)
    if (!is_listed(l, recent[i].token))
      list_option(l, r, Option{recent[i].token, recent[i].end - 1, 0, r.recent_base + i, {recent[i].target, 1}, 0.0});
}

// Everything a context has to offer; stops where what is left is less likely than `floor`. `recent` may be
// null. `out` holds kMaxOptions.
LONGGRAFT_CALL Listing list_options(const Automaton& a, const Ranking& r, const Successors& successors, Cursor c,
                                  int32_t last_token, double floor, Option* out) {
  Listing l{out, 0, 1.0, 0};
  list_matches(a, r, c, floor, l);
  if (l.rest >= floor) list_successors(a, r, successors, c, last_token, floor, l);
  return l;
}

// Scores one cell: was it this option, given that none before it was?
LONGGRAFT_CALL void score_cell(Ranking& r, int32_t cell, bool hit) {
  double trials = r.trials[cell] * r.decay;
  double hits = r.hits[cell] * r.decay;
  trials += 1.0;
  if (hit) hits += 1.0;
  r.trials[cell] = trials;
  r.hits[cell] = hits;
  double prior = r.prior_weight * r.priors[cell];
  r.hazards[cell] = (prior + hits) / (r.prior_weight + trials);
}

// Scores the list of the current end of the text against the token that comes.
LONGGRAFT_CALL void learn(const Automaton& a, Ranking& r, const Successors& successors, int32_t token) {
  if (a.size == 0 || token == kSentinel) return;
  Option options[kMaxOptions];
  Listing l = list_options(a, r, successors, text_end(a), a.tokens[a.size - 1], 0.0, options);
  int32_t i = 0;
  for (; i < l.n; ++i) {
    score_cell(r, options[i].cell, options[i].token == token);
    if (options[i].token == token) return;
  }
  Child recent[kMaxRecent];
  list_recent(r, recent, find_recent(a, recent), 0.0, l);
  for (; i < l.n; ++i) {
    score_cell(r, options[i].cell, options[i].token == token);
    if (options[i].token == token) return;
  }
}

}  // namespace longgraft
