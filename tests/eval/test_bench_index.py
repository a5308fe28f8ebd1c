"""The index benchmark on small texts: what it reports, not how fast."""

from __future__ import annotations

import json
import sys

import pytest

from longgraft.eval import bench_index
from longgraft.eval.baselines import open_baseline
from longgraft.eval.bench_texts import text_of


@pytest.fixture(autouse=True)
def no_arctic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", None)


def test_ends_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        bench_index.main(["--sizes", "300,100", "--steps", "20", "--texts", "one token,fibonacci", "--budget", "8"])
        == 0
    )
    shown = capsys.readouterr()
    assert "left out: method arctic needs arctic-inference" in shown.err
    result = json.loads(shown.out.splitlines()[-1])
    assert result["bench"] == "index" and isinstance(result["native"], bool)
    rows = result["rows"]
    assert {(row["text"], row["tokens"]) for row in rows} == {
        (text, size) for text in ("one token", "fibonacci") for size in (100, 300)
    }
    for row in rows:
        assert row["build_tokens_per_s"] > 0
        if row["method"].startswith("longgraft"):
            assert row["nodes_per_step"] == 8 and row["bytes_per_token"] > 20
            assert 0 < row["step_us_p50"] <= row["step_us_p99"]
    assert {row["method"] for row in rows} >= {"longgraft", "longgraft, learning", "pld"}


def test_too_little_text_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_index, "text_of", lambda kind, size, encode, paths: text_of("periodic", 150, encode))
    assert bench_index.main(["--sizes", "100,200", "--steps", "20", "--texts", "code"]) == 0
    shown = capsys.readouterr()
    assert "code: 150 tokens of it, 200 left out" in shown.err
    assert {row["tokens"] for row in json.loads(shown.out.splitlines()[-1])["rows"]} == {100}


def test_bytes_held_by_python_grow_with_the_text() -> None:
    held = [
        bench_index.bytes_held(open_baseline("pld"), text_of("fibonacci", size, lambda text: []))
        for size in (500, 5000)
    ]
    assert held[0] is not None and held[1] is not None
    assert 500 * held[0] < 5000 * held[1]


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--texts", "verse"], "text 'verse' is unknown"),
        (["none.jsonl", "--texts", "code"], "none.jsonl: No such file"),
        (["--tokenizer", "none/at all/here"], "tokenizer none/at all/here: expected"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_index.main([*arguments, "--sizes", "50", "--steps", "5"]) == 2
    shown = capsys.readouterr().err.strip().splitlines()
    assert says in shown[-1]


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--budget", "0"], ["--sizes", "0"], ["--sizes", "1e5"]])
def test_options_out_of_range(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        bench_index.main(arguments)
    assert stop.value.code == 2 and "expected" in capsys.readouterr().err


def test_an_interrupt_ends_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_index, "measure", interrupt)
    assert bench_index.main(["--sizes", "50", "--steps", "5", "--texts", "periodic"]) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")
