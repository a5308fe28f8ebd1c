"""The paper's method and its baselines: exact row budgets, the graft, and the same output whatever is proposed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from longgraft.config import EngineConfig, Output, SamplingParams
from longgraft.engine import Engine
from longgraft.index.context_index import ContextIndex
from longgraft.index.successor_table import SuccessorTable
from longgraft.index.templates import template
from longgraft.policies import DensePolicy, FixedPolicy, PaperPolicy, PrunedPolicy
from longgraft.prune import Gates
from longgraft.resolve import resolve
from longgraft.sampler import Sampler
from longgraft.stats import Stats
from longgraft.tree import Source, TokenTree, TreeBuilder
from tests import engines
from tests.cases import plain_generate
from tests.drafters import DRAFTERS, Fills, ModelTopK, ScriptedDrafter
from tests.engines import cost_of, model_of, prompt_of
from tests.models import VOCAB, tiny_model

ROOT = 7
POLICIES: dict[str, type[FixedPolicy]] = {"dense": DensePolicy, "pruned": PrunedPolicy, "paper": PaperPolicy}
V = 4000  # no token of `Fills` meets one of `disjoint`


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


def disjoint() -> np.ndarray:
    """Successor rows without gaps whose tokens no scripted drafter says."""
    ids = np.arange(V)[:, None] * 8 + np.arange(8)
    return (VOCAB + ids % (V - VOCAB)).astype(np.int32)


def sequence(rows: np.ndarray | None = None, remaining: int = 100, token_ids: Sequence[int] = (ROOT,)) -> Any:
    successors = SuccessorTable(V)
    successors.rows = rows
    return SimpleNamespace(
        token_ids=list(token_ids),
        root_token=token_ids[-1],
        draft_state=None,
        stop=SimpleNamespace(remaining=remaining),
        index=SimpleNamespace(successors=successors),
        stats=Stats(),
    )


def sure_until(depth: int, width: int = 10) -> ScriptedDrafter:
    """A drafter that fills its levels, and is sure of itself only as deep as this level."""

    class Sure(Fills):
        def children(self, length: int, path: list[int], width: int) -> list[tuple[int, float]]:
            said = super().children(length, path, width)
            return [(token, p if len(path) < depth else p * 0.01) for token, p in said]

    return Sure()


def proposed(name: str, drafter: Any, seq: Any, gates: Gates | None = None, max_nodes: int = 60) -> TokenTree:
    return POLICIES[name](drafter, gates or Gates(), max_nodes, V).propose(seq).build()


def count(tree: TokenTree) -> tuple[int, int]:
    """Return (drafted rows with the root, retrieved rows)."""
    sources = tree.sources.tolist()
    assert set(sources) <= {Source.ROOT, Source.DRAFT, Source.SUCCESSOR}
    return len(tree) - sources.count(Source.SUCCESSOR), sources.count(Source.SUCCESSOR)


# Budgets ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sure", "passes", "drafted", "retrieved"), [(0, 1, 8, 52), (1, 2, 24, 36), (2, 6, 40, 20), (8, 8, 60, 0)]
)
def test_the_papers_budgets(sure: int, passes: int, drafted: int, retrieved: int) -> None:
    for name, expected in {
        "paper": (drafted, retrieved),
        "pruned": (drafted, 0),
        "dense": (60, 0),
    }.items():
        drafter = sure_until(sure)
        assert count(proposed(name, drafter, sequence(disjoint()))) == expected
        assert drafter.passes == (8 if name == "dense" else passes)


@pytest.mark.parametrize(("sure", "nodes"), [(0, 52), (1, 36), (2, 20)])
def test_the_graft_hangs_from_the_root_in_the_stages_shape(sure: int, nodes: int) -> None:
    rows = disjoint()
    tree = proposed("paper", sure_until(sure), sequence(rows))
    depths = tree.depths[tree.sources == Source.SUCCESSOR].tolist()
    assert tuple(depths.count(d + 1) for d in range(max(depths))) == template(nodes).widths
    for node in np.flatnonzero(tree.sources == Source.SUCCESSOR).tolist():
        assert tree.token_ids[node] in rows[tree.token_ids[tree.parents[node]]]
        assert tree.sources[tree.parents[node]] in (Source.ROOT, Source.SUCCESSOR)


def test_what_was_drafted_and_retrieved_stands_once() -> None:
    """Successors that repeat the drafted children of the root: 7 kept drafts and the root, 8 of 52 merged or fewer."""
    rows = disjoint()
    drafter = sure_until(0)
    rows[ROOT] = [token for token, _ in drafter.children(1, [], 8)]
    tree = proposed("paper", drafter, sequence(rows))
    assert len(tree) == 60 - 7
    assert len({(p, t) for p, t in zip(tree.parents.tolist(), tree.token_ids.tolist())}) == len(tree)
    assert tree.depths.max() == 9, "what hangs below a merged node stays"


def test_a_smaller_cap_of_the_engine_holds() -> None:
    for name in POLICIES:
        for max_nodes in (0, 1, 10):
            tree = proposed(name, sure_until(0), sequence(disjoint()), max_nodes=max_nodes)
            assert len(tree) == min(max_nodes + 1, 8 if name == "pruned" else 99)


@pytest.mark.parametrize("remaining", [1, 2, 3, 6])
def test_the_end_of_the_text_bounds_the_depth(remaining: int) -> None:
    for name in POLICIES:
        for sure in (0, 8):
            drafter = sure_until(sure)
            tree = proposed(name, drafter, sequence(disjoint(), remaining))
            assert tree.depths.max() <= remaining - 1
            assert drafter.passes <= remaining - 1, "a level was drafted that nothing can come of"
            if name == "paper" and sure == 0:
                assert tree.depths.max() == remaining - 1


def test_other_budgets_count_alike() -> None:
    gates = Gates(checkpoints=(0,), shares=(3, 12), thresholds=(0.5,), depth=2, width=4)
    assert count(proposed("paper", sure_until(0), sequence(disjoint()), gates)) == (3, 9)
    assert count(proposed("paper", sure_until(9), sequence(disjoint()), gates)) == (12, 0)


def test_width_1_keeps_its_chain_and_no_more() -> None:
    gates = Gates(width=1)
    assert proposed("dense", sure_until(9), sequence(), gates).is_chain
    assert count(proposed("paper", sure_until(2), sequence(disjoint()), gates)) == (7, 20)


# What is missing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["never_there", "empty", "only_out_of_vocabulary"])
def test_without_a_draft_the_paper_prunes_at_the_root(name: str) -> None:
    policy = PaperPolicy(DRAFTERS[name]([ROOT]), Gates(), 60, VOCAB)
    rows = np.tile(np.arange(8, dtype=np.int32), (VOCAB, 1))
    assert count(policy.propose(sequence(rows)).build()) == (1, 52)
    for other in (DensePolicy, PrunedPolicy):
        assert len(other(DRAFTERS[name]([ROOT]), Gates(), 60, VOCAB).propose(sequence(rows))) == 1


@pytest.mark.parametrize("index", [object(), SimpleNamespace(successors=None), SimpleNamespace(successors=object())])
def test_an_index_without_successors_means_no_graft(index: Any) -> None:
    seq = sequence()
    seq.index = index
    assert count(proposed("paper", sure_until(0), seq)) == (8, 0)
    assert count(proposed("paper", sure_until(0), sequence(None))) == (8, 0), "nothing was observed yet"


def test_a_missing_row_leaves_its_places_empty() -> None:
    rows = disjoint()
    rows[rows[ROOT]] = -1
    assert count(proposed("paper", sure_until(0), sequence(rows))) == (8, 8)


def test_successors_outside_the_vocabulary_are_left_out() -> None:
    tree = PaperPolicy(sure_until(0), Gates(), 60, VOCAB).propose(sequence(disjoint())).build()
    assert count(tree) == (8, 0) and tree.token_ids.max() < VOCAB


def test_the_hook_for_block_drafters() -> None:
    drafter, asked = sure_until(0), []

    def graft_block(draft: Any, seq: Any, gates: Gates) -> TreeBuilder:
        asked.append((draft, seq, gates))
        builder = TreeBuilder(seq.root_token)
        for node in range(80):
            builder.add(node, node, -0.1 * node, Source.DRAFT)
        return builder

    policy = PaperPolicy(drafter, Gates(), 60, V, graft_block)
    seq = sequence(disjoint())
    assert count(policy.propose(seq).build()) == (8, 52) and not asked, "a draft that is no block goes the usual way"
    begin = drafter.begin

    def begin_block(sequence: Any) -> Any:
        draft = begin(sequence)
        draft.is_block = True
        return draft

    drafter.begin = begin_block  # type: ignore[method-assign]
    assert len(policy.propose(seq)) == 60, "its tree is cut to the budget"
    assert [(one, gates) for _, one, gates in asked] == [(seq, Gates())]


# The engine -----------------------------------------------------------------------------------------------------------

NEW = 16
PROMPT = prompt_of(60)
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "t1": {"temperature": 1.0, "top_k": 0, "seed": 3},
}


@lru_cache(maxsize=8)
def expected(setting: str) -> tuple[int, ...]:
    sampler = Sampler(resolve(params_of(setting), None, VOCAB), PROMPT, VOCAB)
    return tuple(plain_generate(model_of(), PROMPT, lambda *args: sampler.draw(*args).token_id, NEW))


def params_of(setting: str) -> SamplingParams:
    return SamplingParams(max_new_tokens=NEW, **SETTINGS[setting])


def run(policy: str, drafter: Any, setting: str = "greedy") -> Output:
    engine = Engine(model_of(), None, EngineConfig(policy=policy), drafter=drafter, cost=cost_of())
    output: Output = engine.generate(PROMPT, params_of(setting))
    assert engine.pool.num_free == engine.pool.num_chunks and engine.pool.check_integrity() == ""
    return output


RUNS = [(policy, name, "greedy") for policy in POLICIES for name in DRAFTERS]
RUNS += [("paper", name, "t1") for name in DRAFTERS]
RUNS += [(policy, name, "t1") for policy in ("dense", "pruned") for name in ("right", "wrong", "duplicates")]


@pytest.mark.parametrize(("policy", "name", "setting"), RUNS)
def test_drafts_change_nothing(policy: str, name: str, setting: str) -> None:
    drafter = DRAFTERS[name](PROMPT + list(expected(setting)))
    output = run(policy, drafter, setting)
    assert output.token_ids == expected(setting)
    assert drafter.rounds == output.stats["rounds"]
    if name == "right":
        assert output.stats["rounds"] <= NEW / 4, "nothing right was accepted"
    if policy == "dense" and name == "wrong":
        assert output.stats["rounds"] == NEW, "the drafter is right by accident"


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_model_as_drafter(setting: str) -> None:
    """The same weights draft what greedy decoding says; all three policies accept whole paths."""
    for policy in POLICIES:
        output = run(policy, ModelTopK(tiny_model("llama")), setting)
        assert output.token_ids == expected(setting)
        if setting == "greedy":
            assert output.stats["rounds"] <= NEW / 4


def test_rows_really_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine verifies each policy's tree whole, although its cost table would never pay for it."""
    for policy, rows in {"dense": {60}, "pruned": {8}}.items():
        drafter = sure_until(9 if policy == "dense" else 0)
        config = EngineConfig(policy=policy)
        engine = Engine(model_of(), None, config, drafter=drafter, cost=cost_of(rise=100.0))
        output = engine.generate(PROMPT, params_of("greedy"))
        sizes = {1 + n for n, _ in output.stats["accepted_by_round"][:-8]}
        assert sizes == rows


def test_every_verified_row_refreshes_the_table() -> None:
    seen: list[tuple[list[int], int]] = []

    class Watched(ContextIndex):
        def observe(self, token_ids: Any, top_ids: Any) -> None:
            seen.append((list(token_ids), top_ids.shape[1]))
            super().observe(token_ids, top_ids)

    config = EngineConfig(policy="paper")
    engine = Engine(model_of(), None, config, drafter=sure_until(0), cost=cost_of(), index=lambda v: Watched(v))
    output = engine.generate(PROMPT, SamplingParams(max_new_tokens=40, temperature=0.0))
    nodes = [1 + n for n, _ in output.stats["accepted_by_round"]]
    assert [len(tokens) for tokens, _ in seen] == nodes and {k for _, k in seen} == {8}
    assert max(nodes) > 8, "the table was never grafted from"
    assert output.stats["nodes_by_source"]["successor"] > 0
    assert output.token_ids[:NEW] == expected("greedy")


def test_a_batch_and_a_policy_per_request() -> None:
    prompts = [prompt_of(40), prompt_of(24, seed=1)]
    drafter = ModelTopK(tiny_model("llama", seed=1))
    engine = Engine(model_of(), None, EngineConfig(), drafter=drafter, cost=cost_of())
    want = [tuple(plain_generate(model_of(), prompt, n=8)) for prompt in prompts]
    greedy = SamplingParams(max_new_tokens=8, temperature=0.0)
    for policy in POLICIES:
        outputs = engine.generate(prompts, greedy, policy=policy)
        assert [output.token_ids for output in outputs] == want
