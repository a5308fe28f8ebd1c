// Where each row finds its keys: cuts the rows into stripes and lists, per row, the keys by their position.
#pragma once

#include <vector>

#include "attention_kernel.hpp"

namespace longgraft::attention {

// A stripe and the arrays it points to; not to be copied.
class Layout {
 public:
  // Rows [first, last) behind `prefix` cached keys.
  Layout(const Problem& problem, std::int64_t prefix, std::int64_t first, std::int64_t last);
  Layout(Layout&&) = default;

  Stripe stripe{};

 private:
  void find_windows(const Problem& problem);
  void collect_own(const Problem& problem);
  void list_row(const Problem& problem, std::int64_t row);
  bool sees(const Problem& problem, std::int64_t row, std::int64_t key) const;

  std::vector<std::int64_t> low_;
  std::vector<std::int32_t> own_, slots_, counts_;
};

// All rows of `problem`, in stripes of nearly equal height.
std::vector<Layout> lay_out(const Problem& problem, std::int64_t prefix);

}  // namespace longgraft::attention
