// Python bindings of corpora: sorting a text's ends, and searching segments. Buffers are Python's; they are kept alive here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "corpus_search.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace longgraft;

namespace {

template <class T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

using Rows = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void sort_ends(Array<const int32_t> tokens, Array<int32_t> ends) {
  if (tokens.shape(0) != ends.shape(0) || tokens.shape(0) >= (1ull << 31)) throw std::invalid_argument("sizes");
  int64_t n = (int64_t)tokens.shape(0);
  for (int64_t i = 0; i < n; ++i)
    if (tokens.data()[i] < -1) throw std::invalid_argument("tokens below -1");
  nb::gil_scoped_release release;
  EndSorter(tokens.data(), n, ends.data()).sort();
}

uint32_t crc32_of(Array<const uint8_t> data) { return crc32(data.data(), (int64_t)data.shape(0)); }

class Segments {
 public:
  // `data`: the mapped file; `sums`, `checked`: one a page; tokens and ends [n] begin at these bytes of it.
  void add(Array<const uint8_t> data, Array<const uint32_t> sums, Array<uint8_t> checked, int64_t tokens_at,
           int64_t ends_at, int64_t n, Array<const int32_t> starts) {
    int64_t num_bytes = (int64_t)data.shape(0), num_pages = (num_bytes + kPageBytes - 1) >> kPageBits;
    bool fits = n > 0 && n < (1ll << 31) && tokens_at >= 0 && ends_at >= 0 && tokens_at % 4 == 0 && ends_at % 4 == 0 &&
                tokens_at <= num_bytes - 4 * n && ends_at <= num_bytes - 4 * n &&
                (int64_t)sums.shape(0) == num_pages && (int64_t)checked.shape(0) == num_pages && starts.shape(0) >= 2;
    if (!fits) throw std::invalid_argument("a segment's arrays do not fit its file");
    Pages pages{data.data(), num_bytes, sums.data(), checked.data()};
    searcher_.segments.push_back(Segment{pages, tokens_at, ends_at, (int32_t)n, starts.data(), (int32_t)starts.shape(0) - 1});
    bases_.push_back(total_);
    total_ += n;
    held_.push_back(nb::make_tuple(data, sums, checked, starts));
  }

  // Fills `ends` and returns (match_len, count, number of ends); (-1, segment, page) where the file is corrupted.
  nb::tuple lookup(Array<const int32_t> context, int32_t min_match, Array<int64_t> ends) {
    int32_t reversed[kDepth];
    int32_t n = 0;
    for (size_t i = context.shape(0); i-- > 0 && n < kDepth && context.data()[i] >= 0;) reversed[n++] = context.data()[i];
    int64_t count = 0;
    try {
      int32_t match_len = searcher_.lookup(Query{reversed, n}, min_match, ends.shape(0), count, picks_);
      for (size_t i = 0; i < picks_.size(); ++i) ends.data()[i] = bases_[picks_[i].segment] + picks_[i].end;
      return nb::make_tuple(match_len, count, picks_.size());
    } catch (const Corrupted& where) {
      return nb::make_tuple(-1, searcher_.reading, where.page);
    }
  }

  // Fills the rows of `out` with what stands behind each end; returns as `lookup`, with 0 for success.
  nb::tuple follow(Array<const int64_t> ends, int32_t vocab_size, Rows out) {
    if (out.shape(0) != ends.shape(0)) throw std::invalid_argument("sizes");
    size_t segment = 0;
    try {
      for (size_t i = 0; i < ends.shape(0); ++i) {
        int64_t end = ends.data()[i];
        if (end < 1 || end > total_) throw std::invalid_argument("an end lies outside the segments");
        segment = (size_t)(std::lower_bound(bases_.begin(), bases_.end(), end) - bases_.begin()) - 1;
        int32_t* row = out.data() + i * out.shape(1);
        searcher_.segments[segment].follow((int32_t)(end - bases_[segment]), vocab_size, row, (int64_t)out.shape(1));
      }
    } catch (const Corrupted& where) {
      return nb::make_tuple(-1, segment, where.page);
    }
    return nb::make_tuple(0, 0, 0);
  }

 private:
  Searcher searcher_;
  std::vector<int64_t> bases_;
  std::vector<nb::object> held_;
  std::vector<Pick> picks_;
  int64_t total_ = 0;
};

}  // namespace

NB_MODULE(_corpus, m) {
  m.attr("DEPTH") = kDepth;
  m.attr("PAGE_BYTES") = kPageBytes;
  m.def("sort_ends", &sort_ends, "tokens"_a, "ends"_a);
  m.def("crc32", &crc32_of, "data"_a);
  nb::class_<Segments>(m, "Segments")
      .def(nb::init<>())
      .def("add", &Segments::add, "data"_a, "sums"_a, "checked"_a, nb::kw_only(), "tokens_at"_a, "ends_at"_a, "n"_a, "starts"_a)
      .def("lookup", &Segments::lookup, "context"_a, "min_match"_a, "ends"_a)
      .def("follow", &Segments::follow, "ends"_a, "vocab_size"_a, "out"_a);
}
