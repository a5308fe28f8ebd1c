"""The data of the page: whole, compact, bounded, and harmless inside a script element."""

import json
import math
from typing import Any

import numpy as np
import pytest

from longgraft.config import TokenLogprob
from longgraft.report import values
from longgraft.report.places import Places
from longgraft.report.values import kept_nodes, round_values, script_json, values_of
from longgraft.trace import Trace, TracedRound
from longgraft.tree import TokenTree, TreeBuilder
from tests import small_tokenizers as small
from tests.report.outputs import D, P, R, S, made

TOKENIZER = small.byte_level()


def data(output: Any) -> dict[str, Any]:
    return dict(json.loads(script_json(values_of(output, output.trace, Places(output, TOKENIZER, [5], {})))))


def test_tokens_and_rounds_say_the_same() -> None:
    ids = TOKENIZER.encode("zqzqz", add_special_tokens=False)
    output = made(
        ids, [P, D, R, P, R], "zqzqz", origins=[(0, 0), (-1, -1), (-1, -1), (0, 0), (-1, -1)], lines=(1, 0, 0, 1, 0)
    )
    found = data(output)
    assert found["tokens"]["source"] == "PD-P-" and found["tokens"]["id"] == ids
    assert [found["names"][n] for n in found["tokens"]["name"]] == list("zqzqz")
    assert [found["places"][n][0] for n in found["tokens"]["place"]] == [
        "the prompt, line 1",
        "",
        "",
        "the prompt, line 1",
        "",
    ]
    names, parents, chances, letters, path, made_, micros, rows = found["rounds"][0]
    assert [found["names"][n] for n in names] == ["z", "q", "#10000"]
    assert (parents, letters, path, made_, rows) == ([0, 1, 0], "PDS", [1, 2], 3, 4)
    assert chances == [round(1000 * math.exp(x)) for x in (-0.25, -0.25, -2.0)]
    assert micros == [1000, 0, 40000, 2000, 3000]
    assert len(found["rounds"]) == 2 and sum(one[5] for one in found["rounds"]) == 5


def test_probabilities_that_are_not_finite_are_still_json() -> None:
    tree = TokenTree(
        np.array([1, 2, 3], np.int32), np.array([-1, 0, 1], np.int32), np.array([0, -np.inf, -np.inf], np.float32),
        np.array([0, S, S], np.int8), np.full((3, 2), -1, np.int32),
    )  # fmt: skip
    assert round_values(TracedRound(tree, (), 1, (0.0,) * 5), int, 9)[2] == [0, 0]
    output = made([5, 6], [R, R], "ab", logprobs=(TokenLogprob(5, -math.inf), TokenLogprob(6, -0.5)))
    assert data(output)["tokens"]["chance"] == [None, -0.5]


def bushy(n: int) -> TokenTree:
    rng = np.random.default_rng(n)
    builder = TreeBuilder(0)
    for node in range(1, n):
        parent = int(rng.integers(0, len(builder)))
        builder.add(parent, node, builder.scores[parent] - float(rng.exponential()), S)
    return builder.build()


@pytest.mark.parametrize("quota", [0, 1, 5, 40, 99])
def test_a_cut_tree_is_a_tree_with_the_path_in_it(quota: int) -> None:
    tree = bushy(40)
    path = tree.path(int(np.argmin(tree.scores)))[1:]
    keep = kept_nodes(tree, path, quota).tolist()
    assert {0, *path} <= set(keep) and keep == sorted(set(keep))
    assert all(int(tree.parents[node]) in keep for node in keep[1:])
    assert len(keep) <= max(quota, 1) + len(path) + 1 and (quota < 40 or len(keep) == 40)


def test_what_is_kept_is_bounded_and_the_page_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "MOST_NODES", 60)
    output = made([5] * 6, [R] * 6, "zzzzzz", wrong=50)
    found = data(output)["rounds"]
    assert [len(one[0]) for one in found] == [9] * 6 and [one[7] for one in found] == [51] * 6


def test_4096_tokens_with_full_trees_stay_small() -> None:
    trace, tree = Trace(), bushy(61)
    output = made([5] * 4096, [R] * 4096, "z" * 4096, wrong=0)
    for _ in range(4096):
        trace.take(tree, [], 1, {"verify": 0.03})
    text = script_json(values_of(output, trace, Places(output, TOKENIZER, [5], {})))
    assert len(text) < 4_000_000


def test_nothing_ends_the_script_element() -> None:
    nasty = {"a": "</script><!--<script>\u2028\u2029&amp;", "b": "ж😀"}
    text = script_json(nasty)
    assert not set("<>&\u2028\u2029") & set(text) and json.loads(text) == nasty
    with pytest.raises(ValueError, match="JSON"):
        script_json(float("nan"))
