"""What the dense store's measurements count, by hand and on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from longgraft.config import GraftError
from longgraft.eval import dense
from longgraft.eval.hidden_states import Thoughts, load, save
from longgraft.eval.replay import Trace
from tests import saved_model


def trace(tokens: list[int], prompt_len: int) -> Trace:
    return Trace("notes", "owner/repo", np.array(tokens, np.int32), prompt_len)


def test_starts_are_copies_that_no_exact_match_can_propose() -> None:
    #        0  1  2  3  4  5  6  7  8  9
    tokens = [1, 2, 3, 4, 9, 2, 3, 1, 2, 3]
    # Root 9 (place 4): 2 3 stood before, but after 1. Root 1 (place 7): so it did, after 1.
    assert dense.unmatched_starts(trace(tokens, 5), 2).tolist() == [4]
    assert dense.unmatched_starts(trace(tokens, 6), 2).tolist() == []
    assert dense.unmatched_starts(trace(tokens, 5), 4).tolist() == []


def test_copies_lie_wholly_in_the_past() -> None:
    tokens = np.array([7, 7, 7, 7, 7, 7], np.int32)
    roots, hits = np.array([2, 3]), np.array([[0, 1, -1], [0, 1, 2]])
    assert dense.copies_at(tokens, roots, hits, 1).tolist() == [[True, False, False], [True, True, False]]
    assert dense.copies_at(tokens, roots, hits, 2).tolist() == [[False, False, False], [True, False, False]]


def test_longest_matches_by_hand() -> None:
    found = dense.longest_matches(trace([1, 2, 3, 1, 2, 5, 1, 2, 8], 7))
    assert found == [(1, [1, 4]), (2, [2, 5])]


def test_ranked_says_which_rule_is_right() -> None:
    tokens = np.array([4, 5, 4, 6, 4, 6, 4, 5], np.int32)
    places, root = np.array([1, 3, 5]), 6
    assert dense.ranked(tokens, root, places, np.array([0.9, 0.1, 0.2], np.float32)).tolist() == [1, 0, 0, 1]
    assert dense.ranked(tokens, root, places[1:], np.zeros(2, np.float32)).tolist() == [0, 0, 0, 0]


def test_a_store_told_the_truth_finds_the_start_of_a_copy() -> None:
    """States that are the same wherever the same thing is said next: the first hit leads to the copy."""
    rng = np.random.default_rng(0)
    said = rng.permutation(200)
    tokens = [*said.tolist(), 200, *said[40:80].tolist()]
    vectors = rng.standard_normal((201, 32)).astype(np.float16)
    states = np.array([vectors[t] for t in [*tokens[2:], 0, 0]], np.float16)
    thoughts = Thoughts(trace(tokens, 201), (1,), states[:, None], np.zeros((len(tokens), 8), np.int32))
    found = dense.Findings()
    dense.measure(thoughts, 0, 16, found)
    figures = dense.summary(found)
    assert figures["starts"]["notes 4"] == {"starts": 1, "top_1": 1.0, "top_4": 1.0, "top_8": 1.0, "top_16": 1.0}
    assert figures["starts"]["pooled 4"] == figures["starts"]["notes 4"]
    assert figures["by_rank"]["match 0"]["1"] == [1, 1.0]


def test_thoughts_survive_a_file_and_a_spoilt_file_is_named(tmp_path: Path) -> None:
    states = np.random.default_rng(1).standard_normal((5, 2, 3)).astype(np.float16)
    path = tmp_path / "one.npz"
    save(path, Thoughts(trace([1, 2, 3, 4, 5], 2), (1, 2), states, np.ones((5, 8), np.int32)))
    again = load(path)
    np.testing.assert_array_equal(again.states, states)
    assert (again.layers, again.trace.family, again.trace.prompt_len) == ((1, 2), "notes", 2)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(GraftError, match=r"one\.npz cannot be read"):
        load(path)
    path.write_bytes(b"")
    with pytest.raises(GraftError, match="delete the file"):
        load(path)


def test_selected_takes_the_shortest_of_each_family() -> None:
    traces = [Trace(family, "g", np.zeros(n, np.int32), 2) for family, n in (("a", 9), ("a", 5), ("a", 7), ("b", 99))]
    assert [len(t.token_ids) for t in dense.selected(traces, ["a"], 50, 2)] == [5, 7]
    with pytest.raises(GraftError, match="no trace of b"):
        dense.selected(traces, ["b"], 50, 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved_model.save(tmp_path_factory.mktemp("model"))


def records(path: Path, texts: list[tuple[str, str]]) -> str:
    lines = [json.dumps({"family": "notes", "prompt": p, "output": o, "source": "owner/repo@1"}) for p, o in texts]
    path.write_text("\n".join(lines))
    return str(path)


def test_the_command_reads_measures_and_keeps(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longgraft.eval.hidden_states.CHUNK", 64)
    monkeypatch.setattr("longgraft.eval.hidden_states.LEAST_SHARED", 20)
    begin = saved_model.PROMPT * 4
    files = records(tmp_path / "notes.jsonl", [(begin, " the mat"), (begin + " the mat", ", the hat sat on the cat")])
    command = [files, "--model", model, "--states", str(tmp_path / "states"), "--families", "notes"]
    outputs = []
    for _ in range(2):
        assert dense.main(command) == 0
        outputs.append(saved_model.last_json(capsys.readouterr().out))
    for output in outputs:
        for figures in output["layers"].values():
            figures.pop("search_us_p50"), figures.pop("add_us_p50")
    assert [row["budget"] for row in outputs[0]["gains"]] == [16, 32, 60] * 2  # the family, and pooled
    assert outputs[0] == outputs[1] and outputs[0]["traces"] == 2 and set(outputs[0]["layers"]) == {"1", "2"}
    kept = sorted((tmp_path / "states").glob("*.npz"))
    assert len(kept) == 2
    _same_as_one_forward(model, load(kept[0]))
    _same_as_one_forward(model, load(kept[1]))


def _same_as_one_forward(model: str, thoughts: Thoughts) -> None:
    """Chunks, cache and a shared beginning give what one forward of the whole text gives."""
    import torch
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.from_numpy(thoughts.trace.token_ids.astype(np.int64))[None]
    with torch.no_grad():
        out = whole(ids, output_hidden_states=True)
    np.testing.assert_allclose(thoughts.states[:, 0], out.hidden_states[1][0].numpy(), atol=2e-3, rtol=2e-3)
    assert thoughts.states.shape[1] == len(thoughts.layers) == 2
    agree = thoughts.top_ids[:, 0] == out.logits[0].argmax(-1).numpy()
    assert agree.mean() > 0.98


def test_the_command_says_what_is_wrong(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = records(tmp_path / "notes.jsonl", [("the cat", " sat on the mat")])
    base = ["--model", model, "--states", str(tmp_path / "states")]
    for command, message in (
        ([files, *base], "no trace of doc_qa, agent"),
        ([files, *base, "--families", "notes", "--layers", "7"], "layers 1 to 2"),
        ([files, *base, "--families", "notes", "--layers", "x"], "invalid literal"),
        ([files, *base, "--families", "notes", "--budget", "0"], "numbers from 1"),
        ([files, *base, "--families", "notes", "--gain-layer", "9"], "gain-layer 9"),
        ([str(tmp_path / "none.jsonl"), *base], "No such file"),
    ):
        assert dense.main(command) == 2
        assert message in capsys.readouterr().err
