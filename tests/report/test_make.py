"""Reports of real generations, by hand and from the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import longgraft.report.make
from longgraft import Engine, References, SamplingParams
from longgraft.references import PREDICTION
from longgraft.report.make import save_report, texts_of
from longgraft.report.page import report_html
from longgraft.report.words import seen
from tests.engines import all_nodes
from tests.report.page_reader import Page
from tests.saved_model import PROMPT, calm, cheap_rows, invoke, last_json
from tests.test_show import press_after


@pytest.fixture(autouse=True)
def calmly() -> Iterator[None]:
    with calm():
        yield


def read(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def test_the_command_writes_it_and_the_text_stays_the_same(folder: str, tmp_path: Path) -> None:
    table = cheap_rows(tmp_path / "costs.json")
    common = ("generate", "-m", folder, "-p", PROMPT * 3, "-n", "60", "--cost-table", table, "--json")
    bare = invoke(*common)
    made = invoke(*common, "--report", str(tmp_path / "r.html"), "--compare-plain", "--logprobs", "0")
    assert made.exit_code == 0 and made.stderr == f"report: {tmp_path / 'r.html'}\n"
    values, wanted = last_json(made.stdout), last_json(bare.stdout)
    assert values["token_ids"] == wanted["token_ids"] and values["text"] == wanted["text"]
    page = read(tmp_path / "r.html")
    assert page.data["tokens"]["id"] == values["token_ids"]
    assert f"wrote the same {len(values['token_ids'])} tokens" in page.words and folder in page.words
    assert len(page.data["tokens"]["chance"]) == len(values["token_ids"])
    assert [one[7] - 1 for one in page.data["rounds"]] == [nodes for nodes, _ in values["stats"]["accepted_by_round"]]


def test_documents_and_prediction_are_named_with_their_lines(folder: str, tmp_path: Path) -> None:
    engine = Engine.from_pretrained(folder, cost=all_nodes())
    params = SamplingParams(max_new_tokens=40, temperature=0.0, trace=True)
    text = engine.generate(PROMPT, params).text
    references = References(prediction=text, documents={"<d>.md": "x\n" + text})
    output = engine.generate(PROMPT, params, references=references)
    save_report(tmp_path / "r.html", engine, engine.encode(PROMPT), output, references=references)
    labels = {label for label, _ in read(tmp_path / "r.html").data["places"]}
    assert any(label.startswith(("the prediction", "<d>.md")) for label in labels)
    assert texts_of(references) == {PREDICTION: text, "<d>.md": "x\n" + text}
    assert texts_of(References(prediction=[1, 2])) == texts_of(None) == {}


def test_every_output_of_the_same_kind_gives_the_same_page(folder: str) -> None:
    engine = Engine.from_pretrained(folder, cost=all_nodes())
    params = SamplingParams(max_new_tokens=30, temperature=0.0, seed=1, trace=True)
    pages = []
    for policy in ("retrieval", "plain"):
        output = engine.generate(PROMPT, params, policy=policy)
        pages.append(Page(report_html(output, engine.tokenizer, engine.encode(PROMPT))))
    assert pages[0].answer == pages[1].answer
    assert {one[7] for one in pages[1].data["rounds"]} == {1} and len(pages[1].data["rounds"]) == 30


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--compare-plain",), "--compare-plain is shown in the report: add --report FILE"),
        (("--logprobs", "2"), "add --json or --report FILE"),
        (("--report", "nowhere/r.html"), "there is no folder nowhere"),
        (("--report", ""), "expected a file"),
    ],
)
def test_what_cannot_be_is_refused_before_the_model_is_read(arguments: tuple[str, ...], sentence: str) -> None:
    result = invoke("generate", "-m", "no/such/model", "-p", "x", *arguments)
    assert result.exit_code == 2 and sentence in result.stderr


def test_ctrl_c_leaves_a_report_of_what_exists(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    press_after(monkeypatch, 5)
    path = tmp_path / "r.html"
    options = ("-n", "200", "--policy", "plain", "--report", str(path), "--compare-plain")
    result = invoke("generate", "-m", folder, "-p", PROMPT, *options)
    assert result.exit_code == 130
    page = read(path)
    assert len(page.data["tokens"]["id"]) == 5 and "Ended: cancelled" in page.words


def test_a_comparison_that_fails_costs_only_itself(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(longgraft.report.make, "compare", broken)
    path = tmp_path / "r.html"
    result = invoke("generate", "-m", folder, "-p", PROMPT, "-n", "5", "--report", str(path), "--compare-plain")
    assert result.exit_code == 130 and len(read(path).data["tokens"]["id"]) == 5


def test_half_characters_and_odd_bytes_of_hot_sampling(folder: str, tmp_path: Path) -> None:
    engine = Engine.from_pretrained(folder, cost=all_nodes())
    params = SamplingParams(max_new_tokens=60, temperature=3.0, seed=2, trace=True, ignore_eos=True)
    output = engine.generate(PROMPT, params, policy="plain")
    save_report(tmp_path / "r.html", engine, engine.encode(PROMPT), output)
    page = read(tmp_path / "r.html")
    assert len(page.spans) == 60 and page.data["tokens"]["id"] == list(output.token_ids)
    assert page.answer == seen(output.text) and any("e" in marks.split() for marks, _ in page.spans)
