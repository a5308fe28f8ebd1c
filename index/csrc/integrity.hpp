// Checks that an Automaton is what it claims to be. Host only, O(size), for tests and idle moments.
#pragma once
#include "suffix_automaton.hpp"

namespace longgraft {

inline const char* check_state(const Automaton& a, int32_t s) {
  const State& state = a.states[s];
  if (s == kRoot) return state.link == kNone ? "" : "the root has a suffix link";
  if (state.link < -a.num_clones || state.link > a.size) return "a suffix link leads outside the states";
  if (state_len(a, state.link) >= state_len(a, s)) return "a suffix link does not lead to a shorter state";
  if (state.count < 1 || state.count > a.size) return "a count lies outside 1 to the length of the text";
  if (state.last_end < 1 || state.last_end > a.size) return "an end lies outside the text";
  if (state_len(a, s) > state.last_end) return "a state is longer than the text before its end";
  return "";
}

inline const char* check_edge(const Automaton& a, int32_t s, int32_t slot) {
  const Edge& e = a.edges[slot];
  if (e.state != s) return "an edge is chained to another state";
  if (e.token < 0) return "an edge carries a sentinel";
  if (e.target < -a.num_clones || e.target > a.size) return "an edge leads outside the states";
  if (state_len(a, e.target) <= state_len(a, s)) return "an edge does not lead to a longer state";
  if (find_slot(a, s, e.token) != slot) return "an edge cannot be found by its state and token";
  if (a.tokens[a.states[e.target].last_end - 1] != e.token) return "an edge's token is not the one that its end holds";
  return "";
}

// Returns "" or the first broken invariant.
inline const char* check_automaton(const Automaton& a) {
  int64_t chained = 0, stored = 0;
  for (int32_t s = -a.num_clones; s <= a.size; ++s) {
    const char* broken = check_state(a, s);
    if (*broken) return broken;
    for (int32_t slot = a.states[s].head; slot != kNone; slot = a.edges[slot].next) {
      if (slot < 0 || (uint32_t)slot > a.edge_mask) return "a chain leads outside the table of edges";
      if (*(broken = check_edge(a, s, slot))) return broken;
      if (++chained > a.num_edges) return "a chain of edges does not end";
    }
  }
  for (uint32_t i = 0; i <= a.edge_mask; ++i) stored += a.edges[i].state != kNone;
  if (chained != a.num_edges || stored != a.num_edges) return "edges are missing from their chains";
  return "";
}

}  // namespace longgraft
