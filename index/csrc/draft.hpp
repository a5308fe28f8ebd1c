// Best-first tree of what may follow the text and a virtual path. Host or device; all arrays are the caller's.
//
// The idea: path probability orders a queue; the likeliest entry becomes a node and is expanded by looking up
// again with its own context. Path probabilities never grow along a path, so the first n nodes are the n
// likeliest, and the queue never holds more entries than nodes are still wanted. Of equal ones the entry
// listed first goes first.
#pragma once
#include "ranking.hpp"

namespace longgraft {

struct Pending {
  Option option;  // its probability is that of the whole path
  int32_t parent;
};

// Working memory and results of one draft; every array holds `budget` entries.
struct Draft {
  Pending* nodes;
  Pending* queue;  // likeliest last
  int32_t budget;
  double threshold;
  int32_t num_nodes, queued;
};

LONGGRAFT_HD bool is_full(const Draft& d) { return d.queued == d.budget - d.num_nodes; }

// No entry less likely than this can become a node.
LONGGRAFT_HD double lowest_useful(const Draft& d) {
  double bar = is_full(d) && d.queued > 0 ? d.queue[0].option.probability : 0.0;
  return bar > d.threshold ? bar : d.threshold;
}

LONGGRAFT_CALL void enqueue(const Automaton& a, Draft& d, const Pending& entry) {
  double p = entry.option.probability;
  if (p < d.threshold) return;
  int32_t i = 0;
  if (is_full(d)) {
    if (d.queued == 0 || p <= d.queue[0].option.probability) return;
    for (; i + 1 < d.queued && d.queue[i + 1].option.probability < p; ++i) d.queue[i] = d.queue[i + 1];
  } else {
    for (i = d.queued++; i > 0 && d.queue[i - 1].option.probability >= p; --i) d.queue[i] = d.queue[i - 1];
  }
  d.queue[i] = entry;
  prefetch(&a.states[entry.option.next.state]);
}

struct Recent {
  Child tokens[kMaxRecent];
  int32_t n;
  double peak;  // the highest hazard of any of them
};

LONGGRAFT_CALL Recent recent_of(const Automaton& a, const Ranking& r) {
  Recent recent;
  recent.n = find_recent(a, recent.tokens);
  recent.peak = 0.0;
  for (int32_t i = 0; i < recent.n; ++i) {
    double hazard = r.hazards[r.recent_base + i];
    if (hazard > recent.peak) recent.peak = hazard;
  }
  return recent;
}

// What all nodes of one draft look up in.
struct Sources {
  const Automaton& a;
  const Ranking& r;
  const Successors& successors;
  Recent recent;
};

LONGGRAFT_CALL void expand(const Sources& s, Draft& d, int32_t node, Cursor c, int32_t last_token, double path) {
  Option options[kMaxOptions];
  double floor = lowest_useful(d) / path;
  Listing l = list_options(s.a, s.r, s.successors, c, last_token, floor, options);
  if (l.rest * s.recent.peak >= floor) list_recent(s.r, s.recent.tokens, s.recent.n, floor, l);
  for (int32_t i = 0; i < l.n; ++i) {
    options[i].probability *= path;
    enqueue(s.a, d, Pending{options[i], node});
  }
}

// Fills `d` with at most its budget of nodes, likeliest first, none below its threshold.
LONGGRAFT_CALL void draft(const Automaton& a, const Ranking& r, const Successors& successors, const int32_t* path,
                        int32_t path_len, Draft& d) {
  d.num_nodes = d.queued = 0;
  if (d.budget <= 0) return;
  Cursor start = text_end(a);
  int32_t last_token = a.size ? a.tokens[a.size - 1] : kSentinel;
  for (int32_t i = 0; i < path_len; ++i) start = advance(a, start, last_token = path[i]);
  const Sources s{a, r, successors, recent_of(a, r)};
  expand(s, d, -1, start, last_token, 1.0);
  while (d.queued > 0) {
    const Option& best = (d.nodes[d.num_nodes++] = d.queue[--d.queued]).option;
    if (d.num_nodes == d.budget) break;
    expand(s, d, d.num_nodes - 1, best.next, best.token, best.probability);
  }
}

}  // namespace longgraft
