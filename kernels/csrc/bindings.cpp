// Python's view: addresses and sizes in, nothing out. kernels/rows_linear.py checks them.

#include <nanobind/nanobind.h>

#include "processor.hpp"
#include "rows_linear.hpp"
#include "team.hpp"

namespace nb = nanobind;
using namespace longgraft;

namespace {

using Address = std::uintptr_t;

const char* best_kernel() {
  for (const char* name : {"avx512", "avx2"})
    if (find_kernel(name)) return name;
  return "plain";
}

bool multiplies(int dtype) {
  const Processor processor = inspect_processor();
  if (static_cast<Dtype>(dtype) == Dtype::bf16) return processor.multiplies_bf16;
  return static_cast<Dtype>(dtype) == Dtype::f32 || processor.multiplies_f16;
}

void linear(const char* kernel_name, Address x, Address weight, Address bias, Address y, std::int64_t rows,
            std::int64_t in, std::int64_t out, std::int64_t weight_stride, int dtype, int threads) {
  const Kernel* kernel = find_kernel(kernel_name);
  if (!kernel) throw nb::value_error("this processor or build has no such kernel");
  const Linear problem{reinterpret_cast<const void*>(x),
                       reinterpret_cast<const void*>(weight),
                       reinterpret_cast<const void*>(bias),
                       reinterpret_cast<void*>(y),
                       rows,
                       in,
                       out,
                       weight_stride,
                       static_cast<Dtype>(dtype)};
  rows_linear(*kernel, problem, threads);
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("best_kernel", best_kernel);
  m.def("team_runtime", team_runtime);
  m.def("multiplies", multiplies);
  m.def("linear", linear, nb::call_guard<nb::gil_scoped_release>());
}
