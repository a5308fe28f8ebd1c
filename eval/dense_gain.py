"""What dense hits add to accepted tokens: the present index's trees against the same trees with hits, same roots.

Knows replay and the dense store, not the engine. At each root of a replay the tokens that the index lists compete with
those that a *source pointer* (the place the last accepted copy would resume at) and the dense hits point to, in one
conditional logit with a "none" class. A token that the index does not list brings the tokens that follow it at its
place; where the index lists it, its own tree goes on (copies beside it were tried: they crowd out longer matches).
The few weights are fitted on all other texts (texts that begin alike count as one), so nothing is judged by what it
was fitted on. Pairs of trees stand at the same roots, and the interval is a bootstrap over roots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from longgraft.eval.baseline_draft import lists_of
from longgraft.eval.hidden_states import Thoughts
from longgraft.eval.tally import accepted_path
from longgraft.eval.traces import Trace
from longgraft.index.context_index import ContextIndex
from longgraft.index.dense_store import DenseStore
from longgraft.tree import Continuation

FloatArray = npt.NDArray[np.float64]
Path = tuple[int, ...]
ARMS = {"index": (False, False), "+pointer": (True, False), "+dense": (False, True), "+both": (True, True)}
NUM_HITS = 16
WIDE = 256  # nodes of the index's own tree from which the best are taken
POINTER_OFFSETS = (-1, 0, 1, 2)  # a token was left out, resumed, replaced, put in ...
LONGEST_COPY = 12
LOWEST = -6.2  # log of the index's own least path probability
# Probability that a copy goes on, by tokens copied: 889 dense hits whose first token was right, agent transcripts, two
# repositories and a meeting, Qwen2.5-Coder-0.5B.
GOES_ON = np.log([1, 0.41, 0.58, 0.58, 0.71, 0.69, 0.78, 0.79, 0.86, 0.9, 0.9, 0.9])
MATCH_EDGES = (1, 2, 3, 5)  # bins of match length
BINS = len(MATCH_EDGES) + 1
# Columns: log-probability in the index, unlisted there; match bin there; dense hit: is one, cosine, log of hits that
# agree, 1 / rank, root before it, distance to the best cosine, bin and bin x cosine; pointer: offset, root before it.
INDEX, DENSE, POINTER = 0, 2 + BINS, 8 + 3 * BINS
WIDTH = POINTER + len(POINTER_OFFSETS) + 1


@dataclass(frozen=True, slots=True, eq=False)
class Root:
    """One round of a replay: what the index, the pointer and the store had to say after place `at`."""

    at: int
    tree: Continuation | None
    tokens: list[int]
    log_probabilities: FloatArray
    match_lens: list[int]
    log_none: float
    match_len: int
    hits: list[tuple[int, float]]
    pointer: int


def replay_roots(thoughts: Thoughts, layer: int, dim: int, budget: int) -> list[Root]:
    """Replay a trace with the index alone and return its roots, with dense hits of one layer beside them."""
    trace, states, top_ids = thoughts.trace, thoughts.states[:, layer], thoughts.top_ids
    tokens, at, pointer = trace.token_ids, trace.prompt_len - 1, -1
    index, store = ContextIndex(int(max(tokens.max(), top_ids.max())) + 1), DenseStore(dim=dim)
    index.extend(tokens[: at + 1])
    index.observe(tokens[:at], top_ids[:at])
    store.extend(states[:at])
    roots = []
    while at < len(tokens) - 1:
        roots.append(_look(index, store, states[at - 1], at, pointer))
        drafted = index.draft(budget)
        path = [] if drafted is None else accepted_path(*lists_of(drafted), tokens[at + 1 : at + 1 + budget].tolist())
        step = min(len(path) + 1, len(tokens) - 1 - at)
        if drafted is not None and path and drafted.match_lens[path[-1]] > 0:
            pointer = int(drafted.origins[path[-1], 1]) + 2
        elif pointer >= 0:
            pointer += step
        index.extend(tokens[at + 1 : at + 1 + step], learn=True)
        index.observe(tokens[at : at + step], top_ids[at : at + step])
        store.extend(states[at : at + step])
        at += step
    return roots


def _look(index: ContextIndex, store: DenseStore, state: npt.ArrayLike, at: int, pointer: int) -> Root:
    listed = index.text.options((), index.successors.rows)
    positions, cosines = store.search(state, NUM_HITS)
    return Root(
        at,
        index.draft(WIDE),
        listed.token_ids.tolist(),
        np.log(np.maximum(listed.probabilities, 1e-6)),
        listed.match_lens.tolist(),
        float(np.log(max(listed.rest, 1e-4))),
        int(listed.match_lens.max(initial=0)),
        list(zip(positions.tolist(), cosines.tolist())),
        pointer,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The tokens that compete at a root: `tokens [n]`, `columns [n, WIDTH]`, `none [1 + BINS]`, `truth` (-1: none)."""

    tokens: list[int]
    columns: FloatArray
    none: FloatArray
    truth: int


def choice_at(root: Root, tokens: npt.NDArray[np.int32], with_pointer: bool, with_dense: bool) -> Choice:
    """Return what competes at a root, and which of it is right."""
    rows: dict[int, FloatArray] = {}

    def row(token: int) -> FloatArray:
        if token not in rows:
            rows[token] = np.zeros(WIDTH)
            rows[token][INDEX + 1] = 1
        return rows[token]

    for token, score, match in zip(root.tokens, root.log_probabilities, root.match_lens):
        columns = row(token)
        columns[INDEX : INDEX + 2] = score, 0
        columns[INDEX + 2 + _bin(match)] = 1
    if with_dense:
        _add_hits(row, root, tokens)
    for number, offset in enumerate(POINTER_OFFSETS if with_pointer and root.pointer >= 0 else ()):
        place = root.pointer + offset
        if 0 < place <= root.at:
            columns = row(int(tokens[place]))
            columns[POINTER + number] = 1
            columns[POINTER + len(POINTER_OFFSETS)] = tokens[place - 1] == tokens[root.at]
    none = np.array([root.log_none, *(np.arange(BINS) == _bin(root.match_len))])
    names = list(rows)
    truth = int(tokens[root.at + 1])
    columns = np.stack([rows[name] for name in names]) if names else np.zeros((0, WIDTH))
    return Choice(names, columns, none, names.index(truth) if truth in rows else -1)


def _add_hits(row: Any, root: Root, tokens: npt.NDArray[np.int32]) -> None:
    beside = _bin(root.match_len)
    for rank, (position, cosine) in enumerate(root.hits):
        place = position + 2
        if place > root.at:
            continue
        columns = row(int(tokens[place]))[DENSE:]
        if not columns[0]:
            columns[:6] = 1, cosine, 0, 1 / (1 + rank), 0, root.hits[0][1] - cosine
            columns[6 + beside], columns[6 + BINS + beside] = 1, cosine
        else:
            columns[2] = np.log(np.exp(columns[2]) + 1)
        columns[4] = max(columns[4], float(tokens[place - 1] == tokens[root.at]))


def _bin(match_len: int) -> int:
    return int(np.searchsorted(MATCH_EDGES, match_len, side="right"))


def fit(choices: Sequence[Choice], decay: float = 1e-3, steps: int = 60) -> tuple[FloatArray, FloatArray]:
    """Return the weights of columns and of none under which what was right is likeliest."""
    import torch

    most = 1 + max(len(choice.tokens) for choice in choices)
    columns = torch.zeros(len(choices), most, WIDTH)
    absent = torch.full((len(choices), most), -1e9)
    for number, choice in enumerate(choices):
        columns[number, 1 : 1 + len(choice.tokens)] = torch.from_numpy(choice.columns)
        absent[number, : 1 + len(choice.tokens)] = 0
    none = torch.from_numpy(np.stack([choice.none for choice in choices])).float()
    truth = torch.tensor([choice.truth + 1 for choice in choices])
    start = torch.zeros(WIDTH + 1 + BINS)
    start[INDEX], start[INDEX + 1], start[WIDTH] = 1, -5, 1
    weights = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([weights], max_iter=steps, line_search_fn="strong_wolfe")

    def loss() -> Any:
        optimizer.zero_grad()
        scores = columns @ weights[:WIDTH] + absent
        scores = torch.cat([(none @ weights[WIDTH:])[:, None], scores[:, 1:]], dim=1)
        value = torch.nn.functional.cross_entropy(scores, truth) + decay * ((weights - start) ** 2).sum()
        value.backward()
        return value

    optimizer.step(loss)
    fitted = weights.detach().double().numpy()
    return fitted[:WIDTH], fitted[WIDTH:]


def accepted_at(
    root: Root, choice: Choice, weights: tuple[FloatArray, FloatArray], tokens: list[int], budgets: Sequence[int]
) -> list[int]:
    """Return how many tokens of the truth the best trees of `budgets` nodes would have had accepted."""
    scores = np.concatenate([[choice.none @ weights[1]], choice.columns @ weights[0]])
    scores -= scores.max() + np.log(np.exp(scores - scores.max()).sum())
    first = dict(zip(choice.tokens, scores[1:].tolist()))
    nodes: dict[Path, float] = {(token,): score for token, score in first.items()}
    _add_tree(nodes, root.tree, first)
    places = [position + 2 for position, _ in root.hits] + [root.pointer + offset for offset in POINTER_OFFSETS]
    for place in places:
        if 0 < place <= root.at and tokens[place] in first and tokens[place] not in root.tokens:
            _add_copy(nodes, tokens[place : min(place + LONGEST_COPY, root.at + 1)], first[tokens[place]])
    order = sorted((path for path in nodes if nodes[path] > LOWEST), key=lambda path: (-nodes[path], len(path), path))
    truth = tuple(tokens[root.at + 1 : root.at + 1 + max(budgets)])
    ranks = {path: rank for rank, path in enumerate(order)}
    accepted = []
    for budget in budgets:
        length = 0
        while length < len(truth) and ranks.get(truth[: length + 1], budget) < budget:
            length += 1
        accepted.append(length)
    return accepted


def _add_tree(nodes: dict[Path, float], tree: Continuation | None, first: dict[int, float]) -> None:
    """Add the index's own nodes, each first token's branch moved to its new probability."""
    if tree is None:
        return
    paths: list[Path] = []
    moved: list[float] = []
    for token, parent, score in zip(tree.token_ids.tolist(), tree.parents.tolist(), tree.scores.tolist()):
        path = (token,) if parent < 0 else (*paths[parent], token)
        moved.append(moved[parent] if parent >= 0 else first.get(token, score) - score)
        paths.append(path)
        above = nodes[path[:-1]] if parent >= 0 else 0.0
        nodes[path] = max(nodes.get(path, -np.inf), min(score + moved[-1], above))


def _add_copy(nodes: dict[Path, float], copied: list[int], score: float) -> None:
    for length in range(1, len(copied) + 1):
        score += float(GOES_ON[length - 1])
        path = tuple(copied[:length])
        nodes[path] = max(nodes.get(path, -np.inf), score)


def documents(traces: Sequence[Trace], shared: int = 300) -> list[int]:
    """Return a number for each trace, the same where the first `shared` tokens are."""
    numbers: dict[bytes, int] = {}
    return [numbers.setdefault(trace.token_ids[:shared].tobytes(), len(numbers)) for trace in traces]


def compare(
    traces: Sequence[Trace], roots: Sequence[list[Root]], budgets: Sequence[int]
) -> dict[str, dict[str, npt.NDArray[np.int64]]]:
    """Return, per family and arm, accepted tokens [roots, budgets]; weights come from other documents only."""
    document = documents(traces)
    result: dict[str, dict[str, list[list[int]]]] = {}
    for arm, (with_pointer, with_dense) in ARMS.items():
        choices = [[choice_at(r, t.token_ids, with_pointer, with_dense) for r in rs] for t, rs in zip(traces, roots)]
        for fold in sorted(set(document)):
            weights = fit([c for d, cs in zip(document, choices) if d != fold for c in cs])
            for number in (n for n, d in enumerate(document) if d == fold):
                tokens = traces[number].token_ids.tolist()
                rows = result.setdefault(traces[number].family, {}).setdefault(arm, [])
                for root, choice in zip(roots[number], choices[number]):
                    seen = _without(root, with_pointer, with_dense)
                    rows.append(accepted_at(seen, choice, weights, tokens, budgets))
    return {family: {arm: np.array(rows) for arm, rows in arms.items()} for family, arms in result.items()}


def _without(root: Root, with_pointer: bool, with_dense: bool) -> Root:
    return replace(root, pointer=root.pointer if with_pointer else -(10**9), hits=root.hits if with_dense else [])


def interval(differences: npt.NDArray[np.int64], samples: int = 2000) -> list[float]:
    """Return mean and 95 % bootstrap interval of paired differences [roots]."""
    picks = np.random.default_rng(0).integers(0, len(differences), (samples, len(differences)))
    means = differences[picks].mean(axis=1)
    return [round(float(x), 3) for x in (differences.mean(), *np.percentile(means, [2.5, 97.5]))]


def gains(traces: Sequence[Trace], roots: Sequence[list[Root]], budgets: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each family (and pooled) and budget: acceptance length of each arm, gains with intervals.

    Empty for fewer than two texts that begin differently: there would be nothing else to fit on.
    """
    if len(set(documents(traces))) < 2:
        return []
    by_family = compare(traces, roots, budgets)
    by_family["pooled"] = {arm: np.concatenate([arms[arm] for arms in by_family.values()]) for arm in ARMS}
    rows = []
    for family, arms in by_family.items():
        for column, budget in enumerate(budgets):
            accepted = {arm: table[:, column] for arm, table in arms.items()}
            row = {"family": family, "budget": budget, "roots": len(accepted["index"])}
            row |= {arm: round(1 + float(values.mean()), 3) for arm, values in accepted.items()}
            row["dense_gain"] = interval(accepted["+dense"] - accepted["index"])
            row["dense_gain_beside_pointer"] = interval(accepted["+both"] - accepted["+pointer"])
            rows.append(row)
    return rows
