// Python bindings of the index; the only native file that knows Python. Everything else is in the headers.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cmath>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "draft.hpp"
#include "integrity.hpp"
#include "storage.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace longgraft;

namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Doubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<int32_t, nb::shape<6, -1>, nb::c_contig, nb::device::cpu>;
using Rows = std::optional<nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>>;

template <class T, class Array>
std::vector<T> copy_of(const Array& array) {
  return std::vector<T>(array.data(), array.data() + array.shape(0));
}

Successors successors_of(const Rows& rows) {
  if (!rows) return Successors{nullptr, 0, 0};
  return Successors{rows->data(), (int32_t)rows->shape(0), (int32_t)rows->shape(1)};
}

// A new numpy array of n values taken from `get(i)`.
template <class T, class Get>
nb::object array_of(size_t n, Get get) {
  T* data = new T[n ? n : 1];
  for (size_t i = 0; i < n; ++i) data[i] = (T)get(i);
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(data, {n}, owner));
}

class Index {
 public:
  Index(Ints lengths, Doubles shares, Ints totals, Ints ages, Ints contexts, int num_orders, Doubles priors,
        double prior_weight, double decay)
      : lengths_(copy_of<int32_t>(lengths)),
        totals_(copy_of<int32_t>(totals)),
        ages_(copy_of<int32_t>(ages)),
        contexts_(copy_of<int32_t>(contexts)),
        shares_(copy_of<double>(shares)),
        priors_(copy_of<double>(priors)),
        hazards_(priors_),
        trials_(priors_.size(), 0.0),
        hits_(priors_.size(), 0.0) {
    r_.lengths = {lengths_.data(), (int32_t)lengths_.size()};
    r_.totals = {totals_.data(), (int32_t)totals_.size()};
    r_.ages = {ages_.data(), (int32_t)ages_.size()};
    r_.contexts = {contexts_.data(), (int32_t)contexts_.size()};
    r_.shares = {shares_.data(), (int32_t)shares_.size()};
    r_.num_orders = num_orders;
    r_.successor_base =
        (r_.lengths.n + 1) * (r_.shares.n + 1) * (r_.totals.n + 1) * num_orders * (r_.ages.n + 1);
    r_.recent_base = r_.successor_base + kMaxSuccessors * (r_.contexts.n + 1);
    r_.num_cells = r_.recent_base + kMaxRecent;
    if ((size_t)r_.num_cells != priors_.size()) throw std::invalid_argument("one prior per cell expected");
    r_.priors = priors_.data();
    r_.hazards = hazards_.data();
    r_.trials = trials_.data();
    r_.hits = hits_.data();
    r_.prior_weight = prior_weight;
    r_.decay = decay;
  }

  // Appends the tokens, or none of them: returns the first one outside [-1, vocab_size), else -1. Where memory
  // runs out the index is emptied.
  int64_t extend(Ints tokens, bool learn_from, const Rows& rows, int64_t vocab_size) {
    int64_t n = (int64_t)tokens.shape(0);
    const int32_t* t = tokens.data();
    for (int64_t i = 0; i < n; ++i)
      if (t[i] < kSentinel || t[i] >= vocab_size) return i;
    if (n > kMaxTokens - size()) throw std::length_error("more tokens than an index holds");
    Successors successors = successors_of(rows);
    try {
      if (n > 64) store_.reserve(n);
      for (int64_t i = 0; i < n; ++i) {
        if (i + kAhead < n) prefetch(&store_.a.edges[edge_slot(store_.a, kRoot, t[i + kAhead])]);
        if (learn_from) learn(store_.a, r_, successors, t[i]);
        append(store_.a, t[i], store_);
      }
    } catch (const std::bad_alloc&) {
      reset();
      throw;
    }
    return -1;
  }

  // Keeps a copy of the automaton for truncate(). The earliest copy stays, the latest one gives way.
  void mark() {
    if (!marks_.empty() && marks_.back().a.size == store_.a.size) return;
    if (marks_.size() == kMaxMarks) marks_.pop_back();
    marks_.emplace_back(store_);
  }

  // The nearest mark and the tokens after it, or all tokens, appended anew.
  void truncate(int64_t n) {
    while (!marks_.empty() && marks_.back().a.size > n) marks_.pop_back();
    int64_t from = marks_.empty() ? 0 : marks_.back().a.size;
    std::vector<int32_t> kept(store_.a.tokens + from, store_.a.tokens + n);
    try {
      if (marks_.empty()) {
        store_.reset();
        store_.reserve(n);
      } else {
        store_.restore(marks_.back());
      }
      for (int32_t token : kept) append(store_.a, token, store_);
    } catch (const std::bad_alloc&) {
      reset();
      throw;
    }
  }

  void forget() {
    hazards_ = priors_;
    std::fill(trials_.begin(), trials_.end(), 0.0);
    std::fill(hits_.begin(), hits_.end(), 0.0);
  }

  void reset() {
    marks_.clear();
    store_.reset();
    forget();
  }

  // Takes over what learnt() of another index gave.
  void set_learnt(Doubles trials, Doubles hits) {
    size_t n = priors_.size();
    if (trials.shape(0) != n || hits.shape(0) != n) throw std::invalid_argument("one value per cell expected");
    for (size_t i = 0; i < n; ++i) {
      trials_[i] = trials.data()[i];
      hits_[i] = hits.data()[i];
      hazards_[i] = priors_[i];
      if (trials_[i] > 0.0)
        hazards_[i] = (r_.prior_weight * priors_[i] + hits_[i]) / (r_.prior_weight + trials_[i]);
    }
  }

  // (length, length of the link, count, last end) of every state but the root.
  nb::object states() const {
    const Automaton& a = store_.a;
    std::vector<int32_t> out;
    out.reserve((size_t)(a.size + (int64_t)a.num_clones) * 4);
    for (int32_t s = -a.num_clones; s <= a.size; ++s) {
      const State& state = a.states[s];
      if (s == kRoot) continue;
      out.insert(out.end(), {state_len(a, s), state_len(a, state.link), state.count, state.last_end});
    }
    return array_of<int32_t>(out.size(), [&](size_t i) { return out[i]; });
  }

  // The arrays of an automaton that takes `room` more tokens of any kind without growing (a clone and, all told,
  // two explicit edges a token at most): states, clone_lens, tokens, edges, and its counts: size, clones, edges,
  // match length, match end, room for prefixes and for clones, slots.
  nb::tuple image(int64_t room) const {
    int64_t n = size() + room, slots = 256;
    while (slots * 3 < 8 * n) slots *= 2;
    Storage copy(store_, Rooms{n + 2, store_.a.num_clones + room + 2, slots});
    const Rooms& rooms = copy.rooms();
    const Automaton& a = copy.a;
    const int32_t* states = reinterpret_cast<const int32_t*>(copy.first_state());
    const int32_t* edges = reinterpret_cast<const int32_t*>(a.edges);
    const int64_t unused = rooms.clones - a.num_clones, used = rooms.clones + a.size + 1;
    const int64_t counts[] = {a.size,      a.num_clones,   a.num_edges,  a.match_len,
                              a.match_end, rooms.prefixes, rooms.clones, rooms.slots};
    auto cut = [](const int32_t* from, int64_t n, int64_t first, int64_t last) {
      return array_of<int32_t>((size_t)n, [=](size_t i) { return (int64_t)i < first || (int64_t)i >= last ? 0 : from[i]; });
    };
    return nb::make_tuple(cut(states, 4 * (rooms.clones + rooms.prefixes), 4 * unused, 4 * used),
                          cut(copy.first_clone_len(), rooms.clones, unused, rooms.clones),
                          cut(a.tokens, rooms.prefixes, 0, a.size), cut(edges, 4 * rooms.slots, 0, 4 * rooms.slots),
                          array_of<int64_t>(8, [&](size_t i) { return counts[i]; }));
  }

  // Fills the rows of `out` (token, parent, score bits, match_len, origin, cell); returns the number of nodes.
  int32_t draft_tree(Table out, Ints path, double threshold, const Rows& rows) {
    int32_t budget = (int32_t)out.shape(1);
    if (nodes_.size() < (size_t)budget) {
      nodes_.resize(budget);
      queue_.resize(budget);
    }
    Draft d{nodes_.data(), queue_.data(), budget, threshold, 0, 0};
    draft(store_.a, r_, successors_of(rows), path.data(), (int32_t)path.shape(0), d);
    for (int32_t i = 0; i < d.num_nodes; ++i) {
      const Option& option = nodes_[i].option;
      float score = (float)std::log(option.probability);
      int32_t column[6] = {option.token, nodes_[i].parent, 0, option.match_len, option.origin, option.cell};
      std::memcpy(&column[2], &score, sizeof score);
      for (int32_t row = 0; row < 6; ++row) out(row, i) = column[row];
    }
    return d.num_nodes;
  }

  // All that is listed after the text and a path, in order.
  nb::tuple options(Ints path, const Rows& rows) const {
    const Automaton& a = store_.a;
    Cursor c = text_end(a);
    int32_t last_token = a.size ? a.tokens[a.size - 1] : kSentinel;
    for (size_t i = 0; i < path.shape(0); ++i) c = advance(a, c, last_token = path.data()[i]);
    Option out[kMaxOptions];
    Listing l = list_options(a, r_, successors_of(rows), c, last_token, 0.0, out);
    Child recent[kMaxRecent];
    list_recent(r_, recent, find_recent(a, recent), 0.0, l);
    size_t n = (size_t)l.n;
    return nb::make_tuple(array_of<int32_t>(n, [&](size_t i) { return out[i].token; }),
                          array_of<int32_t>(n, [&](size_t i) { return out[i].match_len; }),
                          array_of<int32_t>(n, [&](size_t i) { return out[i].origin; }),
                          array_of<int32_t>(n, [&](size_t i) { return out[i].cell; }),
                          array_of<double>(n, [&](size_t i) { return out[i].probability; }));
  }

  nb::tuple match() const { return nb::make_tuple(store_.a.match_len, store_.a.match_end); }
  int64_t size() const { return store_.a.size; }
  int64_t steps() const { return store_.a.steps; }
  int64_t memory_bytes() const {
    int64_t marks = 0;
    for (const Storage& mark : marks_) marks += mark.memory_bytes();
    return store_.memory_bytes() + marks + (int64_t)(8 * 4 * priors_.size()) +
           (int64_t)(nodes_.size() * 2 * sizeof(Pending));
  }
  nb::object tokens() const {
    return array_of<int32_t>((size_t)store_.a.size, [&](size_t i) { return store_.a.tokens[i]; });
  }
  nb::tuple learnt() const {
    return nb::make_tuple(array_of<double>(trials_.size(), [&](size_t i) { return trials_[i]; }),
                          array_of<double>(hits_.size(), [&](size_t i) { return hits_[i]; }));
  }
  const char* check_integrity() const { return check_automaton(store_.a); }

 private:
  static constexpr size_t kMaxMarks = 2;
  static constexpr int64_t kAhead = 8;  // tokens between asking for a root edge and looking it up

  Storage store_;
  std::vector<Storage> marks_;  // ever longer
  Ranking r_{};
  std::vector<int32_t> lengths_, totals_, ages_, contexts_;
  std::vector<double> shares_, priors_, hazards_, trials_, hits_;
  std::vector<Pending> nodes_, queue_;
};

}  // namespace

void bind_learnt(nb::module_& m);

NB_MODULE(_native, m) {
  bind_learnt(m);
  nb::dict caps;
  caps["WALK_CAP"] = kWalkCap;
  caps["MAX_LEVELS"] = kMaxLevels;
  caps["MAX_CHILDREN"] = kMaxChildren;
  caps["MAX_MATCHES"] = kMaxMatches;
  caps["MAX_SUCCESSORS"] = kMaxSuccessors;
  caps["MAX_RECENT"] = kMaxRecent;
  caps["RECENT_SCAN"] = kRecentScan;
  caps["RECENT_DISTINCT"] = kRecentDistinct;
  m.attr("CAPS") = caps;
  m.attr("MAX_TOKENS") = kMaxTokens;
  nb::class_<Index>(m, "Index")
      .def(nb::init<Ints, Doubles, Ints, Ints, Ints, int, Doubles, double, double>())
      .def("extend", &Index::extend, "token_ids"_a, "learn"_a, "successors"_a.none(), "vocab_size"_a)
      .def("mark", &Index::mark)
      .def("truncate", &Index::truncate)
      .def("forget", &Index::forget)
      .def("reset", &Index::reset)
      .def("draft", &Index::draft_tree, "out"_a, "path"_a, "threshold"_a, "successors"_a.none())
      .def("options", &Index::options, "path"_a, "successors"_a.none())
      .def("match", &Index::match)
      .def("tokens", &Index::tokens)
      .def("learnt", &Index::learnt)
      .def("set_learnt", &Index::set_learnt)
      .def("states", &Index::states)
      .def("image", &Index::image)
      .def("check_integrity", &Index::check_integrity)
      .def_prop_ro("memory_bytes", &Index::memory_bytes)
      .def_prop_ro("steps", &Index::steps)
      .def("__len__", &Index::size);
}
