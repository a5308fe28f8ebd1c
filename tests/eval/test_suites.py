"""Suites: names, data from files, the hub's library and git, and prompts that fit their length."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from longgraft.config import GraftError
from longgraft.eval.fitting import Prompt
from longgraft.eval.suite_needles import NEEDLES, needle
from longgraft.eval.suites import check_spec, open_tasks, prompt_of
from tests.saved_model import byte_level

TOKENIZER = byte_level()
BARE = byte_level(template=None)


def prompt(spec: str, context: int, seed: int = 0, label: str | None = None) -> Prompt | None:
    tasks = open_tasks([spec])
    label = label or next(iter(tasks))
    return prompt_of(tasks[label], label, context, BARE, seed)


def text_of(found: Prompt | None) -> str:
    assert found is not None
    return str(BARE.decode(found.token_ids))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_samples_have_every_part_and_fit() -> None:
    tasks = open_tasks(["specbench", "longbench", "longspec", "git"])
    assert {"specbench/mt_bench", "specbench/rag", "longbench/lcc", "longbench/repobench-p"} < set(tasks)
    assert {"longbench/qmsum", "longbench/gov_report", "longspec/all", "git/edit", "git/complete"} < set(tasks)
    for label, task in tasks.items():
        found = prompt_of(task, label, 4000, TOKENIZER, 0)
        assert found is not None and 64 <= len(found.token_ids) <= 4000 and found.task == label


def test_spec_bench_layout(tmp_path: Path) -> None:
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["first writer " * 9, "later"]},
        {"question_id": 82, "category": "coding", "turns": ["second writer " * 9, "later"]},
        {"question_id": 240, "category": "qa", "turns": ["a question " * 9]},
    ]
    folder = write(tmp_path / "question.jsonl", rows).parent
    labels = list(open_tasks([f"specbench:{folder}"]))
    digest = labels[0].split("@")[1].split("/")[0]
    assert labels == [f"specbench@{digest}/mt_bench", f"specbench@{digest}/qa"]
    # Order is the file's, the first turn is asked, and there are as many seeds as items.
    assert text_of(prompt(f"specbench/mt_bench:{folder}", 400, 1)).startswith("second writer")
    assert prompt(f"specbench/mt_bench:{folder}", 400, 2) is None
    found = prompt(f"specbench/qa:{folder}", 400)
    assert found is not None and found.source == "question:240"
    write(tmp_path / "question.jsonl", rows[:2])
    assert next(iter(open_tasks([f"specbench:{folder}"]))) != labels[0], "other data, another label"


def test_of_a_long_context_beginning_and_end_stay(tmp_path: Path) -> None:
    lines = [f"line {n} of the meeting\n" for n in range(400)]
    row = {"_id": "x", "dataset": "qmsum", "context": "".join(lines), "input": "Who spoke {context}?"}
    file = write(tmp_path / "qmsum.jsonl", [row])
    found = prompt(f"longbench:{file}", 900)
    text = text_of(found)
    assert found is not None and 800 < len(found.token_ids) <= 900
    assert "line 0 of" in text and "line 399 of" in text and "line 200 of" not in text and "[...]" in text
    assert "Who spoke {context}?" in text
    whole = text_of(prompt(f"longbench:{file}", 20_000))
    assert "[...]" not in whole and "".join(lines).strip() in whole
    with pytest.raises(GraftError, match=r"qmsum:x: its question alone is longer than 64 tokens"):
        prompt(f"longbench:{file}", 64)


def test_a_text_without_a_question_is_to_be_summarised(tmp_path: Path) -> None:
    for dataset, words in (("multi_news", "Here are news of one event"), ("vcsum", "Here is a text")):
        file = write(tmp_path / "rows.jsonl", [{"dataset": dataset, "context": "It rained.", "input": ""}])
        text = text_of(prompt(f"longbench:{file}", 200))
        assert words in text and "Summarise" in text and "Answer from it" not in text


def test_long_items_come_first_and_those_that_do_not_fit_not_at_all(tmp_path: Path) -> None:
    file = write(tmp_path / "all.jsonl", [{"prompt": "word " * n} for n in (30, 90, 300)])
    lengths = [len(found.token_ids) for seed in range(3) if (found := prompt(f"longspec:{file}", 500, seed))]
    assert len(lengths) == 2 and lengths[0] > lengths[1]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("poem", "task 'poem' is not known; expected some of rewrite"),
        ("chat:folder", "chat has neither parts nor a folder"),
        ("specbench:", "expected a folder or a hub id behind the colon"),
        ("specbench/cooking", "no part 'cooking'; expected one of mt_bench"),
        ("longbench:/no/such/folder", "no such folder"),
        ("git:/no/such/folder", "git rev-parse failed"),
    ],
)
def test_what_cannot_be_opened_is_one_sentence(spec: str, message: str) -> None:
    with pytest.raises(GraftError, match=message):
        check_spec(spec)
        open_tasks([spec])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "line 1: expected a JSON object"),
        ("{", "line 1: not JSON"),
        ('{"category": "qa"}', "expected a text under 'prompt'"),
        ('{"turns": [3]}', "expected a text under 'prompt'"),
        ("", "there are no lines"),
    ],
)
def test_what_is_no_suite_is_one_sentence(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "question.jsonl").write_text(line + "\n")
    with pytest.raises(GraftError, match=message):
        open_tasks([f"specbench:{tmp_path}"])


def test_the_same_task_twice_is_refused_and_lengths_are_checked() -> None:
    with pytest.raises(GraftError, match="git/edit is asked for twice"):
        open_tasks(["git", "git/edit"])
    task = open_tasks(["needle"])["needle"]
    with pytest.raises(GraftError, match="a context of 63 tokens; expected at least 64"):
        prompt_of(task, "needle", 63, BARE, 0)
    with pytest.raises(GraftError, match="no tokenizer"):
        prompt_of(task, "needle", 100, None, 0)


@pytest.mark.slow
def test_rows_of_the_hubs_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    write(tmp_path / "owner" / "name" / "test.jsonl", [{"prompt": "hub " * 40}, {"prompt": "more " * 50}])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from longgraft.eval import suite_files

    rows = list(suite_files._hub("owner/name"))
    assert [row["prompt"][:4] for _, row in rows] == ["hub ", "more"] and rows[0][0] == "name:1"
    with pytest.raises(GraftError, match="neither a folder nor a dataset that could be loaded"):
        list(suite_files._hub("owner/other"))


def commit(folder: Path, message: str) -> None:
    about = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(folder), "add", "."], check=True)
    subprocess.run(["git", "-C", str(folder), *about, "commit", "-qm", message], check=True)


def test_a_history_becomes_edits_and_completions(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    head = "".join(f"value_{n} = {n}\n" for n in range(12))
    (tmp_path / "a.py").write_text(head + "old = 1\n")
    (tmp_path / "b.bin").write_bytes(b"\x00")
    commit(tmp_path, "Begin")
    with pytest.raises(GraftError, match="holds no change to a text file"):
        open_tasks([f"git:{tmp_path}"])
    (tmp_path / "a.py").write_text(head + "new = 2\nmore = 3\n")
    (tmp_path / "b.bin").write_bytes(b"\xff\x00")
    commit(tmp_path, "Rename old to new")
    (tmp_path / "größe.md").write_text("x\n" * 9)
    commit(tmp_path, "Add a page")
    (tmp_path / "größe.md").write_bytes(b"\xff\n" * 9)
    commit(tmp_path, "Not UTF-8 any more")
    tasks = open_tasks([f"git:{tmp_path}"])
    (edit, complete) = tasks
    assert edit.startswith("git@") and edit.endswith("/edit") and complete.endswith("/complete")
    text = text_of(prompt_of(tasks[edit], edit, 2000, BARE, 0))
    assert "the file a.py" in text and f"{head}old = 1\n```" in text and "Rename old to new" in text
    text = text_of(prompt_of(tasks[complete], complete, 2000, BARE, 0))
    assert f"```\n{head}" in text and "new = 2" not in text
    assert prompt_of(tasks[edit], edit, 2000, BARE, 1) is None


@pytest.mark.parametrize("kind", NEEDLES)
def test_needles_fill_any_length_and_hold_their_answers(kind: str) -> None:
    short = needle(kind, 600, BARE, 3)
    for found, context in ((short, 600), (needle(kind, 5000, BARE, 3), 5000)):
        text = text_of(found)
        assert 0.8 * context <= len(found.token_ids) <= context
        assert found.answers and all(answer in text for answer in found.answers)
    assert needle(kind, 600, BARE, 3) == short and needle(kind, 600, BARE, 4).digest != short.digest


def test_a_needle_is_nowhere_in_its_question_and_a_chain_is_in_order() -> None:
    for kind in ("needle", "needles"):
        hidden = NEEDLES[kind](0)
        assert not any(answer in hidden.question for answer in hidden.answers)
    hidden = NEEDLES["chain"](0)
    text = text_of(needle("chain", 3000, BARE, 0))
    places = [text.index(f"Let {b} be {a}.") for a, b in zip(hidden.answers, hidden.answers[1:])]
    assert places == sorted(places)


def test_common_words_lead_at_any_length() -> None:
    hidden = NEEDLES["common"](1)
    for length in (40, 900):
        words = list(hidden.lines[:length])
        counts = sorted(set(words), key=lambda word: -words.count(word))
        assert set(counts[: len(hidden.answers)]) == set(hidden.answers)
