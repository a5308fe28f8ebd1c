// Owns the arrays of an Automaton on the host, grows and copies them; the algorithm never allocates.
#pragma once
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "suffix_automaton.hpp"

namespace longgraft {

struct Free {
  void operator()(void* block) const { std::free(block); }
};
template <class T>
using Block = std::unique_ptr<T[], Free>;

// Uninitialised memory. Large blocks ask for huge pages: random reads over 60 MB miss the TLB less (measured at
// 1M tokens: builds 20 % faster).
template <class T>
Block<T> allocate(int64_t n) {
  constexpr size_t kHuge = size_t(2) << 20;
  size_t bytes = sizeof(T) * (size_t)(n > 0 ? n : 1);
  void* block;
#if defined(__linux__)
  if (bytes >= 8 * kHuge) {
    bytes = (bytes + kHuge - 1) & ~(kHuge - 1);
    block = std::aligned_alloc(kHuge, bytes);
    if (block != nullptr) madvise(block, bytes, MADV_HUGEPAGE);
  } else
#endif
    block = std::malloc(bytes);
  if (block == nullptr) throw std::bad_alloc();
  return Block<T>(static_cast<T*>(block));
}

// Room for so many prefix states, clones and slots of edges (a power of two).
struct Rooms {
  int64_t prefixes, clones, slots;
};

class Storage {
 public:
  Automaton a{};

  Storage() { reset(); }
  // A copy with no room to spare.
  Storage(const Storage& other) : Storage(other, Rooms{other.a.size + 1ll, other.a.num_clones, 0}) {}
  // A copy with at least that much room (and no fewer slots than `other` has).
  Storage(const Storage& other, const Rooms& rooms) { copy(other, rooms); }
  Storage(Storage&&) = default;
  Storage& operator=(const Storage&) = delete;

  void reset() {
    a = Automaton{};
    edges_.reset();
    rooms_ = Rooms{0, 0, 0};
    grow_states(64, 32);
    grow_edges(256);
    start(a);
  }

  // Becomes what `other` is, keeping its own room.
  void restore(const Storage& other) {
    int64_t slots = rooms_.slots;
    copy(other, Rooms{rooms_.prefixes, rooms_.clones, 0});
    if (slots > rooms_.slots) grow_edges(slots);
  }

  // Space for n more tokens of ordinary text, so that a prompt is built without copying.
  void reserve(int64_t n) {
    int64_t want = a.size + n + 2;
    if (want > rooms_.prefixes)
      grow_states(want + want / 64, rooms_.clones > want / 2 ? rooms_.clones : want / 2 + 16);
    int64_t slots = rooms_.slots;
    while (slots < want + want / 3) slots *= 2;
    if (slots > rooms_.slots) grow_edges(slots);
  }

  // The Room of append(): n more edges, one more prefix state, one more clone.
  bool operator()(Automaton&, int32_t n) {
    if (a.size + 2 > rooms_.prefixes) grow_states(rooms_.prefixes + rooms_.prefixes / 2 + 2, rooms_.clones);
    if (a.num_clones + 1 > rooms_.clones) grow_states(rooms_.prefixes, rooms_.clones + rooms_.clones / 2 + 1);
    int64_t slots = rooms_.slots;
    while ((a.num_edges + (int64_t)n) * 4 > slots * 3) slots *= 2;
    if (slots > rooms_.slots) grow_edges(slots);
    return true;
  }

  const Rooms& rooms() const { return rooms_; }
  // Where the arrays begin: clones lie before the prefix states.
  State* first_state() const { return states_.get(); }
  int32_t* first_clone_len() const { return clone_lens_.get(); }

  int64_t memory_bytes() const {
    return (int64_t)(sizeof(State) + 4) * (rooms_.prefixes + rooms_.clones) + (int64_t)sizeof(Edge) * rooms_.slots +
           (int64_t)sizeof(NewestEdges) * places_;
  }

 private:
  Rooms rooms_{0, 0, 0};
  int64_t places_ = 0;  // of newest_
  Block<State> states_;
  Block<int32_t> clone_lens_, tokens_;
  Block<Edge> edges_;
  Block<NewestEdges> newest_;

  void copy(const Storage& other, const Rooms& rooms) {
    const Automaton& from = other.a;
    a = from;
    rooms_ = Rooms{1, from.num_clones, other.rooms_.slots};  // nothing to move out of the way but what `from` holds
    edges_ = allocate<Edge>(other.rooms_.slots);
    std::memcpy(edges_.get(), from.edges, sizeof(Edge) * (size_t)other.rooms_.slots);
    a.edges = edges_.get();
    int64_t clones = rooms.clones > from.num_clones ? rooms.clones : from.num_clones;
    grow_states(rooms.prefixes > from.size + 1 ? rooms.prefixes : from.size + 1, clones);
    clear_newest();
    if (rooms.slots > rooms_.slots) grow_edges(rooms.slots);
  }

  // Copies what `a` holds, wherever that lies, into blocks of the given sizes.
  void grow_states(int64_t prefixes, int64_t clones) {
    Block<State> states = allocate<State>(prefixes + clones);
    Block<int32_t> lens = allocate<int32_t>(clones), tokens = allocate<int32_t>(prefixes);
    if (rooms_.prefixes) {
      int64_t used = a.num_clones;
      std::memcpy(states.get() + clones - used, a.states - used, sizeof(State) * (size_t)(used + a.size + 1));
      std::memcpy(lens.get() + clones - used, a.clone_lens - used, 4 * (size_t)used);
      std::memcpy(tokens.get(), a.tokens, 4 * (size_t)a.size);
    }
    states_ = std::move(states);
    clone_lens_ = std::move(lens);
    tokens_ = std::move(tokens);
    a.states = states_.get() + clones;
    a.clone_lens = clone_lens_.get() + clones;
    a.tokens = tokens_.get();
    rooms_.prefixes = prefixes;
    rooms_.clones = clones;
  }

  // Moves every chain, in its order, into a table of `slots` slots.
  void grow_edges(int64_t slots) {
    Block<Edge> old = allocate<Edge>(slots);
    for (int64_t i = 0; i < slots; ++i) old[i].state = kNone;
    edges_.swap(old);
    a.edges = edges_.get();
    a.edge_mask = (uint32_t)(slots - 1);
    rooms_.slots = slots;
    clear_newest();
    a.num_edges = 0;
    if (old == nullptr) return;
    for (int32_t s = -a.num_clones; s <= a.size; ++s) {
      int32_t slot = a.states[s].head, tail = kNone;
      a.states[s].head = kNone;
      for (; slot != kNone; slot = old[slot].next) {
        int32_t placed = place_edge(a, s, old[slot].token, old[slot].target);
        (tail == kNone ? a.states[s].head : a.edges[tail].next) = placed;
        tail = placed;
      }
    }
  }

  // One place for each 128 slots: some 2 bytes a token.
  void clear_newest() {
    int64_t places = rooms_.slots / 128;
    if (places != places_) {
      places_ = 0;
      newest_ = allocate<NewestEdges>(places);
      places_ = places;
    }
    for (int64_t i = 0; i < places; ++i) newest_[i].state = kNone;
    a.newest = newest_.get();
    a.newest_mask = (uint32_t)(places - 1);
  }
};

}  // namespace longgraft
