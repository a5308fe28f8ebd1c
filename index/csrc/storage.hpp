// Owns the arrays of an Automaton on the host and grows them; the algorithm never allocates.
#pragma once
#include <cstdlib>
#include <cstring>
#include <new>

#include "suffix_automaton.hpp"

namespace longgraft {

class Storage {
 public:
  Automaton a{};

  Storage() { reset(); }
  ~Storage() { release(); }
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  void reset() {
    release();
    grow_states(64, 32);
    grow_edges(256);
    start(a);
  }

  // Space for n more tokens of ordinary text, so that a prompt is built without copying.
  void reserve(int64_t n) {
    int64_t want = a.size + n + 2;
    if (want > state_room_) grow_states(want + want / 64, clone_room_ > want / 2 ? clone_room_ : want / 2 + 16);
    int64_t slots = a.edge_mask + 1ll;
    while (slots < want + want / 3) slots *= 2;
    if (slots > a.edge_mask + 1ll) grow_edges(slots);
  }

  // The Room of append(): n more edges, one more prefix state, one more clone.
  bool operator()(Automaton&, int32_t n) {
    if (a.size + 2 > state_room_) grow_states(state_room_ + state_room_ / 2, clone_room_);
    if (a.num_clones + 1 > clone_room_) grow_states(state_room_, clone_room_ + clone_room_ / 2);
    int64_t slots = a.edge_mask + 1ll;
    while ((a.num_edges + (int64_t)n) * 4 > slots * 3) slots *= 2;
    if (slots > a.edge_mask + 1ll) grow_edges(slots);
    return true;
  }

  int64_t memory_bytes() const {
    return (int64_t)sizeof(State) * (state_room_ + clone_room_) + 4 * (state_room_ + clone_room_) +
           (int64_t)sizeof(Edge) * (a.edge_mask + 1ll);
  }

 private:
  int64_t state_room_ = 0, clone_room_ = 0;

  template <class T>
  static T* allocate(int64_t n) {
    void* block = std::malloc(sizeof(T) * (size_t)n);
    if (block == nullptr) throw std::bad_alloc();
    return static_cast<T*>(block);
  }

  void release() {
    if (state_room_) {
      std::free(a.states - clone_room_);
      std::free(a.clone_lens - clone_room_);
      std::free(a.tokens);
      std::free(a.edges);
    }
    a = Automaton{};
    state_room_ = clone_room_ = 0;
  }

  void grow_states(int64_t prefixes, int64_t clones) {
    State* states = allocate<State>(prefixes + clones) + clones;
    int32_t* lens = allocate<int32_t>(clones) + clones;
    int32_t* tokens = allocate<int32_t>(prefixes);
    if (state_room_) {
      int64_t used = a.num_clones;
      std::memcpy(states - used, a.states - used, sizeof(State) * (size_t)(used + a.size + 1));
      std::memcpy(lens - used, a.clone_lens - used, 4 * (size_t)used);
      std::memcpy(tokens, a.tokens, 4 * (size_t)a.size);
      std::free(a.states - clone_room_);
      std::free(a.clone_lens - clone_room_);
      std::free(a.tokens);
    }
    a.states = states;
    a.clone_lens = lens;
    a.tokens = tokens;
    state_room_ = prefixes;
    clone_room_ = clones;
  }

  // Moves every chain, in its order, into a table of `slots` slots.
  void grow_edges(int64_t slots) {
    Edge* old = a.edges;
    a.edges = allocate<Edge>(slots);
    for (int64_t i = 0; i < slots; ++i) a.edges[i].state = kNone;
    a.edge_mask = (uint32_t)(slots - 1);
    if (old == nullptr) return;
    a.num_edges = 0;
    for (int32_t s = -a.num_clones; s <= a.size; ++s) {
      int32_t slot = a.states[s].head, tail = kNone;
      a.states[s].head = kNone;
      for (; slot != kNone; slot = old[slot].next) {
        int32_t placed = place_edge(a, s, old[slot].token, old[slot].target);
        (tail == kNone ? a.states[s].head : a.edges[tail].next) = placed;
        tail = placed;
      }
    }
    std::free(old);
  }
};

}  // namespace longgraft
