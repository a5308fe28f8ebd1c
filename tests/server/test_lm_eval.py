"""lm-evaluation-harness against the server: the scores of its own `hf` model, twice in a row. Slow.

`LONGGRAFT_SERVE_MODEL`, a folder or hub id, adds a real model.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longgraft.engine import Engine
from longgraft.server.run import Server
from tests.eval.lm_tasks import CHOOSE, GENERATE
from tests.saved_model import PROMPT, byte_level, calm, save
from tests.server import live

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("tenacity")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
REAL = os.environ.get("LONGGRAFT_SERVE_MODEL", "")
ROLLING = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{q}}}}"
metric_list: [{{metric: word_perplexity}}]
"""
TASKS = {"tiny_generate": GENERATE, "tiny_choose": CHOOSE, "tiny_rolling": ROLLING}


@pytest.fixture(scope="module", params=["tiny", "real"] if REAL else ["tiny"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == "real":
        return REAL
    made = tmp_path_factory.mktemp("model")
    save(made)
    tokenizer = byte_level()
    tokenizer.eos_token = "<|start|>"
    tokenizer.save_pretrained(made)
    return str(made)


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[Server]:
    with live.serving(Engine.from_pretrained(folder, dtype="auto" if folder != REAL else "float32")) as opened:
        yield opened


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made = tmp_path / "tasks"
    made.mkdir()
    rows = [{"q": f"{PROMPT} {n} {PROMPT * n}", "a": "x", "choices": [" the", " hat on"], "label": n % 2}
            for n in range(1, 6)]  # fmt: skip
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TASKS.items():
        (made / f"{name}.yaml").write_text(text.format(name=name, file=made / "rows.jsonl"))
    with calm():
        yield made
    logging.disable(logging.NOTSET)


def answers(tasks: Path, kind: str, batch_size: int = 1, **arguments: Any) -> dict[str, list[Any]]:
    """What a model answered to every document of every task."""
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=kind,
        model_args=arguments,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        batch_size=batch_size,
        bootstrap_iters=0,
    )
    return {name: [one["filtered_resps"] for one in found["samples"][name]] for name in TASKS}


@pytest.mark.parametrize(("tokens", "batch"), [("huggingface", 1), ("huggingface", 3), ("remote", 1)])
def test_the_same_scores_twice(server: Server, folder: str, tasks: Path, tokens: str, batch: int) -> None:
    dtype = "float32" if folder == REAL else "float64"
    expected = answers(tasks, "hf", pretrained=folder, dtype=dtype, device="cpu")
    base: dict[str, Any] = {"model": "tiny", "base_url": f"{server.url}/v1/completions", "tokenizer": folder}
    base |= {"tokenizer_backend": tokens, "max_length": 512}
    first, second = (answers(tasks, "local-completions", batch, **base) for _ in range(2))
    assert first == second
    assert first["tiny_generate"] == expected["tiny_generate"]
    for one, known in zip(first["tiny_choose"], expected["tiny_choose"], strict=True):
        assert [greedy for _, greedy in one] == [greedy for _, greedy in known]
        assert [value for value, _ in one] == pytest.approx([value for value, _ in known], abs=1e-4)
    rolled, known = (values["tiny_rolling"] for values in (first, expected))
    assert rolled == [pytest.approx(value, abs=1e-2) for value in known]
