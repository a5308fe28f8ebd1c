// Suffix automaton over token ids in "spine" layout: every suffix of the text, one state per class of ends.
// Plain structs and free functions, host or device; knows no Python, no allocation, no ranking.
//
// The idea: on real text nearly every state is a prefix of the text with exactly one transition, the token
// that followed. So prefix states are numbered by position (id = length), that "spine" edge costs no storage,
// and only the others (some 1.0 a token) sit in one open-addressing table keyed (state, token).
//
// Ids: prefix states 0..size (0 = root), clones -1, -2, ... in the same array. Lengths are token counts; an
// "end" is the number of tokens up to and including an occurrence, so the occurrence's last token is end - 1.
#pragma once
#if !defined(__CUDACC_RTC__)
#include <cstdint>
#else
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#endif
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define LONGGRAFT_HD __host__ __device__ inline
// Stays a call on a device: with everything inlined into one kernel compiling takes minutes.
#define LONGGRAFT_CALL __host__ __device__ __noinline__ static
#else
#define LONGGRAFT_HD inline
#define LONGGRAFT_CALL inline
#endif

namespace longgraft {

constexpr int32_t kNone = -2147483647 - 1;  // no state, no slot
constexpr int32_t kRoot = 0;
constexpr int32_t kSentinel = -1;  // separates documents; no edge carries it, so nothing matches across
constexpr int32_t kMaxTokens = 1 << 29;  // two edges for each then fit a table whose slots an int32 numbers
constexpr int32_t kNewestEdges = 32;     // edges of one state that are ever listed
constexpr int32_t kWalkCap = 64;   // longest walk up the suffix links for bookkeeping and for a failed match

// Asks for memory that is needed soon. Touches nothing, changes nothing.
LONGGRAFT_HD void prefetch(const void* at) {
#if (defined(__GNUC__) || defined(__clang__)) && !defined(__CUDA_ARCH__)
  __builtin_prefetch(at);
#else
  (void)at;
#endif
}

struct State {
  int32_t link;      // longest proper suffix with more ends
  int32_t count;     // ends seen; exact while every chain was within kWalkCap, else too low
  int32_t last_end;  // most recent end credited
  int32_t head;      // first slot of the explicit edges, newest edge first
};

struct Edge {
  int32_t state, token, target, next;  // state == kNone: empty slot; next: older edge of the same state
};

// The newest edges of a state that has many: what following `next` finds, but with all slots known at once, so
// that they load side by side. Holds while the state's head is `head` and no slot has moved.
struct NewestEdges {
  int32_t state, head, n;
  int32_t slots[kNewestEdges];
};

// All storage belongs to the owner. `states` and `clone_lens` are indexed by id (clones are negative).
struct Automaton {
  State* states;
  int32_t* clone_lens;
  int32_t* tokens;
  Edge* edges;
  NewestEdges* newest;   // memory of newest_edges(), written by it alone; null: none
  uint32_t newest_mask;  // its places - 1, a power of two minus one
  uint32_t edge_mask;    // slots - 1, a power of two minus one
  int32_t size;        // tokens in the text
  int32_t num_clones;
  int32_t num_edges;   // explicit edges
  int32_t match_len;   // longest suffix of the text that occurred before ...
  int32_t match_end;   // ... and its most recent earlier end (0: none)
  int64_t steps;       // work done, in visited states and copied edges
};

// Where a context stands: the longest suffix of it that occurs in the text.
struct Cursor {
  int32_t state, length;
};

LONGGRAFT_HD int32_t state_len(const Automaton& a, int32_t s) { return s >= 0 ? s : a.clone_lens[s]; }

LONGGRAFT_HD uint32_t edge_slot(const Automaton& a, int32_t state, int32_t token) {
  uint64_t key = (uint64_t)(uint32_t)state << 32 | (uint32_t)token;
  key *= 0x9e3779b97f4a7c15ull;
  key ^= key >> 29;
  key *= 0xbf58476d1ce4e5b9ull;
  return (uint32_t)(key >> 32) & a.edge_mask;
}

// Slot of the explicit edge, or kNone.
LONGGRAFT_CALL int32_t find_slot(const Automaton& a, int32_t state, int32_t token) {
  for (uint32_t i = edge_slot(a, state, token);; i = (i + 1) & a.edge_mask) {
    const Edge& e = a.edges[i];
    if (e.state == kNone) return kNone;
    if (e.state == state && e.token == token) return (int32_t)i;
  }
}

// State reached from `state` by `token`, or kNone.
LONGGRAFT_HD int32_t follow(const Automaton& a, int32_t state, int32_t token) {
  if (state >= 0 && state < a.size && a.tokens[state] == token) return state + 1;
  if (a.states[state].head == kNone) return kNone;
  int32_t slot = find_slot(a, state, token);
  return slot == kNone ? kNone : a.edges[slot].target;
}

// Puts an edge into an empty slot without chaining it. The table must have room.
LONGGRAFT_CALL int32_t place_edge(Automaton& a, int32_t state, int32_t token, int32_t target) {
  uint32_t i = edge_slot(a, state, token);
  while (a.edges[i].state != kNone) i = (i + 1) & a.edge_mask;
  a.edges[i] = Edge{state, token, target, kNone};
  ++a.num_edges;
  return (int32_t)i;
}

LONGGRAFT_HD void add_edge(Automaton& a, int32_t state, int32_t token, int32_t target) {
  int32_t slot = place_edge(a, state, token, target);
  a.edges[slot].next = a.states[state].head;
  a.states[state].head = slot;
}

// Gives `clone` the edges of `from`, in the same order (newest first, the spine edge last).
template <class Room>
LONGGRAFT_CALL bool copy_edges(Automaton& a, int32_t from, int32_t clone, Room& room) {
  int32_t degree = 1;
  for (int32_t slot = a.states[from].head; slot != kNone; slot = a.edges[slot].next) ++degree;
  a.steps += degree;
  if (!room(a, degree)) return false;  // may move the table: slots are read again below
  int32_t tail = kNone;
  int32_t slot = a.states[from].head;
  bool spine = from >= 0 && from < a.size && a.tokens[from] != kSentinel;
  while (slot != kNone || spine) {
    int32_t placed;
    if (slot != kNone) {
      Edge e = a.edges[slot];
      placed = place_edge(a, clone, e.token, e.target);
      slot = e.next;
    } else {
      placed = place_edge(a, clone, a.tokens[from], from + 1);
      spine = false;
    }
    (tail == kNone ? a.states[clone].head : a.edges[tail].next) = placed;
    tail = placed;
  }
  return true;
}

// Splits off of `q` the strings of at most `len` tokens; edges by `token` from `p` and its suffixes follow.
template <class Room>
LONGGRAFT_CALL int32_t split(Automaton& a, int32_t p, int32_t q, int32_t token, Room& room) {
  int32_t clone = -1 - a.num_clones;
  a.states[clone] = State{a.states[q].link, a.states[q].count, a.states[q].last_end, kNone};
  a.clone_lens[clone] = state_len(a, p) + 1;
  ++a.num_clones;
  if (!copy_edges(a, q, clone, room)) return kNone;
  a.states[q].link = clone;
  for (; p != kNone; p = a.states[p].link, ++a.steps) {
    // A spine edge is never redirected: it always leads to a state exactly one longer.
    int32_t slot = find_slot(a, p, token);
    if (slot == kNone || a.edges[slot].target != q) break;
    a.edges[slot].target = clone;
  }
  return clone;
}

// Counts the newest end in every suffix that occurred before; the walk is capped, so counts may be too low.
LONGGRAFT_HD void credit(Automaton& a) {
  int32_t p = a.states[a.size].link;
  a.match_len = state_len(a, p);
  a.match_end = p == kRoot ? 0 : a.states[p].last_end;
  for (int32_t k = 0; k < kWalkCap && p != kRoot; ++k, p = a.states[p].link) {
    ++a.states[p].count;
    a.states[p].last_end = a.size;
    ++a.steps;
  }
}

LONGGRAFT_HD void start(Automaton& a) {
  a.size = a.num_clones = a.num_edges = a.match_len = a.match_end = 0;
  a.steps = 0;
  a.states[kRoot] = State{kNone, 0, 0, kNone};
}

// Appends one token (or kSentinel). `room(a, n)` must make space for n more edges and one more state of each
// kind, and may move the arrays. Returns false, with the automaton unusable, if it cannot.
template <class Room>
LONGGRAFT_CALL bool append(Automaton& a, int32_t token, Room& room) {
  if (!room(a, 1)) return false;
  int32_t p = a.size;  // the whole text; its edge is the spine edge
  int32_t fresh = p + 1;
  a.tokens[p] = token;
  a.states[fresh] = State{kRoot, 1, fresh, kNone};
  a.size = fresh;
  if (token != kSentinel) {
    int32_t q = kNone;
    for (p = a.states[p].link; p != kNone; p = a.states[p].link) {
      ++a.steps;
      q = follow(a, p, token);
      if (q != kNone) break;
      if (!room(a, 1)) return false;
      add_edge(a, p, token, fresh);
    }
    if (p != kNone && state_len(a, p) + 1 != state_len(a, q)) q = split(a, p, q, token, room);
    if (p != kNone) {
      if (q == kNone) return false;
      a.states[fresh].link = q;
    }
  }
  credit(a);
  return true;
}

// The slots of the newest edges of a state. `a.newest` must not be null. One thread at a time.
LONGGRAFT_HD const NewestEdges& newest_slots(const Automaton& a, int32_t state) {
  NewestEdges& list = a.newest[(((uint32_t)state * 0x9e3779b9u) >> 8) & a.newest_mask];
  int32_t head = a.states[state].head;
  if (list.state == state && list.head == head) return list;
  int32_t fresh[kNewestEdges];
  int32_t n = 0, slot = head;
  int32_t known = list.state == state ? list.head : kNone;
  for (; n < kNewestEdges && slot != kNone && slot != known; slot = a.edges[slot].next) fresh[n++] = slot;
  int32_t kept = 0;  // what was known follows what is new
  if (slot != kNone && slot == known) kept = list.n < kNewestEdges - n ? list.n : kNewestEdges - n;
  for (int32_t i = kept; i-- > 0;) list.slots[n + i] = list.slots[i];
  for (int32_t i = 0; i < n; ++i) list.slots[i] = fresh[i];
  list.state = state;
  list.head = head;
  list.n = n + kept;
  return list;
}

LONGGRAFT_HD Cursor text_end(const Automaton& a) {
  int32_t s = a.size == 0 ? kRoot : a.states[a.size].link;
  return Cursor{s, state_len(a, s)};
}

// Cursor after one more token of a virtual path. A walk longer than kWalkCap gives up all but that token.
LONGGRAFT_CALL Cursor advance(const Automaton& a, Cursor c, int32_t token) {
  for (int32_t k = 0; k <= kWalkCap; ++k) {
    int32_t target = follow(a, c.state, token);
    if (target != kNone) return Cursor{target, c.length + 1};
    if (c.state == kRoot) return Cursor{kRoot, 0};
    int32_t up = a.states[c.state].link;
    c = Cursor{up, state_len(a, up)};
  }
  int32_t target = follow(a, kRoot, token);
  return Cursor{target == kNone ? kRoot : target, target == kNone ? 0 : 1};
}

}  // namespace longgraft
