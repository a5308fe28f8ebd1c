"""The drafters that longgraft is compared with, by name, each in a file that names its source.

Knows only how to open them. `python -m longgraft.eval.replay --methods ...` takes these names.
"""

from __future__ import annotations

from collections.abc import Callable

from longgraft.config import GraftError
from longgraft.eval.baseline_draft import Drafter
from longgraft.eval.baseline_lookup import NgramLookup, NgramMod
from longgraft.eval.baseline_peers import Arctic, ArcticOptions, TransformersLookup
from longgraft.eval.baseline_sam import Sam
from longgraft.eval.baseline_tree import Recycling, Rest

# Names without an addition have the projects' defaults. pldB: as many tokens as the budget. vllm: n from 4 (its
# documentation's example) down to 1; -2-8: from 8 to 2. arctic-path-f4, -tree-f4: up to 4 x the match is copied;
# arctic-max: no limit but the budget. sam: with Token Recycling below 5 tokens; sam1, sam5: alone, from 1 or 5 tokens.
BASELINES: dict[str, Callable[[], Drafter]] = {
    "arctic": Arctic,
    "arctic-tree": lambda: Arctic(ArcticOptions(use_tree_spec=True)),
    "arctic-path-f4": lambda: Arctic(ArcticOptions(4.0)),
    "arctic-tree-f4": lambda: Arctic(ArcticOptions(4.0, use_tree_spec=True)),
    "arctic-max": lambda: Arctic(ArcticOptions(64.0, 64.0, 0.0, True)),
    "pld": lambda: NgramLookup(1, 2, 10),
    "pld10": lambda: NgramLookup(1, 2, 10),
    "pldB": lambda: NgramLookup(1, 2),
    "pld-class": TransformersLookup,
    "vllm": lambda: NgramLookup(1, 4),
    "vllm-2-8": lambda: NgramLookup(2, 8),
    "sam": lambda: Sam(fallback=Recycling()),
    "sam1": lambda: Sam(1),
    "sam5": Sam,
    "ngram-mod": NgramMod,
    "ngram-mod10": lambda: NgramMod(10),
    "recycling": Recycling,
    "rest": Rest,
}


def open_baseline(name: str) -> Drafter:
    """Open a baseline; `GraftError` for an unknown name, or where another project is missing."""
    if name not in BASELINES:
        raise GraftError(f"method {name!r} is unknown: expected one of {', '.join(['longgraft', *BASELINES])}")
    return BASELINES[name]()
