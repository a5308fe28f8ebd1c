// Cuts the work into jobs for the threads, and merges what they return in the order of the keys.

#include "attention.hpp"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "attention_layout.hpp"
#include "rows_linear.hpp"
#include "team.hpp"

namespace longgraft::attention {
namespace {

constexpr std::int64_t kWaitingFloats = 4 << 20;  // of parts that wait to be merged, at most
constexpr double kAlone = 1.5e6;                  // fewer multiply-adds than this are not worth waking a thread
constexpr std::align_val_t kLine{64};

// Memory that begins with a line of 64 bytes.
class Memory {
 public:
  explicit Memory(std::int64_t bytes)
      : data_(static_cast<char*>(::operator new(static_cast<std::size_t>(bytes + 64), kLine))) {}
  char* bytes() const { return data_.get(); }
  float* floats() const { return reinterpret_cast<float*>(data_.get()); }

 private:
  struct Free {
    void operator()(char* data) const { ::operator delete(data, kLine); }
  };
  std::unique_ptr<char, Free> data_;
};

const Kernel* find(const char* name) {
  if (!find_kernel(name)) return nullptr;  // the processor lacks it
  for (const Kernel* kernel : {&avx512_kernel, &avx2_kernel, &plain_kernel})
    if (kernel->name && std::strcmp(kernel->name, name) == 0) return kernel;
  return nullptr;
}

// One job's result: `count` parts of each of its heads, merged when those before it are.
struct Piece {
  Job job;
  std::int64_t count, at;
  struct Total* total;
  bool done;
};

// What the parts of some key heads of a stripe add up to. `pieces` wait in the order of the keys.
struct Total {
  const Stripe* stripe;
  std::int64_t head_first, head_last;
  Memory memory;
  std::vector<Piece*> pieces{};
  std::size_t merged = 0;
  bool complete = false;  // no pieces will follow those waiting
  std::mutex lock{};
};

class Call {
 public:
  Call(const Kernel& kernel, const Problem& problem, int threads)
      : kernel_(kernel), problem_(problem), sizes_(problem), threads_(std::max(1, threads)) {
    starts_.push_back(0);
    for (std::int64_t i = 0; i < problem.run_count; ++i) starts_.push_back(starts_.back() + problem.runs[i].rows);
    stripes_ = lay_out(problem, starts_.back());
  }

  void run() {
    choose_sizes();
    const Memory query(problem_.rows * problem_.heads * problem_.key_size * 4), scratch(scratch_bytes_ * threads_);
    const Context context{problem_, sizes_, starts_.data(), query.floats()};
    context_ = &context;
    scratch_ = scratch.bytes();
    for (std::int64_t head = 0; head < problem_.kv_heads; ++head) kernel_.pack(context, head);
    for (const Layout& layout : stripes_) add_stripe(layout.stripe);
    flush();
  }

 private:
  std::int64_t pairs(const Stripe& s) const { return s.rows() * problem_.group(); }
  static std::int64_t shared_parts(const Stripe& s) { return s.edge / kPartKeys - s.first_part + 1; }

  State state(const Total& total, float* at, std::int64_t index) const {
    return sizes_.state(at + index * sizes_.state_floats(pairs(*total.stripe)), pairs(*total.stripe));
  }

  void choose_sizes() {
    double products = 0;
    std::int64_t parts = 0;
    for (const Layout& layout : stripes_) {
      const Stripe& s = layout.stripe;
      const std::int64_t keys = std::max<std::int64_t>(0, s.edge - s.low_least) + s.most_slots;
      products += double(s.rows() * keys) * double(problem_.heads * (problem_.key_size + problem_.value_size));
      parts += shared_parts(s);
      scratch_bytes_ = std::max(scratch_bytes_, Scratch(problem_, sizes_, s, nullptr).bytes);
    }
    if (products < kAlone) threads_ = 1;
    // All heads of a part in one job read memory in order; single heads share better among threads.
    heads_ = threads_ == 1 || parts >= 4 * threads_ ? problem_.kv_heads : 1;
  }

  void add_stripe(const Stripe& s) {
    const std::size_t first = totals_.size();
    for (std::int64_t head = 0; head < problem_.kv_heads; head += heads_) add_total(s, head);
    for (std::int64_t i = 0, parts = shared_parts(s); i < parts; ++i)
      for (std::size_t t = first; t < totals_.size(); ++t) add_piece(*totals_[t], s.first_part + i, i + 1 == parts);
  }

  void add_total(const Stripe& s, std::int64_t head) {
    const std::int64_t last = std::min(head + heads_, problem_.kv_heads), floats = sizes_.state_floats(pairs(s));
    totals_.push_back(std::unique_ptr<Total>(new Total{&s, head, last, Memory((last - head) * floats * 4)}));
    Total& total = *totals_.back();
    for (std::int64_t h = 0; h < last - head; ++h) sizes_.clear(state(total, total.memory.floats(), h), pairs(s));
  }

  void add_piece(Total& total, std::int64_t part, bool tail) {
    const Stripe& s = *total.stripe;
    const std::int64_t count = tail ? s.first_part + s.parts - part : 1;
    const std::int64_t floats = count * (total.head_last - total.head_first) * sizes_.state_floats(pairs(s));
    if (waiting_ > 0 && waiting_ + floats > kWaitingFloats) flush();
    const Job job{&s, part, total.head_first, total.head_last, tail, nullptr, nullptr};
    pieces_.push_back({job, count, waiting_, &total, false});
    waiting_ += floats;
    total.complete |= tail;
  }

  // Compute the pieces held so far and merge them into their totals.
  void flush() {
    const Memory memory(waiting_ * 4);
    const std::size_t count = pieces_.size(), team = std::min<std::size_t>(threads_, count);
    order_.clear();
    for (Piece& piece : pieces_) {
      piece.job.states = memory.floats() + piece.at;
      piece.total->pieces.push_back(&piece);
      order_.push_back(&piece);
    }
    // A stripe's last part has the tail, which takes longest: those go first.
    std::stable_partition(order_.begin(), order_.end(), [](const Piece* piece) { return piece->job.tail; });
    for (std::size_t i = 0; i + team < count; ++i) order_[i]->job.next = &order_[i + team]->job;
    taken_ = 0;
    working_ = 0;
    run_team(int(team), [](void* call) { static_cast<Call*>(call)->work(); }, this);
    for (const auto& total : totals_) total->pieces.clear(), total->merged = 0;
    pieces_.clear();
    waiting_ = 0;
  }

  void work() {
    char* const scratch = scratch_ + std::int64_t(working_.fetch_add(1)) * scratch_bytes_;
    for (std::size_t i; (i = taken_.fetch_add(1)) < order_.size();) {
      kernel_.compute(*context_, order_[i]->job, scratch);
      merge(*order_[i]);
    }
  }

  // Merge what can be merged in order; what is finished too early waits for the job before it.
  void merge(Piece& finished) {
    Total& total = *finished.total;
    const std::lock_guard<std::mutex> alone(total.lock);
    finished.done = true;
    for (; total.merged < total.pieces.size() && total.pieces[total.merged]->done; ++total.merged)
      add(total, *total.pieces[total.merged]);
    if (!total.complete || total.merged < total.pieces.size()) return;
    for (std::int64_t head = total.head_first; head < total.head_last; ++head)
      kernel_.finish(*context_, *total.stripe, head, state(total, total.memory.floats(), head - total.head_first));
  }

  void add(Total& total, const Piece& piece) const {
    const std::int64_t heads = total.head_last - total.head_first;
    for (std::int64_t i = 0; i < piece.count * heads; ++i)
      kernel_.merge(*context_, state(total, total.memory.floats(), i % heads), state(total, piece.job.states, i),
                    pairs(*total.stripe));
  }

  const Kernel& kernel_;
  const Problem& problem_;
  const Sizes sizes_;
  int threads_;
  std::int64_t heads_ = 1, scratch_bytes_ = 0, waiting_ = 0;
  std::vector<std::int64_t> starts_;
  std::vector<Layout> stripes_;
  const Context* context_ = nullptr;
  char* scratch_ = nullptr;
  std::vector<std::unique_ptr<Total>> totals_;
  std::vector<Piece> pieces_;
  std::vector<Piece*> order_;
  std::atomic<std::size_t> taken_{0}, working_{0};
};

}  // namespace

bool attend(const char* name, const Problem& problem, int threads) {
  const Kernel* kernel = find(name);
  if (!kernel) return false;
  Call(*kernel, problem, threads).run();
  return true;
}

}  // namespace longgraft::attention
