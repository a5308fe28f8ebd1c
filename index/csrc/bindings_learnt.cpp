// Python face of the learnt index. Arrays in, arrays out; everything is checked here, nothing in the headers.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "fit.hpp"
#include "integrity.hpp"

namespace nb = nanobind;
using namespace longgraft;

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Grid = nb::ndarray<int32_t, nb::shape<5, -1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Doubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Shorts = nb::ndarray<const int16_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

namespace {

template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> to_numpy(std::vector<T> values) {
  auto* held = new std::vector<T>(std::move(values));
  nb::capsule owner(held, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(held->data(), {held->size()}, owner);
}

std::vector<double> checked_weights(const Doubles& weights) {
  bool is_right = (int32_t)weights.size() == kNumWeights;
  for (size_t i = 0; is_right && i < weights.size(); ++i) is_right = std::fabs(weights.data()[i]) <= 50.0;  // not NaN
  if (!is_right) throw nb::value_error(("weights: expected " + std::to_string(kNumWeights) + " numbers from -50 to 50").c_str());
  return {weights.data(), weights.data() + weights.size()};
}

struct RowsView {
  const int32_t* data = nullptr;
  int32_t vocab = 0, width = 0;
  explicit RowsView(const std::optional<Rows>& rows) {
    if (rows) data = rows->data(), vocab = (int32_t)rows->shape(0), width = (int32_t)rows->shape(1);
  }
};

// The index with what it borrows from Python kept alive.
struct Held {
  LearntIndex index;
  std::optional<Bytes> classes;
  double shrink;
  Held(const Doubles& weights, std::optional<Bytes> c, double rate, double s)
      : index(checked_weights(weights)), classes(std::move(c)), shrink(s) {
    if (!(rate >= 0.0 && rate <= 1.0)) throw nb::value_error("rate: expected 0 to 1");
    // Beyond 3/4 the score of a path could grow along it.
    if (!(shrink >= 0.0 && shrink <= 0.75)) throw nb::value_error("shrink: expected 0 to 0.75");
    index.logit.rate = rate;
    if (!classes) return;
    for (size_t i = 0; i < classes->size(); ++i)
      if (classes->data()[i] >= kNumClasses) throw nb::value_error("classes: expected numbers below 8");
    index.lister.classes = classes->data(), index.lister.num_classed = (int32_t)classes->size();
  }
};

int32_t first_wrong(const Ints& ids, int32_t vocab) {
  for (size_t i = 0; i < ids.size(); ++i)
    if (ids.data()[i] < kSentinel || ids.data()[i] >= vocab) return (int32_t)i;
  return -1;
}

// Where memory runs out the text is half written: the index is emptied.
template <class Change>
void all_or_nothing(LearntIndex& index, Change change) {
  try {
    change();
  } catch (const std::bad_alloc&) {
    index.reset();
    throw;
  }
}

int32_t extend(Held& h, Ints ids, bool follow, std::optional<Rows> rows, int32_t vocab) {
  int32_t wrong = first_wrong(ids, vocab);
  RowsView r(rows);
  if (wrong < 0)
    all_or_nothing(h.index, [&] { h.index.extend(ids.data(), (int32_t)ids.size(), follow, r.data, r.vocab, r.width); });
  return wrong;
}

int32_t extend_side(Held& h, Ints ids, int32_t vocab) {
  int32_t wrong = first_wrong(ids, vocab);
  if (wrong < 0) all_or_nothing(h.index, [&] { h.index.extend_side(ids.data(), (int32_t)ids.size()); });
  return wrong;
}

void hint(Held& h, Ints places, Doubles cosines) {
  bool is_right = places.size() == cosines.size();
  for (size_t i = 0; is_right && i < cosines.size(); ++i) is_right = std::isfinite(cosines.data()[i]);
  if (!is_right) throw nb::value_error("hint: expected a finite cosine for each place");
  h.index.lister.hints.clear();
  for (size_t i = 0; i < places.size() && i < (size_t)kMaxHints; ++i)
    h.index.lister.hints.push_back({places.data()[i], cosines.data()[i]});
}

// Rows of `out`: token, parent, score (float32 bits), match_len, place.
int32_t draft(Held& h, Grid out, Ints path, double threshold, std::optional<Rows> rows) {
  RowsView r(rows);
  const auto& nodes = h.index.draft((int32_t)out.shape(1), path.data(), (int32_t)path.size(), threshold, r.data, r.vocab, r.width);
  int32_t* at = out.data();
  size_t width = out.shape(1);
  for (size_t i = 0; i < nodes.size(); ++i) {
    const Drafted& n = nodes[i];
    // Of many estimates those come first that are too high: likely nodes are a little less likely than that.
    float score = (float)std::log(n.p * (1.0 - 4.0 * h.shrink * n.p * (1.0 - n.p)));
    int32_t bits;
    std::memcpy(&bits, &score, 4);
    at[i] = n.token, at[width + i] = n.parent, at[2 * width + i] = bits;
    at[3 * width + i] = n.match_len, at[4 * width + i] = n.place;
  }
  return (int32_t)nodes.size();
}

nb::tuple options(Held& h, Ints path, std::optional<Rows> rows) {
  RowsView r(rows);
  const List& list = h.index.options(path.data(), (int32_t)path.size(), r.data, r.vocab, r.width);
  std::vector<int32_t> tokens, lens, places;
  std::vector<double> p;
  for (const Listed& o : list.options)
    tokens.push_back(o.token), lens.push_back(o.match_len), places.push_back(o.place), p.push_back(o.p);
  for (size_t k = 0; k < list.recent.size(); ++k) {
    const Recent& recent = h.index.lister.recents()[list.recent[k]];
    tokens.push_back(recent.token), lens.push_back(0), places.push_back(recent.place), p.push_back(list.recent_p[k]);
  }
  return nb::make_tuple(to_numpy(tokens), to_numpy(lens), to_numpy(places), to_numpy(p), list.rest);
}

// Extends by generated tokens one by one and returns what was listed for each, as records for `Fit`.
nb::ndarray<nb::numpy, int16_t, nb::ndim<1>> record_all(Held& h, Ints ids, std::optional<Rows> rows) {
  if (first_wrong(ids, INT32_MAX) >= 0) throw nb::value_error("ids: expected none below -1");
  std::vector<int16_t> out;
  RowsView r(rows);
  for (size_t i = 0; i < ids.size(); ++i) {
    const List& list = h.index.list_end(r.data, r.vocab, r.width);
    record(list, h.index.lister.recents(), ids.data()[i], out);
    all_or_nothing(h.index, [&] { h.index.extend(ids.data() + i, 1, true, r.data, r.vocab, r.width); });
  }
  return to_numpy(std::move(out));
}

}  // namespace

void bind_learnt(nb::module_& m) {
  nb::class_<Held>(m, "LearntIndex")
      .def(nb::init<const Doubles&, std::optional<Bytes>, double, double>(), nb::arg("weights"), nb::arg("classes").none(), nb::arg("rate"),
           nb::arg("shrink"))
      .def("__len__", [](const Held& h) { return h.index.texts.own.size(); })
      .def_prop_ro("side_len", [](const Held& h) { return h.index.texts.side.size(); })
      .def("extend", &extend, nb::arg("ids"), nb::arg("follow"), nb::arg("rows").none(), nb::arg("vocab"))
      .def("extend_side", &extend_side)
      .def("clear_side", [](Held& h) { h.index.clear_side(); })
      .def("check_integrity", [](const Held& h) {
        std::string own = h.index.texts.own.check(), side = h.index.texts.side.check();
        std::string automaton = check_automaton(h.index.automaton.a);
        return !own.empty() ? own : !side.empty() ? side : automaton;
      })
      .def("begin", [](Held& h, int32_t n) { h.index.lister.prompt_len = n; })
      .def("hint", &hint, nb::arg("places"), nb::arg("cosines"))
      .def("draft", &draft, nb::arg("out").noconvert(), nb::arg("path"), nb::arg("threshold"), nb::arg("rows").none())
      .def("options", &options, nb::arg("path"), nb::arg("rows").none())
      .def("record", &record_all, nb::arg("ids"), nb::arg("rows").none())
      .def("truncate", [](Held& h, int32_t n) {
        if (n < 0 || n > h.index.texts.own.size()) throw nb::value_error("truncate: expected 0 to the length of the text");
        all_or_nothing(h.index, [&] { h.index.truncate(n); });
      })
      .def("reset", [](Held& h) { h.index.reset(); })
      .def("weights", [](const Held& h) { return to_numpy(h.index.logit.weights); })
      .def("tokens", [](const Held& h) { return to_numpy(h.index.texts.own.tokens); })
      .def("copy", [](const Held& h) {
        const Copy& c = h.index.copy();
        return nb::make_tuple(c.source, c.run, c.lost, c.left, c.since, c.pair, c.offset, c.second, c.success);
      })
      .def_prop_ro("num_pairs", [](const Held& h) { return h.index.pairs.size(); })
      .def_prop_ro("memory_bytes", [](const Held& h) { return h.index.texts.own.memory_bytes() + h.index.texts.side.memory_bytes() + h.index.automaton.memory_bytes(); });
  nb::class_<Fit>(m, "Fit")
      .def("__init__", [](Fit* self, Doubles start, double rate, double ridge) { new (self) Fit(checked_weights(start), rate, ridge); })
      .def("learn", [](Fit& f, Shorts records, uint64_t seed) {
        if (!are_records(records.data(), (int64_t)records.size())) throw nb::value_error("records: not what `record` returns");
        nb::gil_scoped_release release;
        return f.pass(records.data(), (int64_t)records.size(), seed);
      })
      .def("hold", [](Fit& f, Bytes flags) {
        if ((int32_t)flags.size() != kNumWeights) throw nb::value_error("hold: expected a flag for each weight");
        f.hold(flags.data());
      })
      .def("weights", [](const Fit& f) { return to_numpy(f.weights); });
  m.def("table_sizes", [] { return std::vector<int32_t>(kTableSizes, kTableSizes + kNumTables); });
}
