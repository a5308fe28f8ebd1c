"""The measurement of the tools: its files, its cases, a row of its table."""

import argparse
from pathlib import Path

import pytest

from longgraft.eval.bench_tools import PDF_PAGES, TEXT_BYTES, Run, cases, holes, reference, row
from longgraft.eval.tiny_pdf import pages_of
from tests.index.corpus_cases import write

FUNCTION = "def work(x):\n" + "".join(f"    x += {i}\n" for i in range(10)) + "    return x\n\n\n"


def test_the_texts_are_long_enough() -> None:
    text = reference()
    assert len(text.encode()) > TEXT_BYTES and len(pages_of(text, PDF_PAGES)) == PDF_PAGES
    assert "assert" in text[:5000]


def test_bodies_are_taken_out(tmp_path: Path) -> None:
    write(
        tmp_path, {f"a{i}.py": f"# {i}\n" * 80 + FUNCTION * 3 for i in range(9)} | {"short.py": FUNCTION, "x.py": "("}
    )
    places = holes(tmp_path)
    assert [file for file, _ in places] == ["a1.py", "a4.py", "a7.py"]
    for file, line in places:
        lines = (tmp_path / file).read_text().split("\n")
        assert lines[line - 2] == "def work(x):" and lines[line - 1] == "    " and lines[line] == ""
        assert (tmp_path / file).read_text().count("return x") == 2
    with pytest.raises(SystemExit, match="expected 3 or more"):
        holes(write(tmp_path / "few", {"a.py": FUNCTION}))


def test_every_tool_has_its_cases(tmp_path: Path) -> None:
    write(tmp_path / "package", {f"a{i}.py": f"# {i}\n" * 120 + FUNCTION for i in range(3)})
    args = argparse.Namespace(tools="ask,edit,complete", new=8, repo=str(tmp_path / "package"))
    (tmp_path / "out").mkdir()
    found = list(cases(args, tmp_path / "out"))
    assert [case.arguments[0] for case in found] == ["ask", "ask", "edit", "complete", "complete", "complete"]
    assert (tmp_path / "out" / "reference.pdf").read_bytes().startswith(b"%PDF")
    with pytest.raises(SystemExit, match="expected some of ask, edit, complete"):
        list(cases(argparse.Namespace(tools="ask,paint", new=8, repo=None), tmp_path))


def test_a_row_sums_requests_and_takes_medians_over_pairs() -> None:
    def run(seconds: float, request: float) -> Run:
        stats = {"new_tokens": 10, "decode_s": request / 2, "end_to_end_s": request, "rounds": 5}
        answer = {"stats": stats, "prompt_tokens": 7, "finish_reason": "eos", "text": "x"}
        return Run(seconds, [answer, answer])

    found = row("ask", [(run(9.0, 4.0), run(6.0, 2.0)), (run(11.0, 4.0), run(4.0, 2.0))])
    assert (found["plain_process_s"], found["process_s"], found["process_ratio"]) == (10.0, 5.0, 2.0)
    assert (found["plain_request_s"], found["request_ratio"], found["decode_ratio"]) == (8.0, 2.0, 2.0)
    assert (found["acceptance_length"], found["new"], found["same_text"], found["ended"]) == (2.0, 20, True, "eos")
