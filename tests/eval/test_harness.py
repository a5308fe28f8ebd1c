"""lm-evaluation-harness on the engine: the same texts, the same scores, and what each took."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longgraft.config import GraftError
from longgraft.engine import Engine
from tests.eval.lm_tasks import CHOOSE, GENERATE, save_ending
from tests.saved_model import PROMPT, byte_level, calm, cheap_rows, invoke

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
pytest.importorskip("lm_eval")


@pytest.fixture(autouse=True)
def calmly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with calm():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_ending(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model: str) -> Engine:
    return Engine.from_pretrained(model)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with two tasks; one of the known answers is what the model says."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [{"q": f"{PROMPT} {n} {PROMPT}", "a": "x", "choices": [" the", " hat"], "label": n % 2} for n in range(5)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("tiny_generate", GENERATE), ("tiny_choose", CHOOSE)):
        (folder / f"{name}.yaml").write_text(text.format(name=name, file=folder / "rows.jsonl"))
    return folder


def request(context: str, **arguments: Any) -> Any:
    return SimpleNamespace(args=(context, arguments), task_name="task", doc={"max_length": 64}, resps=[])


REQUESTS = [
    request(f"{PROMPT} {n}", until=until, max_gen_toks=16, do_sample=False)
    for n, until in enumerate([[], ["a"], ["<|start|>", "\n"], ["e", "t "], [" ", ""], ["hat"]])
]


def test_texts_are_those_of_the_harness_itself(engine: Engine) -> None:
    from lm_eval.models.huggingface import HFLM

    from longgraft.eval.harness import GraftLM

    theirs = HFLM(engine.target.model, tokenizer=engine.tokenizer, backend="causal", batch_size=1)
    expected = theirs.generate_until(REQUESTS, disable_tqdm=True)
    # No string ends at once there: "" is in every text, which is no wish of a task.
    expected[4] = GraftLM(engine, ["plain"]).generate_until([REQUESTS[4]], disable_tqdm=True)[0]
    assert len(set(map(len, expected))) > 1
    for policy in ("plain", "retrieval", "adaptive"):
        for batch_size in (1, 3):
            lm = GraftLM(engine, [policy], batch_size=batch_size)
            assert lm.generate_until(REQUESTS, disable_tqdm=True) == expected
            assert {(run.task, run.length, run.policy) for run in lm.runs} == {("task", 64, policy)}


def test_log_likelihoods_are_those_of_the_harness_itself(engine: Engine) -> None:
    from lm_eval.models.huggingface import HFLM

    from longgraft.eval.harness import GraftLM

    pairs = [SimpleNamespace(args=(PROMPT, f" the {word}")) for word in ("hat", "mat", "cat")]
    theirs = HFLM(engine.target.model, tokenizer=engine.tokenizer, backend="causal", batch_size=1)
    ours = GraftLM(engine, ["adaptive"])
    ours.generate_until(REQUESTS[:1], disable_tqdm=True)  # leaves nothing of itself in the model
    assert ours.loglikelihood(pairs, disable_tqdm=True) == theirs.loglikelihood(pairs, disable_tqdm=True)


def test_sampled_texts_depend_on_the_seed_and_not_on_the_policy(engine: Engine) -> None:
    from longgraft.eval.harness import GraftLM

    drawn = [request(PROMPT, until=[], max_gen_toks=12, do_sample=True, temperature=2.0, top_k=50) for _ in range(4)]
    found = {
        (policy, seed): GraftLM(engine, [policy], seed=seed).generate_until(drawn, disable_tqdm=True)
        for policy in ("plain", "adaptive")
        for seed in (1, 2)
    }
    assert found["plain", 1] == found["adaptive", 1] != found["plain", 2] == found["adaptive", 2]
    assert len(set(found["plain", 1])) == 4, "repeats of one request differ"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"num_beams": 4}, "num_beams is 4"), ({"magic": 1}, "generation argument 'magic' of a task")],
)
def test_what_cannot_be_the_same_is_refused_by_name(engine: Engine, arguments: dict[str, Any], message: str) -> None:
    from longgraft.eval.harness import GraftLM

    with pytest.raises(GraftError, match=message):
        GraftLM(engine, ["plain"]).generate_until([request(PROMPT, until=[], **arguments)], disable_tqdm=True)


def test_a_tokenizer_without_an_end_is_refused(engine: Engine, tmp_path: Path) -> None:
    from longgraft.eval.harness import GraftLM

    with pytest.raises(GraftError, match="names no end-of-text token"):
        GraftLM(Engine(engine.target.model, byte_level()), ["plain"])


def test_a_limit_counts_for_every_length_of_a_task() -> None:
    from longgraft.eval.harness_report import chosen

    lengths = [SimpleNamespace(eval_docs=[{"max_length": n} for n in (4096,) * 3 + (16384,) * 3])]
    tasks = {"ruler": lengths[0], "other": SimpleNamespace(eval_docs=[{"q": "why?"}] * 5)}
    assert chosen(tasks, 2) == {"ruler": [0, 1, 3, 4], "other": [0, 1]}
    assert chosen(tasks, 0.5) == {"ruler": [0, 1, 3, 4], "other": [0, 1, 2]}
    assert chosen(tasks, 9) == {"ruler": list(range(6)), "other": list(range(5))} and chosen(tasks, None) is None


def test_the_command_gives_equal_scores_and_speed(model: str, tasks: Path, tmp_path: Path) -> None:
    costs, out = cheap_rows(tmp_path / "costs.json"), tmp_path / "out"
    common = ("eval", "lm-eval", "-m", model, "--cost-table", costs, "--include-path", str(tasks))
    names = ("--tasks", "tiny_generate,tiny_choose")
    result = invoke(*common, *names, "--compare-plain", "--limit", "4", "--log-samples", "--out", str(out))
    assert result.exit_code == 0, result.stderr
    assert "scores of both: equal" in result.stdout and "| tiny_generate | - | adaptive | 4 |" in result.stdout
    (file,) = out.glob("results_*.json")
    found = json.loads(file.read_text())
    assert {"results", "configs", "n-samples", "longgraft"} <= found.keys() and "samples" not in found
    ours = found["longgraft"]
    assert ours["equal_scores"] and set(ours["plain_results"]) == {"tiny_generate"}
    grafted, plain = ours["speed"]
    assert (grafted["policy"], plain["policy"]) == ("adaptive", "plain") and plain["acceptance_length"] == 1.0
    assert grafted["same_tokens"] == grafted["of"] == 4 and grafted["end_to_end"] > 0 and grafted["decode"] > 0
    assert ours["environment"]["torch"] and ours["policies"] == ["adaptive", "plain"]
    samples = next(out.glob("samples_tiny_generate_*.jsonl")).read_text().splitlines()
    assert len(samples) == 4

    alone = invoke(*common, *names, "--plain", "--limit", "4", "--out", str(tmp_path / "plain"))
    assert alone.exit_code == 0, alone.stderr
    (file,) = (tmp_path / "plain").glob("results_*.json")
    assert json.loads(file.read_text())["results"] == found["results"]

    result = invoke(*common, "--tasks", "tiny_choose", "--compare-plain", "--limit", "2")
    assert result.exit_code == 0 and "scores of both: nothing to compare" in result.stdout, result.stderr

    result = invoke(*common, "--tasks", "no_such_task")
    assert result.exit_code == 2 and "tasks no_such_task: cannot be loaded" in result.stderr
