"""Prompts: as long as asked for, the same every time, of the right kind, from traces where there are some."""

import json
from pathlib import Path

import pytest

from longgraft.config import GraftError
from longgraft.eval import policy_tasks
from longgraft.eval.fitting import encode, flat
from longgraft.eval.policy_tasks import TASKS, Record, build, read_records
from tests.saved_model import byte_level

TOKENIZER = byte_level()
BARE = byte_level(template=None)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("context", [700, 3000])
def test_a_prompt_fills_its_context(task: str, context: int) -> None:
    prompt = build(task, context, TOKENIZER)
    assert 0.8 * context <= len(prompt.token_ids) <= context
    assert build(task, context, TOKENIZER) == prompt and prompt.source == "python"


@pytest.mark.parametrize("task", TASKS)
def test_another_variant_is_another_prompt(task: str) -> None:
    assert len({build(task, 900, TOKENIZER, variant).digest for variant in range(3)}) == 3


def test_a_file_is_rewritten_and_the_renamed_word_is_in_it() -> None:
    text = TOKENIZER.decode(build("rewrite", 4000, TOKENIZER).token_ids)
    old = text.split("Rename `")[1].split("`")[0]
    assert text.count(old) > 3 and "```python\n" in text


def test_a_conversation_keeps_its_turns_where_there_is_no_template() -> None:
    text = BARE.decode(build("chat", 2000, BARE).token_ids)
    assert text.startswith("User: What does Python's language reference say under")
    assert "\n\nAssistant: It says:\n" in text and text.endswith("\n\nAnswer:\n")


def test_a_template_without_assistants_gets_one_message() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = TOKENIZER.decode(encode(messages, TOKENIZER))
    assert text == "<|start|>user: User: a\n\nAssistant: b\nassistant: "
    assert flat(messages[:1]) == "a"


def test_a_template_that_takes_nothing_is_an_error() -> None:
    with pytest.raises(GraftError, match=r"does not take a user's message: never"):
        encode([{"role": "user", "content": "a"}], byte_level(template="{{ raise_exception('never') }}"))


@pytest.mark.parametrize(
    ("task", "context", "message"),
    [
        ("new_file", 100, "its question alone is"),
        ("rewrite", 2**14, "there is text for"),
    ],
)
def test_what_cannot_be_built_is_one_sentence(
    task: str, context: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_tasks, "FILES", ("sched",))
    with pytest.raises(GraftError, match=message):
        build(task, context, TOKENIZER)


def test_no_sources_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_tasks, "FILES", ("no_such_module",))
    with pytest.raises(GraftError, match="no_such_module is not here"):
        build("rewrite", 500, TOKENIZER)


def test_the_nearest_trace_is_taken_and_never_a_longer_one() -> None:
    records = [Record("chat", f"r{size}", "x y " * size) for size in (50, 120, 200, 260)]
    one = build("chat", 500, BARE, traces=records)
    assert one.source == "r120" and len(one.token_ids) <= 500
    assert build("chat", 2000, BARE, traces=records).source == "python"
    assert build("quote", 700, BARE, traces=records).source == "python"


def test_records_are_read_by_family(tmp_path: Path) -> None:
    lines = [
        {"family": "code_edit", "id": "one", "prompt": "a", "output": "b"},
        {"family": "changelog", "prompt": "c"},
        {"family": "doc_qa", "prompt": "d"},
    ]
    file = tmp_path / "traces.jsonl"
    file.write_text("\n\n".join(map(json.dumps, lines)))
    found = read_records([str(file)])
    assert found == [Record("rewrite", "one", "a"), Record("quote", f"{file}:5", "d")]


@pytest.mark.parametrize("text", ["[1]", "{}", "no", '{"family": []}', '{"family": "changelog", "prompt": "a"}', ""])
def test_what_holds_no_records_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(GraftError, match="trace file"):
        read_records([str(tmp_path / "t")])
