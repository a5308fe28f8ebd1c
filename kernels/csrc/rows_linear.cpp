#include "rows_linear.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "processor.hpp"
#include "team.hpp"

namespace longgraft {
namespace {

constexpr std::int64_t kRowBlock = 512;       // rows per pass over the weight: bounds the scratch
constexpr std::int64_t kPackAlone = 1 << 15;  // fewer elements than this are packed by the caller alone
constexpr std::align_val_t kLine{64};

struct Free {
  void operator()(float* data) const { ::operator delete(data, kLine); }
};
using Floats = std::unique_ptr<float, Free>;

Floats allocate(std::int64_t floats) {
  return Floats(static_cast<float*>(::operator new(static_cast<std::size_t>(floats) * sizeof(float), kLine)));
}

// What the threads of one region share. Whoever comes takes the next piece; no piece depends on who takes it.
struct Shared {
  const Kernel& kernel;
  const Plan& plan;
  std::int64_t chunk, pieces, scratch_floats;
  float* scratch;
  std::atomic<std::int64_t> taken{0};
  std::atomic<std::int64_t> threads{0};

  Range piece(std::int64_t index) const {
    const std::int64_t out = plan.linear.out;
    return {std::min(index * chunk, out), std::min((index + 1) * chunk, out)};
  }
};

void pack_tiles(void* context) {
  Shared& shared = *static_cast<Shared*>(context);
  std::int64_t tile;
  while ((tile = shared.taken.fetch_add(1)) < shared.plan.tiles) shared.kernel.pack(shared.plan, tile);
}

void compute_chunks(void* context) {
  Shared& shared = *static_cast<Shared*>(context);
  float* scratch = shared.scratch + shared.threads.fetch_add(1) * shared.scratch_floats;
  std::int64_t next, now = shared.taken.fetch_add(1);
  for (; now < shared.pieces; now = next) {
    next = shared.taken.fetch_add(1);
    shared.kernel.columns(shared.plan, scratch, shared.piece(now), shared.piece(next));
  }
}

// Weight rows per piece: enough pieces to share evenly. Few tiles (measured: up to 2) stream the weight from
// memory and want it in long runs, hence few rows at a time; many want a chunk to last while their rows change.
std::int64_t piece_columns(const Plan& plan, int threads) {
  constexpr std::int64_t step = 4 * kColumns;
  const std::int64_t most = plan.tiles <= 2 ? 2 * step : kChunk;
  const std::int64_t even = ceil_div(plan.linear.out, std::int64_t(threads) * 4 * step) * step;
  return std::min(most, even);
}

void row_block(const Kernel& kernel, const Plan& plan, int threads) {
  const std::int64_t chunk = piece_columns(plan, threads), floats = ceil_div(scratch_floats(plan.rows.size()), 16) * 16;
  const Floats scratch = allocate(floats * threads);
  Shared shared{kernel, plan, chunk, ceil_div(plan.linear.out, chunk), floats, scratch.get()};
  run_team(plan.packed_floats() < kPackAlone ? 1 : threads, pack_tiles, &shared);
  shared.taken = 0;
  run_team(threads, compute_chunks, &shared);
}

}  // namespace

const Kernel* find_kernel(const char* name) {
  static const Processor processor = inspect_processor();  // under a hypervisor asking is slow
  const std::pair<const Kernel*, bool> kernels[] = {
      {&avx512_kernel, processor.avx512}, {&avx2_kernel, processor.avx2}, {&plain_kernel, true}};
  for (const auto& [kernel, runs] : kernels)
    if (runs && kernel->name && std::strcmp(kernel->name, name) == 0) return kernel;
  return nullptr;
}

void rows_linear(const Kernel& kernel, const Linear& linear, int threads) {
  if (linear.rows <= 0) return;
  const std::int64_t block = std::min(linear.rows, kRowBlock);
  const Floats packed = allocate(ceil_div(linear.in, kBlock) * kBlock * block);
  for (std::int64_t row = 0; row < linear.rows; row += block) {
    const Plan plan(linear, {row, std::min(row + block, linear.rows)}, kernel.tile_rows, packed.get());
    row_block(kernel, plan, threads);
  }
}

}  // namespace longgraft
