"""Recorded rounds and the thresholds chosen by them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from longgraft.config import EngineConfig, GraftError
from longgraft.cost import ROW_BUCKETS, CostTable
from longgraft.engine import Engine
from longgraft.eval.calibrate_gates import at_checkpoints, choose, costs, main, prompts_of, rate_of, stages
from longgraft.eval.gate_rounds import Recorder, Round, accepted_length, load, record, save, up_to
from longgraft.index.successor_table import SuccessorTable
from longgraft.policies import PaperPolicy
from longgraft.prune import ConfidenceGate, Gates, grow
from longgraft.stats import Stats
from longgraft.tree import Source, TreeBuilder, chain
from tests import engines
from tests.drafters import DRAFTERS, ModelTopK
from tests.engines import cost_of, model_of, prompt_of
from tests.models import VOCAB, tiny_model
from tests.saved_model import byte_level

GATES = Gates()
RECORDED = Path(__file__).parent.parent / "data" / "recorded_levels.json"


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


def one(confidences: tuple[float, ...], accepted: tuple[int, ...], context: int = 10) -> Round:
    return Round(confidences, accepted, (60,) * 4, (0.1, 0.2, 0.6, 0.8), context)


def synthetic(n: int, seed: int = 0) -> list[Round]:
    """Rounds in which a drafter that is sure of itself is right, and one that is not is worse than the table."""
    rng = np.random.default_rng(seed)
    rounds = []
    for _ in range(n):
        paths = tuple(float(p) for p in np.cumprod(rng.uniform(0.3, 1.0, 7)))
        drafted = int(sum(p > 0.3 for p in paths))
        found = (int(rng.integers(0, 4)), min(drafted, 2) + 1, min(drafted, 6), drafted)
        rounds.append(one(paths, found))
    return rounds


# What is recorded ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", ["right", "wrong", "siblings", "ties", "empty_below", "empty"])
def test_a_stages_tree_is_what_the_paper_policy_verifies(name: str, stage: int) -> None:
    successors = SuccessorTable(VOCAB)
    successors.rows = np.arange(VOCAB * 8, dtype=np.int32).reshape(VOCAB, 8) % VOCAB
    truth = prompt_of(60)
    seq: Any = SimpleNamespace(
        token_ids=truth[:30],
        root_token=truth[29],
        draft_state=None,
        stop=SimpleNamespace(remaining=50),
        index=SimpleNamespace(successors=successors),
        stats=Stats(),
    )
    recorder = Recorder(DRAFTERS[name](truth), GATES, 60, VOCAB)
    recorder.propose(seq)
    ((_, _, _, trees),) = recorder.kept
    forced = replace(GATES, thresholds=tuple(1.1 if s == stage else 0.0 for s in range(3)))
    tree = PaperPolicy(DRAFTERS[name](truth), forced, 60, VOCAB).propose(seq).build()
    if name.startswith("empty") and stage > {"empty": 0, "empty_below": 1}[name]:
        return  # the gate ends earlier: no confidence at the next checkpoint
    for ours, theirs in zip((trees[stage].token_ids, trees[stage].parents), (tree.token_ids, tree.parents)):
        assert ours.tolist() == theirs.tolist()


def test_rounds_of_a_real_engine() -> None:
    drafter = ModelTopK(tiny_model("llama"))
    gates = Gates(checkpoints=(0, 1), shares=(3, 6, 12), thresholds=(0.3, 0.2), depth=3, width=3)
    engine = Engine(model_of(), None, EngineConfig(policy="dense"), drafter=drafter, cost=cost_of())
    prompt = prompt_of(40)
    rounds = record(engine, [prompt, prompt], gates, 24)
    assert rounds and rounds[: len(rounds) // 2] == rounds[len(rounds) // 2 :]
    assert engine.pool.num_free == engine.pool.num_chunks
    first = rounds[: len(rounds) // 2]
    assert first[0].context == 40 and first[-1].context >= 40 + 24 - 10
    for this, after in pairwise(first):
        assert after.context == this.context + this.accepted[-1] + 1, "never pruned is the dense tree, and the bonus"
    assert max(one.accepted[-1] for one in first) == 4
    for one in first:
        assert len(one.confidences) == 3 and list(one.confidences) == sorted(one.confidences, reverse=True)
        assert len(one.rows) == 3 and max(one.rows) <= 12
        assert one.draft_seconds == pytest.approx((0.002, 0.006, 0.014))


def test_a_beam_cut_short_is_not_recorded() -> None:
    engine = Engine(model_of(), None, EngineConfig(policy="dense"), drafter=DRAFTERS["wrong"]([]), cost=cost_of())
    assert record(engine, [prompt_of(20)], GATES, 8) == []
    assert len(record(engine, [prompt_of(20)], GATES, 9)) == 1
    aside = Engine(model_of(), None, EngineConfig(policy="dense"), drafter=DRAFTERS["never_there"]([]), cost=cost_of())
    assert record(aside, [prompt_of(20)], GATES, 12) == []


def test_accepted_length() -> None:
    tree = chain([7, 1, 2, 3])
    for truth, n in (([1, 2, 3, 4], 3), ([1, 2], 2), ([1, 9], 1), ([9], 0), ([], 0)):
        assert accepted_length(tree, truth) == n


def test_up_to_a_depth() -> None:
    builder = TreeBuilder(7)
    for parent, token, score in ((0, 1, -0.1), (1, 2, -0.2), (0, 3, -0.3), (2, 4, -0.4), (3, 5, -0.5)):
        builder.add(parent, token, score, Source.DRAFT)
    kept = up_to(builder, 2)
    assert (kept.token_ids, kept.parents) == ([7, 1, 2, 3, 5], [-1, 0, 1, 0, 3])
    assert kept.scores == [0.0, -0.1, -0.2, -0.3, -0.5]
    assert len(up_to(builder, 0)) == 1 and len(up_to(builder, 9)) == 6


# What is chosen ------------------------------------------------------------------------------------------------------


def test_stages_are_the_gates_decisions_on_recorded_levels() -> None:
    rounds, gates = load(RECORDED)
    assert len(rounds) >= 20
    for thresholds in (gates.thresholds, (0.8, 0.5, 0.3), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)):
        trial = replace(gates, thresholds=thresholds)
        found = stages(at_checkpoints(rounds, gates), thresholds).tolist()
        assert found == [gate_stage(one.confidences, trial) for one in rounds]
    assert {0, 3} <= set(stages(at_checkpoints(rounds, gates), gates.thresholds).tolist())


def gate_stage(confidences: tuple[float, ...], gates: Gates) -> int:
    """Return where the real gate ends, asked level by level by `grow` of a draft with these best paths."""

    class Recorded:
        in_one_pass = False

        def expand(self, tree: TreeBuilder, nodes: Any, width: int) -> Any:
            depth, node = len(tree) - 1, nodes[0]
            score = np.log(confidences[depth]) - tree.scores[node] if depth < len(confidences) else -np.inf
            row = np.zeros(1, np.int32)
            return SimpleNamespace(token_ids=row, parents=row + node, scores=np.array([score]))

        def seconds(self, rows: int) -> float:
            return 0.0

    gate = ConfidenceGate(gates)
    grow(Recorded(), TreeBuilder(0), gates.depth, 1, gate)
    return gate.stage


def test_recorded_levels_are_real_and_the_choice_is_no_worse_than_the_default() -> None:
    rounds, gates = load(RECORDED)
    assert all(len(one.confidences) == 7 and 0 < one.confidences[0] <= 1 for one in rounds)
    assert all(max(one.rows) <= 60 and max(one.accepted) <= 9 for one in rounds)
    found, rate = choose(rounds, gates)
    assert rate == pytest.approx(rate_of(rounds, found))
    assert rate >= rate_of(rounds, gates) and rate >= rate_of(rounds, replace(gates, thresholds=(0.0, 0.0, 0.0)))


@pytest.mark.parametrize("is_timed", [False, True])
def test_the_choice_is_the_best_of_all(is_timed: bool) -> None:
    """Two checkpoints, few rounds: no threshold between two confidences does better."""
    gates = Gates(checkpoints=(0, 1), shares=(8, 24, 60), thresholds=(0.3, 0.2))
    rounds = [Round(r.confidences, r.accepted[:3], (60,) * 3, r.draft_seconds[:3], 10) for r in synthetic(12)]
    table = cost_of(rise=0.01) if is_timed else None
    confidences = at_checkpoints(rounds, gates)
    splits = [sorted({0.0, *column, 1.1}) for column in confidences.T.tolist()]
    every = [rate_of(rounds, replace(gates, thresholds=pair), table) for pair in itertools.product(*splits)]
    found, rate = choose(rounds, gates, table)
    assert rate == pytest.approx(max(every)) == pytest.approx(rate_of(rounds, found, table))


def test_dear_drafting_prunes_more() -> None:
    rounds = synthetic(100)
    cheap = choose(rounds, GATES, cost_of(rise=0.01))[0]
    dear = [replace(one, draft_seconds=tuple(20 * s for s in one.draft_seconds)) for one in rounds]
    early = stages(at_checkpoints(rounds, GATES), choose(dear, GATES, cost_of(rise=0.01))[0].thresholds)
    late = stages(at_checkpoints(rounds, GATES), cheap.thresholds)
    assert early.mean() < late.mean()


def test_of_equal_thresholds_those_that_draft_least() -> None:
    rounds = [one((0.5,) * 7, (3, 3, 3, 3)) for _ in range(5)]
    assert choose(rounds, GATES)[0].thresholds == (1.0, 1.0, 1.0)
    best_is_full = [one((0.5,) * 7, (0, 0, 0, 3)) for _ in range(5)]
    found, rate = choose(best_is_full, GATES)
    assert stages(at_checkpoints(best_is_full, GATES), found.thresholds).tolist() == [3] * 5 and rate == 4.0


def test_costs_are_passes_and_rows() -> None:
    table = CostTable(np.arange(1.0, len(ROW_BUCKETS) + 1), np.full(len(ROW_BUCKETS), 0.5), frozen=True)
    rounds = [Round((0.5,) * 7, (0,) * 4, (1, 2, 4, 48), (0.1, 0.2, 0.3, 0.4), 10)]
    assert costs(rounds, table)[0].tolist() == pytest.approx([6.1, 7.2, 8.3, 13.4])
    assert costs(rounds, None).tolist() == [[1.0] * 4]


def test_a_checkpoint_below_the_beam_is_never_asked() -> None:
    gates = replace(GATES, depth=3)
    assert at_checkpoints([one((0.1,) * 3, (0,) * 4)], gates).tolist() == [[0.1, 0.1, 1.0]]
    assert gate_stage((0.9, 0.9, 0.9), gates) == 3
    assert at_checkpoints([one((0.9,), (0,) * 4)], GATES).tolist() == [[0.9, 0.0, 0.0]]


def test_nothing_recorded_is_one_sentence() -> None:
    with pytest.raises(GraftError, match="no round was drafted to full depth"):
        choose([], GATES)


# Files and the command ----------------------------------------------------------------------------------------------


def test_rounds_go_to_a_file_and_back(tmp_path: Path) -> None:
    rounds, path = synthetic(7), tmp_path / "levels.json"
    save(path, rounds, replace(GATES, depth=7, width=5))
    assert load(path) == (rounds, replace(GATES, width=5))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"longgraft_recorded_levels": 2}',
        '{"longgraft_recorded_levels": 1, "gates": {}, "rounds": 3}',
        '{"longgraft_recorded_levels": 1, "gates": {"depth": -1}, "rounds": []}',
        '{"longgraft_recorded_levels": 1, "gates": {}, "rounds": [[[0.5], [1], [2], [0.1], 3]]}',
        '{"longgraft_recorded_levels": 1, "gates": {}, "rounds": [[[2], [1,1,1,1], [2,2,2,2], [0,0,0,0], 3]]}',
        '{"longgraft_recorded_levels": 1, "gates": {}, "rounds": [[[0.5], [1,1,1,1], [0,2,2,2], [0,0,0,0], 3]]}',
        '{"longgraft_recorded_levels": 1, "gates": {}, "rounds": [[[NaN], [1,1,1,1], [2,2,2,2], [0,0,0,0], 3]]}',
        '{"longgraft_recorded_levels": 1, "gates": {}, "rounds": [[[0.5], [1,1,1,1], [2,2,2,2], [0,0,0,0]]]}',
    ],
)
def test_what_is_no_record_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "levels.json").write_text(text)
    with pytest.raises(GraftError, match=r"levels\.json"):
        load(tmp_path / "levels.json")


def test_the_command_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "levels.json", synthetic(50), GATES)
    cost_of(rise=0.02).save(tmp_path / "costs.json")
    files = {name: str(tmp_path / f"{name}.json") for name in ("levels", "costs", "gates", "again")}
    for more, unit in (([], "tokens_per_round"), (["--cost-table", files["costs"]], "tokens_per_second")):
        assert main(["--replay", files["levels"], "--out", files["gates"], "--record", files["again"], *more]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["rounds"] == 50 == sum(result["rounds_by_stage"])
        assert result[unit] >= max(result[f"{unit}_by_default"], result[f"{unit}_never_pruned"])
        assert list(Gates.load(files["gates"]).thresholds) == result["thresholds"]
    assert load(files["again"]) == load(files["levels"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model and --draft are needed"),
        (["--model", "m"], "--model and --draft are needed"),
        (["--model", "m", "--draft", "d", "--max-new-tokens", "0"], "expected 1 or more"),
        (["--replay", "none.json"], "recorded levels none.json"),
        (["--replay", "none.json", "--cost-table", "none.json"], "cost table none.json"),
        (["--model", "m", "--draft", "d", "--gates", "none.json"], "gates none.json"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--out", "never.json"]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not Path("never.json").exists()


def test_prompts(tmp_path: Path) -> None:
    def tokenizer(text: str) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}

    (tmp_path / "one.txt").write_text("a bb\n\nccc")
    (tmp_path / "many.jsonl").write_text('{"prompt": "a"}\n{"prompt": "bb"}\n{"prompt": "ccc"}\n')
    files = [str(tmp_path / "one.txt"), str(tmp_path / "many.jsonl")]
    assert prompts_of("", files, tokenizer, 2) == [[1, 2, 3], [1], [2]]
    asked = prompts_of("chat,quote", [], byte_level(), 2, 700)
    assert len(asked) == 4 and len({tuple(ids) for ids in asked}) == 4 and max(map(len, asked)) <= 700
    for tasks, texts, message in (
        ("", [], "no prompts"),
        ("chat,dance", [], "task 'dance' is not known; expected some of rewrite"),
        ("", [str(tmp_path / "none.txt")], "none.txt"),
    ):
        with pytest.raises(GraftError, match=message):
            prompts_of(tasks, texts, tokenizer, 2)
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(GraftError, match=r"bad\.jsonl: expected a JSON object with a prompt"):
        prompts_of("", [str(tmp_path / "bad.jsonl")], tokenizer, 2)
