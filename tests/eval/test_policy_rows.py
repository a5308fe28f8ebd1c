"""Figures from cells: ratios inside a cell, medians over cells, noise beside small claims, tokens compared."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from longgraft.config import GraftError
from longgraft.eval import policy_plots
from longgraft.eval.policy_report import markdown, verdict, write_report
from longgraft.eval.policy_rows import METRICS, geometric, overall, rows_of

ABOUT = {
    "model": "m", "draft": None, "new": 4, "dtype": "auto", "device": None,
    "cpu": "a cpu", "threads": 1, "torch": "2", "longgraft": "0",
}  # fmt: skip


def run(name: str, seconds: float, tokens: tuple[int, ...] = (1, 2, 3, 4), **more: Any) -> dict[str, Any]:
    stats = {
        "rounds": 2, "new_tokens": len(tokens), "nodes": 3, "accepted": 2, "decode_s": seconds,
        "seconds_by_stage": {"plan": 0.5, "verify": seconds - 0.5, "prefill": 9.0},
        "nodes_by_source": {"prompt": 3}, "accepted_by_source": {"prompt": 2},
        "nodes_by_depth": {"1": 2, "2": 1}, "accepted_by_depth": {"1": 2},
        **more,
    }  # fmt: skip
    times = {"decode_s": seconds, "cpu_s": 2 * seconds, "frozen_s": 1.0}
    return {"name": name, "kind": "policy", "token_ids": list(tokens), **times, "stats": stats}


def cell(fast: float = 1.0, before: float = 2.0, after: float = 2.0, **more: Any) -> dict[str, Any]:
    runs = [run("plain", before), run("adaptive", fast, **more), run("plain again", after)]
    about = {"task": "chat", "context": 64, "seed": 0, "repeat": 0, "prompt_tokens": 60}
    return {**about, "dtype": "float64", "device": "cpu", "runs": runs}


def row(*cells: dict[str, Any], name: str = "adaptive") -> dict[str, Any]:
    return next(row for row in rows_of(cells) if row["name"] == name)


def test_a_ratio_is_against_both_plain_runs_and_the_median_over_cells() -> None:
    found = row(cell(1.0, 2.0, 4.0), cell(1.0), cell(0.5))
    # 4 tokens/s over the mean of 2 and 1; over 2; 8 over 2.
    assert found["speed_up"] == pytest.approx(8 / 3) and found["tokens_per_s"] == 4.0
    assert found["noise"] == 0.0 and found["pairs"] == 3 and found["same_tokens"]
    assert found["speed_up_cpu"] == pytest.approx(8 / 3) and found["speed_up_frozen"] == 1.0
    assert row(cell(1.0, 2.0, 4.0))["noise"] == 0.5
    assert found["acceptance_length"] == 2.0 and found["rounds"] == 6 and found["nodes"] == 9
    assert found["nodes_by_depth"] == {"1": 6, "2": 3} and found["ms_per_round"] == pytest.approx(2500 / 6)


def test_drafting_is_told_apart_from_planning() -> None:
    found = row(cell(draft_s=0.4, draft_passes=7), cell(draft_s=0.1))
    assert found["seconds_by_stage"] == pytest.approx(
        {"draft": 0.5, "plan": 0.5, "verify": 1.0, "accept": 0.0, "extend": 0.0}
    )
    assert found["draft_passes"] == 7


def test_the_first_other_token_is_named() -> None:
    assert row(cell(tokens=(1, 2, 9, 4)))["first_difference"] == 2
    short = row(cell(tokens=(1, 2, 3)), cell())
    assert short["first_difference"] == 3 and not short["same_tokens"]
    assert "no, token 3" in markdown([short], ABOUT, "c")


def test_small_claims_are_told_with_noise() -> None:
    assert verdict(row(cell(1.0))) == "2.00x"
    assert verdict(row(cell(1.9))) == "1.05x (noise 0.0%; 1 pair)"
    assert verdict(row(cell(1.9, 2.2, 1.8))).endswith("(noise 22.2%, exceeds the difference; 1 pair)")
    assert "1.20x (noise 37.5%, exceeds" in verdict(row(cell(1.28, 1.4, 2.0)) | {"noise": 0.375, "speed_up": 1.2})
    assert verdict(row(*[cell(1.9)] * 7)) == "1.05x (noise 0.0%)"
    assert verdict(row(cell(), name="plain")) == "noise 0.0%"


def test_a_peer_that_failed_is_left_out_with_its_reason() -> None:
    failed = cell()
    failed["runs"].insert(2, {"name": "llama.cpp", "kind": "peer", "skipped": "too | large"})
    peer = cell()
    values = {"kind": "peer", "token_ids": [1, 2], "decode_s": 1.0, "cpu_s": 1.0}
    peer["runs"].insert(2, {"name": "transformers", **values})
    rows = rows_of([failed, {**peer, "task": "quote"}])
    text = markdown(rows, ABOUT, "the command")
    assert "## Left out" in text and "| too \\| large |" in text and "the command" in text
    found = next(row for row in rows if row["name"] == "transformers")
    assert found["speed_up"] == 1.0 and found["first_difference"] == 2 and "nodes" not in found
    assert verdict(next(row for row in rows if row["name"] == "llama.cpp")) == "-"
    assert [row["task"] for row in rows] == ["quote"] * 3 + ["chat"] * 3


def test_end_to_end_counts_reading_and_every_token() -> None:
    one = cell(1.0)
    for run, seconds in zip(one["runs"], (6.0, 5.0, 6.0)):
        run["end_to_end_s"] = seconds
    values = {"kind": "peer", "token_ids": [1, 2, 3, 4], "timed_tokens": 3, "decode_s": 1.0, "cpu_s": 1.0}
    one["runs"].insert(2, {"name": "lookup", **values, "end_to_end_s": 3.0})
    found = row(one)
    assert found["end_to_end"] == pytest.approx(1.2) and found["speed_up"] == 2.0
    assert row(one, name="lookup")["end_to_end"] == 2.0 and row(one, name="lookup")["speed_up"] == 1.5
    assert "| 1.20 |" in markdown([found], ABOUT, "c")


def test_acceptance_lengths_over_all_and_over_drafted_rounds() -> None:
    rounds = {"accepted_by_round": [(0, 0), (3, 2)], "new_tokens_by_round": [1, 3]}
    found = row(cell(**rounds), cell(**rounds))
    assert found["acceptance_length"] == 2.0 and found["acceptance_length_drafted"] == 3.0
    assert math.isnan(row(cell())["acceptance_length_drafted"])


def test_the_spread_is_told_where_there_is_one() -> None:
    found = row(cell(1.0), cell(0.5), cell(0.4))
    assert (found["speed_up_low"], found["speed_up_high"]) == (2.0, 5.0)
    assert verdict(found) == "4.00x [2.00-5.00]"


def test_known_answers_are_counted() -> None:
    cells = [cell(), cell()]
    for one, right in zip(cells, (True, False)):
        one["runs"][1]["right"] = right
    assert row(*cells)["right"] == 0.5 and "right" not in row(*cells, name="plain")


def test_every_figure_is_explained_and_the_page_needs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(folder: Path, *_: Any) -> list[Path]:
        (folder / "speed_up.png").write_bytes(b"picture")
        return [folder / "speed_up.png"]

    monkeypatch.setattr(policy_plots, "draw", draw)
    about = ABOUT | {"model": "<m> & n", "environment": {"cores": 2, "commit": "abc"}}
    write_report(tmp_path, [{**cell(), "commit": "0123abc"}], about, "longgraft bench 'a b'", lambda _: None)
    page, text = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    for shown in (*METRICS, "2.00x", "0123abc", "cores"):
        assert shown in text and shown in page
    assert "&lt;m&gt; &amp; n" in page and "<m>" not in page
    assert 'src="data:image/png;base64,cGljdHVyZQ=="' in page and "![speed_up](speed_up.png)" in text
    assert not re.search(r"""(?:src|href)=["'](?!data:)|@import|url\(""", page)


def test_nothing_generated_is_no_division() -> None:
    empty = cell(tokens=())
    for one in empty["runs"]:
        one["token_ids"], one["decode_s"] = [], 0.0
        one["stats"] |= {"rounds": 0, "new_tokens": 0, "decode_s": 0.0}
    rows = rows_of([empty])
    assert math.isnan(rows[1]["speed_up"]) and "| chat |" in markdown(rows, ABOUT, "c")


def test_depths_by_source_get_a_table_where_they_are_known() -> None:
    tables = {"nodes_by_source_depth": {"prompt": {"2": 4, "10": 1}}, "accepted_by_source_depth": {"prompt": {"2": 1}}}
    text = markdown(rows_of([cell(**tables)]), ABOUT, "c")
    assert "| name | source | 2 | 10 |" in text and "| adaptive | prompt | 1/4 (25%) | 0/1 (0%) |" in text


def test_means_are_geometric_over_what_is_known() -> None:
    assert geometric([2.0, 8.0, math.nan]) == pytest.approx(4.0) and math.isnan(geometric([]))
    rows = rows_of([cell(1.0), {**cell(0.25), "context": 128}])
    assert overall(rows)["adaptive"] == pytest.approx(4.0)


def test_without_matplotlib_the_report_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> list[Path]:
        raise GraftError("the plots need matplotlib")

    monkeypatch.setattr(policy_plots, "draw", refuse)
    said: list[str] = []
    values = write_report(tmp_path, [cell()], ABOUT, "c", said.append)
    assert said == ["the plots need matplotlib"] and "No plots: the plots need" in (tmp_path / "report.md").read_text()
    assert values["rows"] and "NaN" not in (tmp_path / "report.json").read_text()


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = rows_of([cell(), {**cell(0.5), "context": 128}, {**cell(), "task": "quote"}])
    paths = policy_plots.draw(tmp_path, rows, ["model", "machine", "command " * 40])
    assert [path.name for path in paths] == ["frontier.png", "speed_up.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert policy_plots.draw(tmp_path, [], ["model"]) == []
