// Picks a kernel of packed weights for this processor and cuts the work for the threads.

#include "packed.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "int4.hpp"
#include "int8.hpp"
#include "processor.hpp"
#include "team.hpp"

namespace longgraft::packed {
namespace {

constexpr std::int64_t kRowBlock = 512;       // rows per pass over the weight: bounds the scratch
constexpr std::int64_t kWholeAlone = 1 << 15;  // fewer elements than this are made whole by the caller alone
constexpr std::align_val_t kLine{64};

struct Free {
  void operator()(char* data) const { ::operator delete(data, kLine); }
};
using Memory = std::unique_ptr<char, Free>;

Memory allocate(std::int64_t bytes) {
  return Memory(static_cast<char*>(::operator new(static_cast<std::size_t>(bytes), kLine)));
}

const Kernel* find(int bits, const char* name) {
  static const Processor processor = inspect_processor();  // under a hypervisor asking is slow
  const bool is_four = bits == 4;
  const std::pair<const Kernel*, bool> kernels[] = {
      {is_four ? &int4::vnni_kernel : &int8::vnni_kernel, processor.avx512 && processor.vnni},
      {is_four ? &int4::avx512_kernel : &int8::avx512_kernel, processor.avx512},
      {is_four ? &int4::avx2_kernel : &int8::avx2_kernel, processor.avx2},
      {is_four ? &int4::plain_kernel : &int8::plain_kernel, true}};
  for (const auto& [kernel, runs] : kernels)
    if (runs && kernel->name && std::strcmp(kernel->name, name) == 0) return kernel;
  return nullptr;
}

// What the threads of one region share. Whoever comes takes the next row or panel.
struct Shared {
  const Kernel& kernel;
  const Plan& plan;
  std::atomic<std::int64_t> taken{0};
};

void make_rows_whole(void* context) {
  Shared& shared = *static_cast<Shared*>(context);
  std::int64_t row;
  while ((row = shared.taken.fetch_add(1)) < shared.plan.rows) shared.kernel.make_whole(shared.plan, row);
}

void compute_panels(void* context) {
  Shared& shared = *static_cast<Shared*>(context);
  const std::int64_t panels = shared.plan.linear.panels();
  std::int64_t next, now = shared.taken.fetch_add(1);
  for (; now < panels; now = next) {
    next = shared.taken.fetch_add(1);
    shared.kernel.panel(shared.plan, now, next < panels ? next : now);
  }
}

}  // namespace

bool has_kernel(const char* name) { return find(8, name) != nullptr; }

bool compute(int bits, const char* name, const Linear& linear, int threads) {
  const Kernel* kernel = find(bits, name);
  if (!kernel) return false;
  const Layout& layout = kernel->layout;
  const std::int64_t block = std::min(linear.rows, kRowBlock), blocks = ceil_div(linear.in, layout.block_inputs);
  if (block <= 0) return true;
  const std::int64_t width = blocks * layout.block_inputs, sums = ceil_div(linear.in, layout.sum_inputs);
  const std::int64_t elements = ceil_div(block * width * kernel->element_bytes, 64) * 64;
  const std::int64_t scales = block * linear.groups() * std::int64_t(sizeof(float));
  const Memory scratch = allocate(elements + scales + block * sums * 4);
  char* const after = scratch.get() + elements;
  for (std::int64_t first = 0; first < linear.rows; first += block) {
    const std::int64_t rows = std::min(block, linear.rows - first);
    const Plan plan{linear, first, rows, ceil_div(rows, kernel->tile_rows), blocks, blocks * layout.block_bytes,
                    width, linear.groups(), sums, scratch.get(), reinterpret_cast<float*>(after), after + scales};
    Shared shared{*kernel, plan};
    run_team(rows * width < kWholeAlone ? 1 : threads, make_rows_whole, &shared);
    shared.taken = 0;
    run_team(threads, compute_panels, &shared);
  }
  return true;
}

}  // namespace longgraft::packed
