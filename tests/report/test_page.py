"""The page: complete without a network, and no text of a model, a prompt or a file name is ever markup."""

from __future__ import annotations

import base64
import hashlib
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longgraft.audit import Audit
from longgraft.config import GraftError
from longgraft.report.checks import check_report
from longgraft.report.page import marked, report_html, write_report
from tests import small_tokenizers as small
from tests.report.outputs import C, D, F, G, H, P, R, S, V, X, made
from tests.report.page_reader import Page

TOKENIZER = small.byte_level()
NASTY = "<script>alert(1)</script><!-- &amp; ' \" {{ 7*7 }} {% x %} ]]> \u202e😀"


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def written(text: str, source: int = P, **changes: Any) -> Any:
    token_ids = ids(text)
    return made(token_ids, [source if i % 5 else R for i in range(len(token_ids))], text, **changes)


def page(output: Any, prompt: str = "q", **options: Any) -> Page:
    return Page(report_html(output, TOKENIZER, ids(prompt), **options))


def test_the_answer_is_there_token_by_token() -> None:
    output = written("def scale(values):\n    return 1")
    read = page(output)
    assert len(read.spans) == len(output.token_ids) and read.answer == output.text
    assert read.data["tokens"]["id"] == list(output.token_ids)
    assert "Plain decoding was not measured" in read.words and "--compare-plain" in read.words


def test_nothing_that_was_written_becomes_markup() -> None:
    output = written(NASTY, documents=("", NASTY), origins=[(1, 0)] * len(ids(NASTY)), lines=(1,) * len(ids(NASTY)))
    harmless = page(written("harmless"), "harmless", about={"model": "m"})
    read = page(output, NASTY * 3, about={"model": NASTY}, texts={NASTY: NASTY})
    tags = {tag for tag, _ in harmless.tags}
    assert {tag for tag, _ in read.tags} == tags and len(read.scripts) == 2
    assert not any(name.startswith("on") for _, attributes in read.tags for name in attributes)
    assert read.answer == NASTY.replace("\u202e", "⟨U+202E⟩")
    assert NASTY.replace("\u202e", "⟨U+202E⟩") in read.words and "49" not in read.words
    assert any(NASTY.replace("\u202e", "⟨U+202E⟩") == line for _, line in read.data["places"])
    assert read.scripts[1] == harmless.scripts[1]


def test_no_script_may_run_but_its_own_and_nothing_is_fetched() -> None:
    html = report_html(written("zq"), TOKENIZER, ids("q"))
    read = Page(html)
    (policy,) = [a["content"] for tag, a in read.tags if tag == "meta" and "http-equiv" in a]
    digest = base64.b64encode(hashlib.sha256(read.scripts[1].encode()).digest()).decode()
    assert policy is not None and f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    assert not any(name in ("src", "href", "action") for _, attributes in read.tags for name in attributes)
    addresses = set(re.findall(r"https?:[^\s\"')]*", html))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a namespace is a name, not an address"
    assert "url(" not in html and "@import" not in html


def test_classes_say_source_run_and_emptiness() -> None:
    token_ids = ids("aΩ\nbc")
    output = made(token_ids, [P, P, D, D, D, R], "aΩ\nbc")
    assert marked(output, TOKENIZER, []) == [
        ("P b", "a"), ("P e", ""), ("D b", "Ω"), ("D n", "\n"), ("D", "b"), ("", "c")
    ]  # fmt: skip


def test_every_source_has_its_own_letter() -> None:
    sources = [P, H, S, D, V, C, X, F, G, R]
    output = made(ids("z" * 10), sources, "z" * 10)
    assert [marks for marks, _ in marked(output, TOKENIZER, [])] == [*(f"{x} b" for x in "PHSDVCXFG"), ""]
    assert set(page(output).data["called"]) == set("-PHSDVCXFG")


@pytest.mark.parametrize("end", range(4))
def test_a_stop_string_is_marked_and_not_part_of_the_text(end: int) -> None:
    token_ids = ids("zqzq")[:-1] + ids("def")
    text = TOKENIZER.decode(token_ids)
    output = made(token_ids, [P] * len(token_ids), text[: len(text) - end])
    found = marked(output, TOKENIZER, [])
    assert "".join(t for m, t in found if "cut" not in m.split()) == output.text
    assert "".join(t for _, t in found) == text
    assert len([m for m, _ in found if "rest" not in m.split()]) == len(token_ids)


def test_half_characters_line_ends_and_no_text_at_all() -> None:
    assert page(made(ids("aΩ")[:2], [P, R], "a\ufffd")).answer == "a\ufffd"
    assert page(written("a\r\nb\x00\x1b[0m")).answer == "a⟨U+000D⟩\nb⟨U+0000⟩⟨U+001B⟩[0m"
    assert "nothing was generated" in page(made([], [], "")).words
    assert page(made([0, 1], [P, R], "")).answer == ""


def test_the_comparison_is_shown_with_its_verdict() -> None:
    output = written("zqzqzqzqzq")
    plain = made(list(output.token_ids), [R] * len(output.token_ids), output.text, wrong=0)
    read = page(output, audit=Audit(plain, output, ()))
    assert f"wrote the same {len(output.token_ids)} tokens" in read.words and "3.33x plain decoding" in read.words
    assert "was not measured" not in read.words


def test_a_long_prompt_is_shown_by_its_ends() -> None:
    html = report_html(written("z"), TOKENIZER, ids("b" + "q" * 50_000 + "c"))
    assert "characters left out" in html and len(html) < 60_000


def test_what_is_missing_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(GraftError, match=r"has no trace: generate it with SamplingParams\(trace=True\)"):
        report_html(replace(written("z"), trace=None), TOKENIZER, [5])
    with pytest.raises(GraftError, match="needs the tokenizer"):
        report_html(written("z"), None, [5])
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(GraftError, match=r"pip install 'longgraft\[report\]'"):
        check_report(tmp_path / "r.html")


def test_4096_tokens_are_a_small_page() -> None:
    text = "def scale(v):\n" * 1100
    output = written(text, wrong=12)
    assert len(output.token_ids) > 4096
    assert len(report_html(output, TOKENIZER, [5])) < 1_500_000


def test_files_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "r.html"
    write_report(target, "old")
    write_report(target, "new ж")
    assert target.read_text(encoding="utf-8") == "new ж" and list(tmp_path.iterdir()) == [target]
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(GraftError, match="No space left"):
        write_report(target, "newer")
    assert target.read_text(encoding="utf-8") == "new ж" and list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("name", ["", ".", "nowhere/r.html"])
def test_a_place_that_cannot_be_written_is_refused_first(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GraftError, match="report"):
        check_report(name)
    check_report("fine.html")
