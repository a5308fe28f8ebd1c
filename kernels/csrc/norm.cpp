// Picks a norm kernel for this processor and cuts the rows for the threads.

#include "norm.hpp"

#include <atomic>
#include <cstring>
#include <utility>

#include "processor.hpp"
#include "team.hpp"

namespace longgraft::rms {
namespace {

constexpr std::int64_t kAlone = 1 << 15;  // fewer elements than this are computed by the caller alone

const Kernel* find(const char* name) {
  static const Processor processor = inspect_processor();  // under a hypervisor asking is slow
  const std::pair<const Kernel*, bool> kernels[] = {
      {&avx512_kernel, processor.avx512}, {&avx2_kernel, processor.avx2}, {&plain_kernel, true}};
  for (const auto& [kernel, runs] : kernels)
    if (runs && kernel->name && std::strcmp(kernel->name, name) == 0) return kernel;
  return nullptr;
}

struct Shared {
  const Norm& problem;
  void (*compute)(const Norm&, std::int64_t row);
  std::atomic<std::int64_t> taken{0};

  static void run(void* context) {
    Shared& shared = *static_cast<Shared*>(context);
    std::int64_t row;
    while ((row = shared.taken.fetch_add(1)) < shared.problem.rows) shared.compute(shared.problem, row);
  }
};

}  // namespace

bool norm(const char* name, const Norm& problem, int threads) {
  const Kernel* kernel = find(name);
  if (!kernel) return false;
  Shared shared{problem, kernel->norm};
  run_team(problem.rows * problem.size < kAlone ? 1 : threads, Shared::run, &shared);
  return true;
}

}  // namespace longgraft::rms
