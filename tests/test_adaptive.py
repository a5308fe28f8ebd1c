"""The adaptive policy asks a drafter where it pays, and only there."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from longgraft.adaptive import AdaptivePolicy, State
from longgraft.policy import rows_for
from longgraft.stats import Stats
from longgraft.tree import Acceptance, Level, Source, TreeBuilder
from tests.engines import cost_of
from tests.sources import Empty, Right, ScriptedIndex

VOCAB = 64


class Scripted:
    """Drafter and draft in one: names the true token with probability `sure`, where it is `right`."""

    in_one_pass = True

    def __init__(self, truth: list[int], *, sure: float = 0.9, right: bool = True, price: float = 0.05) -> None:
        self.truth, self.sure, self.right, self.price = truth, sure, right, price
        self.behind = 0.0
        self.asked: list[list[int]] = []

    def begin(self, seq: Any) -> Scripted:
        self.length, self.seen = len(seq.token_ids), set[int]()
        return self

    def seconds(self, rows: int, caught_up: bool = False) -> float:
        return self.price + 0.001 * rows + (0.0 if caught_up else self.behind)

    def expand(self, tree: TreeBuilder, nodes: Seq[int], width: int) -> Level:
        for node in nodes:
            assert node == 0 or tree.parents[node] in (self.seen | set(nodes) if self.in_one_pass else self.seen)
        self.seen |= set(nodes)
        self.asked.append(list(nodes))
        self.behind = 0.0
        depths = [0]
        for parent in tree.parents[1:]:
            depths.append(depths[parent] + 1)
        tokens = [self.truth[(self.length + depths[node]) % len(self.truth)] for node in nodes]
        tokens = [token if self.right else (token + 1) % VOCAB for token in tokens]
        scores = np.full(len(nodes), np.log(self.sure), np.float32)
        return Level(np.array(tokens, np.int32), np.array(nodes, np.int32), scores)


class Levelwise(Scripted):
    in_one_pass = False


def text(length: int = 400) -> list[int]:
    return np.random.default_rng(3).integers(0, VOCAB, length).tolist()


def run(
    drafter: Scripted,
    index: ScriptedIndex,
    rise: float = 0.02,
    rounds: int = 40,
    prompt_len: int = 0,
    remaining: int = 1000,
) -> tuple[Any, list[int]]:
    """Rounds against a target that says `drafter.truth`; returns the sequence and the tokens of each round."""
    truth, start = drafter.truth, 40
    policy = AdaptivePolicy(drafter, cost_of(rise), 60, VOCAB)  # type: ignore[arg-type]
    seq: Any = SimpleNamespace(token_ids=truth[:start], index=index, stats=Stats(), policy_state=None, trust=1.0)
    seq.prompt_len = prompt_len
    seq.policy, seq.stop, new = policy, SimpleNamespace(remaining=remaining), list[int]()
    index.extend(seq.token_ids)
    for _ in range(rounds):
        seq.root_token = seq.token_ids[-1]
        builder = policy.propose(seq)
        tree = builder.build(rows_for(policy.cost, [seq], [builder], 61)[0])
        children, node, path, drawn = tree.children(), 0, [0], list[int]()
        while True:
            drawn.append(truth[len(seq.token_ids) + len(drawn)])
            if drawn[-1] not in children[node]:
                break
            node = children[node][drawn[-1]]
            path.append(node)
        policy.learn(seq, Acceptance(path, drawn))
        seq.token_ids = seq.token_ids + drawn
        index.extend(drawn)
        new.append(len(drawn))
        if len(seq.token_ids) > len(truth) - 100:
            break
    return seq, new


def test_a_cheap_drafter_that_is_right_is_asked_again_and_again() -> None:
    drafter = Scripted(text(), sure=0.95)
    _, new = run(drafter, Empty([]))
    assert np.mean(new) > 4 and len(drafter.asked) >= 3 * len(new)


def test_a_drafter_that_costs_more_than_a_target_pass_is_not_asked() -> None:
    drafter = Scripted(text(), sure=0.95, price=1.2)
    _, new = run(drafter, Empty([]))
    assert not drafter.asked and set(new) == {1}


def test_a_drafter_that_is_wrong_is_soon_left_alone() -> None:
    drafter = Scripted(text(), sure=0.9, right=False, price=0.3)
    _, new = run(drafter, Empty([]), rounds=100)
    assert 0 < len(drafter.asked) < 20 and set(new) == {1}


def test_where_the_index_knows_the_drafter_is_not_asked() -> None:
    drafter = Scripted(text(), price=0.3)
    seq, new = run(drafter, Right(drafter.truth), rise=0.001)
    assert len(drafter.asked) <= 1 and np.mean(new) > 8
    assert isinstance(seq.policy_state, State)


def test_a_text_unread_is_an_investment() -> None:
    """Reading what was left out costs 20 passes: it is done once that much would have been saved, and no sooner."""
    drafter = Scripted(text(), sure=0.95, price=0.2)
    drafter.behind = 4.0
    _, new = run(drafter, Empty([]))
    first = next(i for i, n in enumerate(new) if n > 1)
    assert 4 <= first <= 30


def test_behind_a_long_prompt_a_text_is_read_sooner() -> None:
    """Reading it costs less than three per cent of what reading the prompt took."""
    firsts = []
    for prompt_len in (0, 5000):
        drafter = Scripted(text(), sure=0.95, price=0.2)
        drafter.behind = 4.0
        _, new = run(drafter, Empty([]), prompt_len=prompt_len)
        firsts.append(next(i for i, n in enumerate(new) if n > 1))
    assert firsts[1] < firsts[0]


def test_a_few_unread_tokens_are_read_with_the_pass_that_pays_for_them() -> None:
    """What a round needs to catch up with is no investment: every round asks."""

    class Lagging(Scripted):
        def begin(self, seq: Any) -> Scripted:
            self.behind = 0.15
            return super().begin(seq)

    drafter = Lagging(text(), sure=0.95, price=0.1)
    _, new = run(drafter, Empty([]))
    assert all(n > 1 for n in new)


def test_a_text_is_not_read_for_the_last_few_tokens() -> None:
    drafter = Scripted(text(), sure=0.95, price=0.2)
    drafter.behind = 4.0
    run(drafter, Empty([]), prompt_len=5000, remaining=12)
    assert not drafter.asked


def test_an_unlikely_investment_is_still_tried_now_and_then() -> None:
    """A pass that does not promise to pay is made when it is less than a hundredth of the time."""
    drafter = Scripted(text(3000), sure=0.95, price=0.95)
    run(drafter, Empty([]), rounds=250)
    assert 1 <= len(drafter.asked) <= 5


@pytest.mark.parametrize("kind", [Scripted, Levelwise])
def test_a_node_is_asked_about_behind_its_parent(kind: type[Scripted]) -> None:
    """`Scripted.expand` asserts the order; retrieved nodes are asked about in one pass where that is possible."""
    truth = text()

    class Unsure(ScriptedIndex):
        """The next two tokens, each with probability a half."""

        def rows(self, position: int, budget: int) -> list[tuple[int, int, float]]:
            pair = self.truth[position : position + 2]
            return [(token, depth - 1, (depth + 1) * np.log(0.5)) for depth, token in enumerate(pair)]

    drafter = kind(truth, sure=0.9, price=0.1)
    _, new = run(drafter, Unsure(truth))
    assert np.mean(new) > 3
    firsts = [asked for asked in drafter.asked if asked[0] == 0]
    assert firsts and all(len(asked) > 1 for asked in firsts) == (kind is Scripted)


def test_retrieved_continuations_hang_below_drafted_nodes() -> None:
    """The index knows nothing at the root, and all that follows once the drafter has named the next token."""
    truth = text()

    class Later(Right):
        def draft(self, budget: int, path: Any = (), at: int = 0) -> Any:
            return super().draft(budget, path, at) if len(path) else None

    drafter = Scripted(truth, sure=0.95, price=0.1)
    _, new = run(drafter, Later(truth), rise=0.001)
    assert np.mean(new) > 8


def test_what_came_from_where_is_kept() -> None:
    drafter = Scripted(text(), sure=0.95)
    policy = AdaptivePolicy(drafter, cost_of(0.02), 60, VOCAB)  # type: ignore[arg-type]
    index = Empty([])
    seq: Any = SimpleNamespace(
        token_ids=drafter.truth[:40], root_token=1, index=index, stats=Stats(), policy_state=None, prompt_len=40
    )
    seq.trust, seq.stop = 1.0, SimpleNamespace(remaining=3)
    builder = policy.propose(seq)
    assert set(builder.sources[1:]) == {Source.DRAFT}
    assert max(builder.build().depths) <= 2, "no node beyond what may still be committed"
    assert seq.stats.draft_rows and seq.stats.summary()["draft_passes"] == len(seq.stats.draft_rows)


def test_with_one_token_left_nothing_is_asked() -> None:
    drafter = Scripted(text())
    policy = AdaptivePolicy(drafter, cost_of(0.02), 60, VOCAB)  # type: ignore[arg-type]
    seq: Any = SimpleNamespace(
        token_ids=[1], root_token=1, index=Empty([]), stats=Stats(), policy_state=None, trust=1.0, prompt_len=1
    )
    seq.stop = SimpleNamespace(remaining=1)
    assert len(policy.propose(seq)) == 1 and not drafter.asked
