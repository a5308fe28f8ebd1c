// Picks an 8-bit kernel for this processor and cuts the work for the threads.

#include "int8.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "int8_kernel.hpp"
#include "processor.hpp"
#include "team.hpp"

namespace longgraft::int8 {
namespace {

constexpr std::int64_t kRowBlock = 512;           // rows per pass over the weight: bounds the scratch
constexpr std::int64_t kQuantizeAlone = 1 << 15;  // fewer elements than this are quantised by the caller alone
constexpr std::align_val_t kLine{64};

struct Free {
  void operator()(char* data) const { ::operator delete(data, kLine); }
};
using Memory = std::unique_ptr<char, Free>;

Memory allocate(std::int64_t bytes) {
  return Memory(static_cast<char*>(::operator new(static_cast<std::size_t>(bytes), kLine)));
}

const Kernel* find(const char* name) {
  static const Processor processor = inspect_processor();  // under a hypervisor asking is slow
  const std::pair<const Kernel*, bool> kernels[] = {{&vnni_kernel, processor.avx512 && processor.vnni},
                                                    {&avx512_kernel, processor.avx512},
                                                    {&avx2_kernel, processor.avx2},
                                                    {&plain_kernel, true}};
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

void quantize_rows(void* context) {
  Shared& shared = *static_cast<Shared*>(context);
  std::int64_t row;
  while ((row = shared.taken.fetch_add(1)) < shared.plan.rows) shared.kernel.quantize(shared.plan, row);
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

bool has_kernel(const char* name) { return find(name) != nullptr; }

bool compute(const char* name, const Linear& linear, int threads) {
  const Kernel* kernel = find(name);
  if (!kernel) return false;
  const std::int64_t block = std::min(linear.rows, kRowBlock), width = linear.steps() * kInputs;
  if (block <= 0) return true;
  const std::int64_t elements = ceil_div(block * width * kernel->element_bytes, 64) * 64;
  const std::int64_t numbers = block * linear.groups() * std::int64_t(sizeof(float));
  const Memory scratch = allocate(elements + 2 * numbers);
  char* const scales = scratch.get() + elements;
  for (std::int64_t first = 0; first < linear.rows; first += block) {
    const std::int64_t rows = std::min(block, linear.rows - first);
    const Plan plan{linear, first, rows, ceil_div(rows, kernel->tile_rows), scratch.get(),
                    reinterpret_cast<float*>(scales), reinterpret_cast<std::int32_t*>(scales + numbers)};
    Shared shared{*kernel, plan};
    run_team(rows * width < kQuantizeAlone ? 1 : threads, quantize_rows, &shared);
    shared.taken = 0;
    run_team(threads, compute_panels, &shared);
  }
  return true;
}

}  // namespace longgraft::int8
