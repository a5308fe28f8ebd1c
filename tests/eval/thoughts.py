"""Made-up texts with hidden states that tell what comes next, or nothing."""

from __future__ import annotations

import numpy as np

from longgraft.eval.hidden_states import Thoughts
from longgraft.eval.traces import Trace

HIDDEN = 24


def made_up(seed: int, tell: bool) -> Thoughts:
    """A text of copied runs with a new token before each; its states tell what comes then (`tell`), or nothing."""
    rng = np.random.default_rng(seed)
    prompt = rng.permutation(300)
    output: list[int] = []
    while len(output) < 200:
        start = int(rng.integers(0, 280))
        output += [300 + len(output), *prompt[start : start + 8].tolist()]
    tokens = np.concatenate([prompt, output]).astype(np.int32)
    meaning = rng.standard_normal((600, HIDDEN)).astype(np.float16)
    states = rng.standard_normal((len(tokens), HIDDEN)).astype(np.float16)
    if tell:
        states[:-2] = meaning[tokens[2:]]
    top_ids = rng.integers(0, 300, (len(tokens), 8)).astype(np.int32)
    return Thoughts(Trace(f"family {seed % 2}", "g", tokens, 300), (1,), states[:, None], top_ids)
