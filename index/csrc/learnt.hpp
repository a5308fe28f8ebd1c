// The learnt index of one sequence: its text, where it copies from, and weights that learn from every token.
// Host only.
#pragma once
#include <memory>

#include "logit.hpp"
#include "storage.hpp"

namespace longgraft {

struct Drafted {
  int32_t token, parent, place, match_len, depth;
  double p;  // of the whole path
};

class LearntIndex {
 public:
  Library texts;
  Substitutions pairs;
  Lister lister{texts, pairs};
  Logit logit;
  Storage automaton;   // of the own text: finds the longest match however often it occurred

  explicit LearntIndex(std::vector<double> start) : logit(std::move(start)) {}
  LearntIndex(const LearntIndex&) = delete;

  // Appends tokens to the own text. `follow`: they were generated, so the source pointer follows them and, where
  // `logit.rate` > 0, what was listed for each place is scored against it.
  void extend(const int32_t* tokens, int32_t n, bool follow, const int32_t* rows, int32_t vocab, int32_t width) {
    texts.own.reserve(n);
    if (n > 64) automaton.reserve(n);
    for (int32_t i = 0; i < n; ++i) {
      if (!follow || tokens[i] == kSentinel) {
        append_own(tokens[i]);
        is_fresh_ = false;
        continue;
      }
      if (!is_fresh_) look_back();
      if (logit.rate > 0 && texts.own.size() > 0) {
        list_end(rows, vocab, width);
        logit.learn(list_, lister.recents(), tokens[i]);
      }
      append_own(tokens[i]);
      look_up(texts.own.tokens.data() + texts.own.size(), texts.own.size(), text_end(automaton.a), found_);
      copy_ = follow_copy(texts, pairs, copy_, tokens[i], found_, texts.own.size(), true);
    }
  }

  void extend_side(const int32_t* tokens, int32_t n) {
    texts.side.reserve(n);
    for (int32_t i = 0; i < n; ++i) texts.side.append(tokens[i]);
    is_fresh_ = false;
  }

  // Forgets the side text, and with it every pointer that may lead there.
  void clear_side() {
    texts.side.clear();
    forget_copies();
  }

  // All that is listed after the text and `path`, scored.
  const List& options(const int32_t* path, int32_t n, const int32_t* rows, int32_t vocab, int32_t width) {
    if (!is_fresh_) look_back();
    Copy copy = copy_;
    open_context(path, n);
    Cursor cursor = text_end(automaton.a);
    for (int32_t i = 1; i <= n; ++i) copy = step(copy, cursor, i);
    list_at(copy, n, rows, vocab, width);
    logit.score(list_, lister.recents());
    return list_;
  }

  // The likeliest nodes after the text and `path`, likeliest first.
  const std::vector<Drafted>& draft(int32_t budget, const int32_t* path, int32_t n, double threshold,
                                    const int32_t* rows, int32_t vocab, int32_t width) {
    nodes_.clear(), states_.clear(), queue_.clear();
    if (budget <= 0) return nodes_;
    if (!is_fresh_) look_back();
    Copy copy = copy_;
    open_context(path, n);
    Cursor cursor = text_end(automaton.a);
    for (int32_t i = 1; i <= n; ++i) copy = step(copy, cursor, i);
    int32_t serial = 0;
    auto expand = [&](int32_t parent, const Copy& at, int32_t depth, double p) {
      list_at(at, depth, rows, vocab, width);
      logit.score(list_, lister.recents());
      auto enqueue = [&](int32_t token, int32_t place, int32_t match_len, double path_p) {
        if (path_p < threshold) return;
        queue_.push_back({{token, parent, place, match_len, depth - n + 1, path_p}, serial++});
        std::push_heap(queue_.begin(), queue_.end(), later);
      };
      for (const Listed& o : list_.options) enqueue(o.token, o.place, o.match_len, p * o.p);
      for (size_t k = 0; k < list_.recent.size(); ++k) {
        const Recent& r = lister.recents()[list_.recent[k]];
        enqueue(r.token, r.place, 0, p * list_.recent_p[k]);
      }
    };
    expand(-1, copy, n, 1.0);
    while (!queue_.empty()) {
      std::pop_heap(queue_.begin(), queue_.end(), later);
      nodes_.push_back(queue_.back().node);
      queue_.pop_back();
      states_.push_back({copy, cursor});
      if ((int32_t)nodes_.size() == budget) break;
      const Drafted node = nodes_.back();
      int32_t depth = n + node.depth;
      place_path(n, (int32_t)nodes_.size() - 1);
      State& state = states_.back();
      if (node.parent >= 0) state = states_[node.parent];
      state.copy = step(state.copy, state.cursor, depth);
      expand((int32_t)nodes_.size() - 1, state.copy, depth, node.p);
    }
    return nodes_;
  }

  void truncate(int32_t length) {
    std::vector<int32_t> kept(texts.own.tokens.begin(), texts.own.tokens.begin() + length);
    clear_own();
    texts.own.reserve(length), automaton.reserve(length);
    for (int32_t token : kept) append_own(token);
  }

  void reset() {
    clear_own();
    texts.side.clear();
    lister.prompt_len = 1 << 30;
    logit.reset();
  }

  const Copy& copy() const { return copy_; }

  // Lists and scores the end of the text; `found_` holds its occurrences.
  const List& list_end(const int32_t* rows, int32_t vocab, int32_t width) {
    if (!is_fresh_) look_back();
    open_context(nullptr, 0);
    occurrences_ = found_;
    has_met_ = false;
    fill(copy_, context_.data() + context_.size(), texts.own.size(), rows, vocab, width, true);
    logit.score(list_, lister.recents());
    return list_;
  }

 private:
  struct Queued {
    Drafted node;
    int32_t serial;
  };
  static bool later(const Queued& a, const Queued& b) {
    return a.node.p != b.node.p ? a.node.p < b.node.p : a.serial > b.serial;
  }

  struct State {
    Copy copy;
    Cursor cursor;
  };

  Copy copy_;
  bool is_fresh_ = false;            // `found_` and `copy_` stand at the end of the text
  std::vector<Occurrence> found_;    // occurrences of the end of the text
  std::vector<Occurrence> occurrences_;
  Scratch scratch_;
  bool has_met_ = false;             // `scratch_` holds the places of `occurrences_`
  List list_;
  std::vector<int32_t> context_;     // the last tokens of the text, then a path
  int32_t kept_ = 0;                 // how many of them are the text's
  std::vector<Drafted> nodes_;
  std::vector<State> states_;
  std::vector<Queued> queue_;

  void append_own(int32_t token) {
    lister.hints.clear();  // they were for the text as it was
    texts.own.append(token);
    append(automaton.a, token, automaton);
  }

  void clear_own() {
    texts.own.clear(), lister.hints.clear();
    automaton.reset();
    forget_copies();
  }

  void forget_copies() {
    pairs.clear();
    copy_ = Copy{};
    is_fresh_ = false;
  }

  // Occurrences of the `n` tokens before `end`, in both texts; `cursor`: where they stand in the automaton.
  void look_up(const int32_t* end, int32_t n, Cursor cursor, std::vector<Occurrence>& out) {
    out.clear();
    scratch_.clear();
    if (cursor.length > kGrams[0]) {
      int32_t place = cursor.state == text_end(automaton.a).state ? automaton.a.match_end : automaton.a.states[cursor.state].last_end;
      if (place > 0 && place < texts.own.size() && scratch_.add(place)) out.push_back({place, texts.own.match(place, end, n)});
    }
    find_occurrences(texts.own, 0, end, n, scratch_, out);
    if (texts.side.size()) find_occurrences(texts.side, kElsewhere, end, n, scratch_, out);
  }

  // The pointer starts, or starts anew, at the longest occurrence of the text's end.
  void look_back() {
    int32_t n = texts.own.size();
    look_up(texts.own.tokens.data() + n, n, text_end(automaton.a), found_);
    Occurrence best = longest_of(found_);
    if (copy_.source == kNowhere && best.length >= 2) copy_.source = copy_.left = best.place;
    is_fresh_ = true;
  }

  // Gets ready to look up after the text and a path.
  void open_context(const int32_t* path, int32_t n) {
    lister.collect_recents(scratch_);
    logit.recents_changed();
    const std::vector<int32_t>& own = texts.own.tokens;
    kept_ = std::min((int32_t)own.size(), kMaxMatch);
    context_.assign(own.end() - kept_, own.end());
    context_.insert(context_.end(), path, path + n);
  }

  // Writes the path that ends at a drafted node behind the text and the given path of n tokens.
  void place_path(int32_t n, int32_t node) {
    context_.resize(kept_ + n + nodes_[node].depth);
    for (int32_t i = node; i >= 0; i = nodes_[i].parent) context_[kept_ + n + nodes_[i].depth - 1] = nodes_[i].token;
  }

  // Follows pointer and cursor over token `depth` (from 1) of the path; leaves that context's occurrences behind.
  Copy step(const Copy& before, Cursor& cursor, int32_t depth) {
    const int32_t* end = context_.data() + kept_ + depth;
    cursor = end[-1] == kSentinel ? Cursor{kRoot, 0} : advance(automaton.a, cursor, end[-1]);
    look_up(end, kept_ + depth, cursor, occurrences_);
    has_met_ = true;
    return follow_copy(texts, pairs, before, end[-1], occurrences_, texts.own.size() + depth, false);
  }

  void list_at(const Copy& copy, int32_t depth, const int32_t* rows, int32_t vocab, int32_t width) {
    if (depth == 0) {
      occurrences_ = found_;
      has_met_ = false;
    }
    fill(copy, context_.data() + kept_ + depth, kept_ + depth, rows, vocab, width, depth == 0);
  }

  void fill(const Copy& copy, const int32_t* end, int32_t n, const int32_t* rows, int32_t vocab, int32_t width,
            bool is_root) {
    if (n == 0) {
      static const int32_t nothing = kSentinel;
      end = &nothing + 1;
    }
    if (!has_met_) {  // the scratch holds other things than the places that were found: meet them again
      scratch_.clear();
      for (const Occurrence& o : occurrences_) scratch_.add(o.place);
    }
    has_met_ = false;
    find_nearby(texts, copy, end, n, scratch_, occurrences_);
    int32_t last = end[-1];
    bool has_row = rows != nullptr && last >= 0 && last < vocab;
    Context c{end, n, copy, has_row ? rows + (int64_t)last * width : nullptr, width, is_root};
    lister.list(c, occurrences_, scratch_, list_);
  }
};

}  // namespace longgraft
