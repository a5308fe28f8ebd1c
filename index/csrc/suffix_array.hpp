// Suffix array of a reversed text, limited in depth: its ends, sorted by what stands before them. Knows no Python and no files.
//
// An end e (1 to n) is a number of tokens. Its context is tokens[e - 1], tokens[e - 2], ... for kDepth tokens, or up to a
// sentinel (-1) or the start of the text, which both sort before every token. Equal contexts are sorted by end. Read
// backwards, the longest suffix of a query that occurs is the longest shared prefix, which one binary search finds.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace longgraft {

constexpr int32_t kDepth = 32;

class EndSorter {
 public:
  EndSorter(const int32_t* tokens, int64_t n, int32_t* ends) : tokens_(tokens), n_(n), ends_(ends) {}

  // O(n log n + n * depth), whatever the text. The order is unique.
  void sort() {
    int32_t highest = -1;
    for (int64_t i = 0; i < n_; ++i) highest = std::max(highest, tokens_[i]);
    if (highest > std::max<int64_t>(4 * n_, 1 << 16)) return sort_from(0, n_, 0, true);
    sort_by_last((size_t)highest + 2);
  }

 private:
  // Two tokens of context; a half that is 0 says that the context ended there.
  struct Item {
    uint64_t key;
    int32_t end;
    bool operator<(const Item& other) const { return key != other.key ? key < other.key : end < other.end; }
  };

  uint64_t digit(int32_t end, int32_t depth) const {
    int64_t place = (int64_t)end - 1 - depth;
    return place < 0 ? 0 : (uint64_t)tokens_[place] + 1;
  }

  uint64_t key(int32_t end, int32_t depth) const {
    uint64_t first = digit(end, depth) << 32;
    return first == 0 || depth + 1 >= kDepth ? first : first | digit(end, depth + 1);
  }

  // Ids are dense, so the last token sorts by counting; each group then fits a cache far more often than the whole.
  void sort_by_last(size_t num_groups) {
    std::vector<int64_t> begins(num_groups + 1, 0);
    for (int64_t i = 0; i < n_; ++i) ++begins[(size_t)(tokens_[i] + 2)];
    for (size_t g = 1; g <= num_groups; ++g) begins[g] += begins[g - 1];
    std::vector<int64_t> next(begins.begin(), begins.end() - 1);
    for (int64_t i = 0; i < n_; ++i) ends_[next[(size_t)(tokens_[i] + 1)]++] = (int32_t)(i + 1);
    for (size_t g = 1; g < num_groups; ++g) sort_from(begins[g], begins[g + 1], 1, false);  // group 0: sentinels
  }

  void sort_from(int64_t begin, int64_t end, int32_t depth, bool fill) {
    if (fill)
      for (int64_t i = begin; i < end; ++i) ends_[i] = (int32_t)(i + 1);
    if (end - begin < 2) return;
    items_.resize((size_t)(end - begin));
    for (int64_t i = begin; i < end; ++i) items_[(size_t)(i - begin)].end = ends_[i];
    refine(items_.data(), items_.data() + (end - begin), depth);
    for (int64_t i = begin; i < end; ++i) ends_[i] = items_[(size_t)(i - begin)].end;
  }

  // Sort items that agree in `depth` tokens. Copies of one text agree for long: nothing is sorted there, only read.
  void refine(Item* begin, Item* end, int32_t depth) {
    bool is_sorted = true;
    for (Item* item = begin; item < end; ++item) {
      item->key = key(item->end, depth);
      is_sorted = is_sorted && (item == begin || !(*item < item[-1]));
    }
    if (!is_sorted) std::sort(begin, end);
    if (depth + 2 >= kDepth) return;
    for (Item* run = begin; run < end;) {
      Item* stop = run + 1;
      while (stop < end && stop->key == run->key) ++stop;
      bool has_ended = run->key >> 32 == 0 || (uint32_t)run->key == 0;
      if (stop - run > 1 && !has_ended) refine(run, stop, depth + 2);
      run = stop;
    }
  }

  const int32_t* tokens_;
  int64_t n_;
  int32_t* ends_;
  std::vector<Item> items_;
};

}  // namespace longgraft
