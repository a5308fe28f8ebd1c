"""Choose the thresholds of the paper's gate for one target and drafter, on texts that the target itself writes.

Rounds are recorded with what each stage of the method (pruned at a checkpoint, or never) would have got (see
`gate_rounds.py`). Thresholds are then chosen to maximise tokens a round, or, with a frozen cost table, tokens a second.
Records are kept by `--record` and read again, without any model, by `--replay`.

    python -m longgraft.eval.calibrate_gates --model M --draft D --tasks rewrite,chat --texts FILES... --out gates.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from longgraft.config import EngineConfig, GraftError
from longgraft.cost import CostTable
from longgraft.eval.gate_rounds import Round, load, record, save
from longgraft.eval.suites import open_tasks, prompt_of
from longgraft.eval.traces import lines_of
from longgraft.prune import Gates

FloatArray = npt.NDArray[np.float64]
GRID = 12_000  # combinations of thresholds that are tried
CONTEXT = 1024  # tokens of a task's prompt


def stages(confidences: FloatArray, thresholds: Sequence[float]) -> npt.NDArray[np.int64]:
    """Return the stage each round ends at; `confidences [R, S]`: at the checkpoints, 0 where nothing was drafted."""
    pruned = (confidences < np.asarray(thresholds)) | (confidences == 0.0)
    never = np.ones((len(confidences), 1), np.bool_)
    return np.argmax(np.concatenate([pruned, never], 1), 1)


def at_checkpoints(rounds: Sequence[Round], gates: Gates) -> FloatArray:
    """Return the confidences of all rounds at the checkpoints, [R, S]."""
    found = np.zeros((len(rounds), len(gates.checkpoints)))
    for row, one in enumerate(rounds):
        for column, checkpoint in enumerate(gates.checkpoints):
            if checkpoint >= gates.depth:
                found[row, column] = 1.0  # never asked: the beam ends there
            elif checkpoint < len(one.confidences):
                found[row, column] = one.confidences[checkpoint]
    return found


def costs(rounds: Sequence[Round], table: CostTable | None) -> FloatArray:
    """Return what each round costs at each stage, [R, S + 1]: seconds by the table, else 1 a round."""
    if table is None:
        return np.ones((len(rounds), len(rounds[0].rows)))
    most = max(max(one.rows) for one in rounds)
    verify = [table.rounds(most, one.context)[np.asarray(one.rows) - 1] for one in rounds]
    return np.asarray([one.draft_seconds for one in rounds]) + np.asarray(verify)


def choose(rounds: Sequence[Round], gates: Gates, table: CostTable | None = None) -> tuple[Gates, float]:
    """Return gates with the thresholds under which these rounds give most, and what: tokens a round, or a second.

    Tried are all combinations of quantiles of the confidences; of equal ones the highest thresholds, which draft least.
    """
    if not rounds:
        raise GraftError("nothing to choose thresholds by: no round was drafted to full depth; ask for more tokens")
    confidences, cost = at_checkpoints(rounds, gates), costs(rounds, table)
    tokens = 1.0 + np.asarray([one.accepted for one in rounds])
    points = max(2, int(GRID ** (1 / max(1, len(gates.checkpoints)))) - 2)
    quantiles = np.quantile(confidences, np.linspace(0.02, 0.98, points), axis=0).round(4)
    options = [sorted({0.0, 1.0, *column}, reverse=True) for column in quantiles.T.tolist()]
    row, found, most = np.arange(len(rounds)), gates.thresholds, -math.inf
    for thresholds in itertools.product(*options):
        stage = stages(confidences, thresholds)
        rate = float(tokens[row, stage].sum() / cost[row, stage].sum())
        if rate > most * (1 + 1e-12) or most == -math.inf:
            found, most = thresholds, rate
    return replace(gates, thresholds=found), most


def rate_of(rounds: Sequence[Round], gates: Gates, table: CostTable | None = None) -> float:
    """Return the tokens a round (with a table: a second) that the paper's method gets with these thresholds."""
    row, stage = np.arange(len(rounds)), stages(at_checkpoints(rounds, gates), gates.thresholds)
    tokens = 1.0 + np.asarray([one.accepted for one in rounds])
    return float(tokens[row, stage].sum() / costs(rounds, table)[row, stage].sum())


def prompts_of(tasks: str, texts: Sequence[str], tokenizer: Any, most: int, context: int = CONTEXT) -> list[list[int]]:
    """Return the prompts of tasks (`suites`), of text files, and of trace files (.jsonl).

    Of a task and of a trace file at most `most`; of a task those of at most `context` tokens.
    """
    prompts = []
    for label, task in open_tasks([name for name in tasks.split(",") if name]).items():
        found = (prompt_of(task, label, context, tokenizer, seed) for seed in range(most))
        prompts += [list(prompt.token_ids) for prompt in found if prompt is not None]
    for path in texts:
        for text in _texts(path, most):
            ids = list(tokenizer(text)["input_ids"])
            if ids:
                prompts.append(ids)
    if not prompts:
        raise GraftError("no prompts: name tasks (--tasks) or files (--texts)")
    return prompts


def _texts(path: str, most: int) -> list[str]:
    if not path.endswith(".jsonl"):
        return ["\n".join(line for _, line in lines_of(path))]
    try:
        return [str(json.loads(line)["prompt"]) for _, line in itertools.islice(lines_of(path), most)]
    except (ValueError, KeyError, TypeError) as error:
        raise GraftError(f"trace file {path}: expected a JSON object with a prompt on each line ({error})") from error


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="longgraft.eval.calibrate_gates", description=__doc__)
    parser.add_argument("--model", help="target: hub id, folder or GGUF file")
    parser.add_argument("--draft", help="drafter for it")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tasks", default="", help="tasks as `longgraft bench` names them; comma-separated")
    parser.add_argument("--context", type=int, default=CONTEXT, help="most tokens of a task's prompt")
    parser.add_argument("--texts", nargs="*", default=[], help="files that are prompts; .jsonl: one a line, `prompt`")
    parser.add_argument("--prompts", type=int, default=4, help="most prompts from one task or .jsonl file")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--gates", help="gates file to start from: checkpoints, shares, depth, width")
    parser.add_argument("--cost-table", help="frozen costs: maximise tokens a second, not tokens a round")
    parser.add_argument("--record", help="also write the recorded rounds (JSON)")
    parser.add_argument("--replay", help="recorded rounds to choose by; no model is needed")
    parser.add_argument("--out", required=True, help="gates file to write (JSON)")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Record or replay, choose, write; return what was found."""
    table = CostTable.load(options.cost_table) if options.cost_table else None
    if options.replay:
        rounds, gates = load(options.replay)
    else:
        rounds, gates = _recorded(options)
    if options.record:
        save(options.record, rounds, gates)
    found, rate = choose(rounds, gates, table)
    unit = "tokens_per_round" if table is None else "tokens_per_second"
    shares = np.bincount(stages(at_checkpoints(rounds, found), found.thresholds), minlength=len(gates.shares))
    result = {
        "thresholds": [round(t, 4) for t in found.thresholds],
        "rounds": len(rounds),
        unit: round(rate, 4),
        f"{unit}_by_default": round(rate_of(rounds, gates, table), 4),
        f"{unit}_never_pruned": round(rate_of(rounds, replace(gates, thresholds=(0.0,) * len(shares[1:])), table), 4),
        "rounds_by_stage": shares.tolist(),
    }
    found.save(options.out, **{key: value for key, value in result.items() if key != "thresholds"})
    return result


def _recorded(options: argparse.Namespace) -> tuple[list[Round], Gates]:
    from longgraft.engine import Engine

    if not options.model or not options.draft:
        raise GraftError("--model and --draft are needed to record (or --replay a record)")
    if options.max_new_tokens < 1:
        raise GraftError(f"--max-new-tokens is {options.max_new_tokens}: expected 1 or more")
    gates = Gates.load(options.gates) if options.gates else Gates()
    config = EngineConfig(
        policy="dense", cost_table=options.cost_table, max_nodes=max(60, gates.rows), prefix_cache=False
    )
    engine = Engine.from_pretrained(options.model, config, dtype=options.dtype, draft=options.draft)
    prompts = prompts_of(options.tasks, options.texts, engine.tokenizer, options.prompts, options.context)
    return record(engine, prompts, gates, options.max_new_tokens), gates


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    try:
        result = run(_arguments(arguments))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
