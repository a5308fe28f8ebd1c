"""Texts of the index benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from longgraft.config import GraftError
from longgraft.eval import bench_texts
from longgraft.eval.bench_texts import HARD, REAL, bytes_of, fibonacci, text_of


@pytest.mark.parametrize("kind", [*REAL, *HARD])
def test_every_kind_has_tokens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = bench_texts.stdlib_files()
    monkeypatch.setattr(bench_texts, "stdlib_files", lambda: files[:20])
    tokens = text_of(kind, 3000, bytes_of)
    assert tokens.dtype == np.int32 and len(tokens) == 3000
    assert tokens.min() >= 0 and tokens.max() < 256
    np.testing.assert_array_equal(tokens[:100], text_of(kind, 100, bytes_of))


def test_the_library_is_real_source() -> None:
    files = bench_texts.stdlib_files()
    assert len(files) > 100 and any(path.name == "argparse.py" for path in files)
    assert not any("site-packages" in str(path) for path in files)


def test_fibonacci() -> None:
    assert fibonacci(8).tolist() == [0, 1, 0, 0, 1, 0, 1, 0]
    assert len(fibonacci(1)) == 1 and len(fibonacci(0)) == 0


def test_traces_come_first(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    records = [{"prompt": "ab", "output": "c", "family": family} for family in ("agent", "code_edit", "other")]
    file.write_text("\n".join(map(json.dumps, records)))
    assert text_of("chat", 3, bytes_of, [str(file)]).tolist() == list(b"abc")
    assert text_of("code", 3, bytes_of, [str(file)]).tolist() == list(b"abc")
    assert text_of("chat", 5, bytes_of, [str(file)]).tolist() == list(b"abc<|")
    file.write_text('{"family": "agent"}')
    with pytest.raises(GraftError, match=r"line 1: not a trace \(KeyError\('prompt'\)\)"):
        text_of("chat", 3, bytes_of, [str(file)])
    with pytest.raises(GraftError, match="No such file"):
        text_of("chat", 3, bytes_of, [str(tmp_path / "none")])


def test_an_unknown_kind() -> None:
    with pytest.raises(GraftError, match="text 'verse' is unknown: expected one of code, prose"):
        text_of("verse", 3, bytes_of)
