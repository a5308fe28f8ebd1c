// Python's view: addresses and sizes in, nothing out. kernels/rows_linear.py, int8_linear.py, int4_linear.py,
// rms_norm.py and native.py check them.

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "attention.hpp"
#include "int4_pack.hpp"
#include "packed.hpp"
#include "processor.hpp"
#include "rows_linear.hpp"
#include "norm.hpp"
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
  static const Processor processor = inspect_processor();  // under a hypervisor asking takes 50 us; asked per layer
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

const char* best_packed_kernel() {
  for (const char* name : {"vnni", "avx512", "avx2"})
    if (packed::has_kernel(name)) return name;
  return "plain";
}

// bits of a weight: 8 or 4; addresses: x, values, scales, bias, y; sizes: rows, in, out
void packed_linear(int bits, const char* kernel, const std::array<Address, 5>& at,
                   const std::array<std::int64_t, 3>& sizes, int dtype, int threads) {
  const packed::Linear problem{reinterpret_cast<const void*>(at[0]),
                               reinterpret_cast<const std::uint8_t*>(at[1]),
                               reinterpret_cast<const float*>(at[2]),
                               reinterpret_cast<const float*>(at[3]),
                               reinterpret_cast<void*>(at[4]),
                               sizes[0],
                               sizes[1],
                               sizes[2],
                               static_cast<Dtype>(dtype)};
  if (!packed::compute(bits, kernel, problem, threads))
    throw nb::value_error("this processor or build has no such kernel");
}

// addresses: weight, tries, values; sizes: panels, blocks, inputs, number of tries
void pack_int4(const std::array<Address, 3>& at, const std::array<std::int64_t, 4>& sizes, int lines, int threads) {
  const int4::Packing packing{reinterpret_cast<const float*>(at[0]),
                              sizes[0],
                              sizes[1],
                              sizes[2],
                              reinterpret_cast<const int4::Try*>(at[1]),
                              sizes[3],
                              lines,
                              reinterpret_cast<std::uint8_t*>(at[2])};
  int4::pack(packing, threads);
}

// keys, values, rows, strides of keys (row, head), strides of values
using RunNumbers = std::array<std::int64_t, 7>;

attention::Run run(const RunNumbers& n) {
  return {reinterpret_cast<const void*>(n[0]), reinterpret_cast<const void*>(n[1]), n[2], n[3], n[4], n[5], n[6]};
}

// shape: rows, heads, kv_heads, key_size, value_size, window; query, mask: address and two strides; sinks: address, dtype.
void attend(const std::string& kernel, int threads, int dtype, const std::array<std::int64_t, 6>& shape,
            const std::array<std::int64_t, 3>& query, std::int64_t out, const std::vector<RunNumbers>& prefix,
            const RunNumbers& tree, const std::array<std::int64_t, 3>& mask, const std::vector<std::int64_t>& positions,
            const std::array<std::int64_t, 2>& sinks, float scale, float softcap) {
  std::vector<attention::Run> runs;
  for (const RunNumbers& numbers : prefix) runs.push_back(run(numbers));
  attention::Problem problem{};
  problem.dtype = static_cast<Dtype>(dtype);
  problem.rows = shape[0], problem.heads = shape[1], problem.kv_heads = shape[2];
  problem.key_size = shape[3], problem.value_size = shape[4], problem.window = shape[5];
  problem.query = reinterpret_cast<const void*>(query[0]);
  problem.query_row = query[1], problem.query_head = query[2];
  problem.out = reinterpret_cast<void*>(out);
  problem.runs = runs.data(), problem.run_count = std::int64_t(runs.size());
  problem.tree = run(tree);
  problem.mask = reinterpret_cast<const std::uint8_t*>(mask[0]);
  problem.mask_row = mask[1], problem.mask_column = mask[2];
  problem.positions = positions.data();
  problem.sinks = reinterpret_cast<const void*>(sinks[0]), problem.sink_dtype = static_cast<Dtype>(sinks[1]);
  problem.scale = scale, problem.softcap = softcap;
  if (!attention::attend(kernel.c_str(), problem, threads)) throw nb::value_error("no such attention kernel");
}

void norm(const char* kernel, Address x, Address weight, Address y, std::int64_t rows, std::int64_t size, int dtype,
          int style, float eps, int threads) {
  const rms::Norm problem{reinterpret_cast<const void*>(x), reinterpret_cast<const void*>(weight),
                              reinterpret_cast<void*>(y),       rows,
                              size,                             static_cast<Dtype>(dtype),
                              static_cast<rms::Style>(style), eps};
  if (!rms::norm(kernel, problem, threads)) throw nb::value_error("this processor or build has no such kernel");
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("best_kernel", best_kernel);
  m.def("team_runtime", team_runtime);
  m.def("multiplies", multiplies);
  m.def("linear", linear, nb::call_guard<nb::gil_scoped_release>());
  m.def("best_packed_kernel", best_packed_kernel);
  m.def("packed_linear", packed_linear, nb::call_guard<nb::gil_scoped_release>());
  m.def("pack_int4", pack_int4, nb::call_guard<nb::gil_scoped_release>());
  m.def("norm", norm, nb::call_guard<nb::gil_scoped_release>());
  m.def("attend", attend, nb::call_guard<nb::gil_scoped_release>());
}
