// The one kernel of the device's automaton: takes in committed tokens, then drafts; one thread, no allocation.
// Knows no Python. The text before this file defines `enum Field`: what each entry of the control block holds.
//
// The idea: everything that changes lies in the control block, so that rounds follow one another on a stream
// without the host ever reading anything. Where there is no room left the text is still kept, a fault is noted,
// and nothing is drafted until the host has built a larger one.
#if !defined(__CUDACC_RTC__)
#include <cstdint>
#endif
#include "draft.hpp"

namespace longgraft {

enum Fault { kNoFault, kFull, kBadToken, kTextLost };

// The Room of append() where arrays cannot grow.
struct FixedRoom {
  int64_t prefixes, clones, slots;
  LONGGRAFT_HD bool operator()(const Automaton& a, int32_t n) const {
    return a.size + 2ll <= prefixes && a.num_clones + 1ll <= clones && (a.num_edges + (int64_t)n) * 4 <= slots * 3;
  }
};

template <class T>
LONGGRAFT_HD T* pointer(int64_t value) {
  return reinterpret_cast<T*>(value);
}

LONGGRAFT_HD Automaton automaton_of(const int64_t* c) {
  Automaton a;
  a.states = pointer<State>(c[STATES]);
  a.clone_lens = pointer<int32_t>(c[CLONE_LENS]);
  a.tokens = pointer<int32_t>(c[TOKENS]);
  a.edges = pointer<Edge>(c[EDGES]);
  a.newest = nullptr;
  a.newest_mask = 0;
  a.edge_mask = (uint32_t)(c[SLOTS] - 1);
  a.size = (int32_t)c[SIZE];
  a.num_clones = (int32_t)c[NUM_CLONES];
  a.num_edges = (int32_t)c[NUM_EDGES];
  a.match_len = (int32_t)c[MATCH_LEN];
  a.match_end = (int32_t)c[MATCH_END];
  a.steps = 0;
  return a;
}

LONGGRAFT_HD void store_automaton(const Automaton& a, int64_t* c) {
  c[SIZE] = a.size;
  c[NUM_CLONES] = a.num_clones;
  c[NUM_EDGES] = a.num_edges;
  c[MATCH_LEN] = a.match_len;
  c[MATCH_END] = a.match_end;
}

// Bins and hazards: ints are lengths, totals, ages, contexts; doubles are priors, hazards, trials, hits (one per
// cell each), shares, prior weight, decay.
LONGGRAFT_HD Ranking ranking_of(const int64_t* c) {
  Ranking r;
  const int32_t* ints = pointer<int32_t>(c[BINS]);
  r.lengths = {ints, (int32_t)c[NUM_LENGTHS]};
  r.totals = {ints += r.lengths.n, (int32_t)c[NUM_TOTALS]};
  r.ages = {ints += r.totals.n, (int32_t)c[NUM_AGES]};
  r.contexts = {ints += r.ages.n, (int32_t)c[NUM_CONTEXTS]};
  r.num_orders = (int32_t)c[NUM_ORDERS];
  r.num_cells = (int32_t)c[NUM_CELLS];
  r.recent_base = r.num_cells - kMaxRecent;
  r.successor_base = r.recent_base - kMaxSuccessors * (r.contexts.n + 1);
  double* values = pointer<double>(c[HAZARDS]);
  r.priors = values;
  r.hazards = values += r.num_cells;
  r.trials = values += r.num_cells;
  r.hits = values += r.num_cells;
  r.shares = {values += r.num_cells, (int32_t)c[NUM_SHARES]};
  values += r.shares.n;
  r.prior_weight = values[0];
  r.decay = values[1];
  return r;
}

// Appends a token, or keeps it as text alone where there is no room.
LONGGRAFT_CALL void take_in(Automaton& a, Ranking& r, const Successors& successors, int32_t token, bool learns,
                          int64_t* c) {
  if (token < kSentinel || token >= c[VOCAB_SIZE]) c[FAULT] = kBadToken;
  if (c[FAULT] == kBadToken) return;
  if (c[FAULT] == kNoFault) {
    FixedRoom room{c[PREFIXES], c[CLONES], c[SLOTS]};
    if (room(a, 1)) {
      if (learns) learn(a, r, successors, token);
      if (append(a, token, room)) return;
    }
    c[TEXT_LEN] = a.size > c[TEXT_LEN] ? a.size : c[TEXT_LEN];
    c[FAULT] = kFull;
    if (a.size > c[SIZE_BEFORE]) return;  // append() had already written the token
  }
  if (c[TEXT_LEN] < c[TEXT_ROOM]) {
    a.tokens[c[TEXT_LEN]] = token;
  } else {
    c[FAULT] = kTextLost;
  }
  ++c[TEXT_LEN];
}

LONGGRAFT_CALL void take_in_all(Automaton& a, Ranking& r, const Successors& successors, const int32_t* tokens,
                              int64_t n, bool learns, int64_t* c) {
  for (int64_t i = 0; i < n; ++i) {
    c[SIZE_BEFORE] = a.size;
    take_in(a, r, successors, tokens[i], learns, c);
    if (c[FAULT] == kNoFault) c[TEXT_LEN] = a.size;
  }
  store_automaton(a, c);
}

// A sentinel in a path would match one in the text.
LONGGRAFT_HD bool is_path(const int32_t* path, int32_t n, int64_t vocab_size) {
  for (int32_t i = 0; i < n; ++i)
    if (path[i] < 0 || path[i] >= vocab_size) return false;
  return true;
}

// Fills the first columns of `nodes` [5, MAX_BUDGET]: token, parent, match_len, origin, cell.
LONGGRAFT_CALL void write_nodes(const Draft& d, int64_t* c) {
  int32_t* nodes = pointer<int32_t>(c[NODES]);
  double* probabilities = pointer<double>(c[PROBABILITIES]);
  const int64_t stride = c[MAX_BUDGET];
  for (int32_t i = 0; i < d.num_nodes; ++i) {
    const Option& option = d.nodes[i].option;
    nodes[i] = option.token;
    nodes[stride + i] = d.nodes[i].parent;
    nodes[2 * stride + i] = option.match_len;
    nodes[3 * stride + i] = option.origin;
    nodes[4 * stride + i] = option.cell;
    probabilities[i] = option.probability;
  }
  *pointer<int32_t>(c[NUM_NODES]) = d.num_nodes;
}

}  // namespace longgraft

// tokens [n]: committed; of them *count if `count` is not null. path [path_len]: proposed after them. rows: the
// successor table [vocab_rows, width] or null. budget 0: only take in; n 0: only draft.
extern "C" __global__ void longgraft_round(long long* control, const int* tokens, const long long* count, int n,
                                           int learns, const int* path, int path_len, int budget, double threshold,
                                           const int* rows, int vocab_rows, int width) {
  using namespace longgraft;
  int64_t* c = reinterpret_cast<int64_t*>(control);
  Automaton a = automaton_of(c);
  Ranking r = ranking_of(c);
  const Successors successors{rows, vocab_rows, width};
  if (n > 0) {
    int64_t given = count == nullptr ? n : *count;
    take_in_all(a, r, successors, tokens, given < n ? given : n, learns != 0, c);
  }
  if (budget <= 0) return;
  static_assert(sizeof(Pending) == 40, "the host reserves 40 bytes for each");
  Pending* work = pointer<Pending>(c[WORK]);
  Draft d{work, work + c[MAX_BUDGET], budget, threshold, 0, 0};
  if (c[FAULT] == kNoFault && is_path(path, path_len, c[VOCAB_SIZE])) draft(a, r, successors, path, path_len, d);
  write_nodes(d, c);
}
