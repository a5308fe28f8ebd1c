"""Reading trace files: what is accepted, what is left out, and what is refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from longgraft.config import GraftError
from longgraft.eval.traces import MAX_OUTPUT, read_traces
from tests.small_tokenizers import byte_level


def points(text: str) -> Sequence[int]:
    return [ord(letter) for letter in text]


def write(path: Path, *records: Any, end: str = "\n") -> str:
    path.write_text(end.join(json.dumps(record, ensure_ascii=False) for record in records) + end, "utf-8")
    return str(path)


def test_records_become_traces(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.jsonl",
        {"prompt": "ab", "output": "c", "family": "f", "source": "o/r@1:p"},
        {"prompt": "", "output": "x" * (MAX_OUTPUT + 5), "id": "i"},
    )
    first, second = read_traces([file], points)
    assert (first.family, first.group, first.prompt_len) == ("f", "o/r", 2)
    assert first.token_ids.tolist() == [97, 98, 99]
    assert (second.family, second.group, second.prompt_len) == ("all", "i", 0)
    assert len(second.token_ids) == MAX_OUTPUT


def test_only_line_feeds_end_a_record(tmp_path: Path) -> None:
    text = "naïve \u2028 \u2029 \x85 \x0c 日本 😀"
    file = write(tmp_path / "a.jsonl", {"prompt": text, "output": text}, end="\r\n\n  \n")
    (trace,) = read_traces([file], points)
    assert trace.token_ids.tolist() == points(text + text)
    Path(file).write_bytes(b"\xef\xbb\xbf" + Path(file).read_bytes())
    assert len(read_traces([file], points)) == 1


def test_empty_outputs_are_left_out(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"prompt": "p", "output": ""}, {"prompt": "p", "output": "q"})
    assert len(read_traces([file], points)) == 1
    file = write(tmp_path / "b.jsonl", {"prompt": "p", "output": ""})
    with pytest.raises(GraftError, match="every output is empty"):
        read_traces([file], points)


@pytest.mark.parametrize(
    "line, says",
    [
        ("[1]", "not a JSON object"),
        ("3", "not a JSON object"),
        ("{", "line 2: not a trace"),
        ('{"prompt": "p"}', "no text under 'output'"),
        ('{"output": "p"}', "no text under 'prompt'"),
        ('{"prompt": null, "output": "p"}', "no text under 'prompt'"),
        ('{"prompt": ["p"], "output": "p"}', "no text under 'prompt'"),
        ('{"prompt": "\\ud800", "output": "p"}', "surrogates not allowed"),
        ('{"prompt": "p", "output": "p", "family": "pooled"}', "'pooled' is kept"),
        ("[" * 100_000, "line 2: not a trace"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f"\n{line}\n", "utf-8")
    with pytest.raises(GraftError, match=says):
        read_traces([str(file)], points)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(GraftError, match=r"none.jsonl: No such file"):
        read_traces([str(tmp_path / "none.jsonl")], points)
    with pytest.raises(GraftError, match="directory"):
        read_traces([str(tmp_path)], points)
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    with pytest.raises(GraftError, match="not UTF-8 from byte 2 on"):
        read_traces([str(tmp_path / "bytes")], points)
    (tmp_path / "empty").write_text("\n \n")
    with pytest.raises(GraftError, match="files are empty"):
        read_traces([str(tmp_path / "empty")], points)


def test_tokenizers(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"prompt": "The quick", "output": " fox😀"})
    with pytest.raises(GraftError, match=r"tokenizer .*none: expected a folder or a hub id"):
        read_traces([file], str(tmp_path / "none"))
    tokenizer = byte_level()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (trace,) = read_traces([file], str(tmp_path / "tokenizer"))
    assert tokenizer.decode(trace.token_ids.tolist()) == "The quick fox😀"
    assert 1 not in trace.token_ids.tolist()[: trace.prompt_len]  # no end mark is put in
