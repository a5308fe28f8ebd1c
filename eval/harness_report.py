"""One run of lm-evaluation-harness: tasks are loaded, evaluated and reported, with what each took.

What is written is the harness's own results, with one more entry, `longgraft`: speed by task, scores of plain decoding
where they were asked for, whether both are equal, environment. Knows tasks and figures; generating is `harness`'s.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from longgraft.config import GraftError
from longgraft.engine import Engine
from longgraft.eval import harness
from longgraft.eval.bench import table
from longgraft.eval.environment import details
from longgraft.eval.harness import GraftLM, Run, warm_up
from longgraft.eval.policy_report import figure
from longgraft.eval.policy_rows import Row, pooled, spread

Scores = dict[str, dict[str, Any]]
Samples = dict[str, list[int]] | None  # numbers of the documents that are asked, by task; None: all
VERDICTS = {True: "equal", False: "NOT EQUAL", None: "nothing to compare, as no task generates"}


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """What is evaluated. `contexts`: the lengths that RULER's tasks are built for. `limit`: requests of a task,
    below 1 a share of them, for each of its lengths.

    `policies`: the one that is scored, and one beside it. `include_path`: a folder with tasks of your own.
    """

    model: str
    tasks: tuple[str, ...]
    policies: tuple[str, ...]
    contexts: tuple[int, ...] = (4096,)
    limit: float | None = None
    num_fewshot: int | None = None
    batch_size: int = 1
    seed: int = 0
    chat_template: bool = False
    gen_kwargs: str | None = None
    include_path: str | None = None
    log_samples: bool = False


class LoadedOnce(harness.TaskManager):
    """A task manager that builds its tasks once: RULER's take minutes, and two evaluations need the same ones."""

    loaded: Any = None

    def load(self, task_list: Any) -> Any:
        """Return the tasks; raises `GraftError` where a task is unknown or its data cannot be had."""
        if self.loaded is None:
            try:
                self.loaded = super().load(task_list)
            except Exception as error:  # a task's own code and the libraries that fetch its data raise what they like
                reason = " ".join(str(error).split())[:300] or type(error).__name__
                raise GraftError(
                    f"tasks {', '.join(map(str, task_list))}: cannot be loaded ({reason}); see docs/evaluation.md for "
                    "what works without a network"
                ) from None
        return self.loaded


def evaluate(engine: Engine, settings: EvalSettings, command: str, out: str | None) -> tuple[dict[str, Any], str]:
    """Return the results, with speed, and a summary for the terminal; writes them into the folder `out`."""
    lm = GraftLM(engine, settings.policies, seed=settings.seed, batch_size=settings.batch_size)
    warm_up(lm)
    with tempfile.TemporaryDirectory() as folder:
        # RULER's tasks count tokens with a tokenizer that they open by name; the engine's may come from a GGUF file.
        engine.tokenizer.save_pretrained(folder)
        about = {"max_seq_lengths": list(settings.contexts), "tokenizer": folder, "pretrained": folder}
        manager = LoadedOnce(include_path=settings.include_path, metadata=about)
        manager.load(list(settings.tasks))
        samples = chosen(manager.loaded["tasks"], settings.limit)
        results = _first(lm, settings, manager, samples)
    for config in results.get("configs", {}).values():
        # The folder is gone by now; what it stood for is the model's own tokenizer.
        config["metadata"] = (config.get("metadata") or {}) | {
            "tokenizer": settings.model,
            "pretrained": settings.model,
        }
    speed = speeds(lm.runs, settings.policies)
    ours: dict[str, Any] = {"command": command, "policies": list(settings.policies), "speed": speed}
    if len(settings.policies) > 1:
        plain = _second(lm, settings, manager, samples)
        equal = scores(plain) == scores({task: results["results"][task] for task in plain})
        # Where no task generates, nothing was compared.
        ours |= {"plain_results": plain, "equal_scores": equal if plain else None}
    results["longgraft"] = ours | {"environment": details()}
    written = _write(results, Path(out)) if out else None
    return results, _summary(results, written)


def _first(lm: GraftLM, settings: EvalSettings, manager: LoadedOnce, samples: Samples) -> dict[str, Any]:
    found = harness.simple_evaluate(
        lm,
        model_args=f"pretrained={settings.model}",
        tasks=list(settings.tasks),
        task_manager=manager,
        num_fewshot=settings.num_fewshot,
        samples=samples,
        batch_size=settings.batch_size,
        gen_kwargs=settings.gen_kwargs,
        apply_chat_template=settings.chat_template,
        log_samples=settings.log_samples,
        random_seed=settings.seed,
    )
    return dict(found)


def _second(lm: GraftLM, settings: EvalSettings, manager: LoadedOnce, samples: Samples) -> Scores:
    """Score what the second policy said, by the same tasks; those without generation are not scored twice."""
    tasks = {name: task for name, task in manager.loaded["tasks"].items() if task.OUTPUT_TYPE == "generate_until"}
    if not tasks:
        return {}
    lm.is_second = True
    found = harness.evaluate(
        lm,
        task_dict={"tasks": tasks, "groups": {}},
        samples=samples,
        apply_chat_template=settings.chat_template,
        # As `simple_evaluate` has it.
        fewshot_as_multiturn=True,
        log_samples=False,
    )
    return dict(found["results"])


def chosen(tasks: Mapping[str, Any], limit: float | None) -> Samples:
    """Return the numbers of each task's documents to ask: the first `limit` of every length it has; None: all.

    The harness counts from the first document on; RULER's tasks begin with all those of their first length.
    """
    if limit is None:
        return None
    found: dict[str, list[int]] = {}
    for name, task in tasks.items():
        documents = task.eval_docs
        lengths: list[int | None] = [None] * len(documents)
        if len(documents) and harness.length_of(documents[0]) is not None:
            lengths = [harness.length_of(document) for document in documents]
        groups: dict[int | None, list[int]] = {}
        for number, length in enumerate(lengths):
            groups.setdefault(length, []).append(number)
        most = {length: math.ceil(limit * len(group)) if limit < 1 else int(limit) for length, group in groups.items()}
        found[name] = sorted(number for length, group in groups.items() for number in group[: most[length]])
    return found


def scores(results: Scores) -> dict[str, dict[str, float]]:
    """Return the numbers of results, by task and metric; those that mean `not measured` (-1 in RULER) left out."""
    return {
        task: {
            name: value
            for name, value in values.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and value != -1
        }
        for task, values in results.items()
    }


def speeds(runs: Sequence[Run], policies: Sequence[str]) -> list[Row]:
    """Return one row for each task, length and policy; ratios are between the two policies of one batch."""
    groups: dict[tuple[str, int | None], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.task, run.length), []).append(run)
    rows = []
    for (task, length), members in groups.items():
        mine = {policy: [run for run in members if run.policy == policy] for policy in policies}
        for policy in policies:
            row: Row = {"task": task, "length": length, "policy": policy} | _figures(mine[policy])
            if policy != policies[-1] and len(policies) > 1:
                row |= _ratios(mine[policy], mine[policies[-1]])
            rows.append(row)
    return rows


def _figures(runs: Sequence[Run]) -> Row:
    outputs = [output for run in runs for output in run.outputs]
    counts = pooled([output.stats for output in outputs])
    decode = _decode(runs)
    new = sum(len(output.token_ids) for output in outputs)
    return {
        "requests": len(outputs),
        "prompt_tokens": round(statistics.mean(output.prompt_len for output in outputs)),
        "new_tokens": new,
        "seconds": round(sum(run.seconds for run in runs), 3),
        "decode_tokens_per_s": round(new / decode, 3) if decode else None,
        "acceptance_length": counts["acceptance_length"],
        "acceptance_length_drafted": counts["acceptance_length_drafted"],
    }


def _decode(runs: Sequence[Run]) -> float | None:
    """Return seconds of decoding; None for batches, whose requests decode while others are read."""
    if any(len(run.outputs) > 1 for run in runs):
        return None
    return sum(float(run.outputs[0].stats["decode_s"]) for run in runs)


def _ratios(ours: Sequence[Run], plain: Sequence[Run]) -> Row:
    pairs = list(zip(ours, plain))
    same = [a.token_ids == b.token_ids for one, two in pairs for a, b in zip(one.outputs, two.outputs)]
    row: Row = {"end_to_end": _ratio(plain, ours, lambda runs: sum(run.seconds for run in runs))}
    row |= spread("end_to_end_of_one", [two.seconds / one.seconds for one, two in pairs if one.seconds])
    row |= {"decode": _ratio(plain, ours, _decode), "same_tokens": sum(same), "of": len(same)}
    return row


def _ratio(above: Sequence[Run], below: Sequence[Run], of: Callable[[Sequence[Run]], float | None]) -> float | None:
    one, other = of(above), of(below)
    return round(one / other, 4) if one and other else None


def _write(results: dict[str, Any], folder: Path) -> Path:
    """Write results as the harness names them, samples beside them; nothing that is there is written over."""
    when = datetime.now().isoformat().replace(":", "-")
    folder.mkdir(parents=True, exist_ok=True)
    for task, lines in (results.get("samples") or {}).items():
        text = "".join(json.dumps(line, default=harness.handle_non_serializable) + "\n" for line in lines)
        (folder / f"samples_{task}_{when}.jsonl").write_text(text, encoding="utf-8")
    path = folder / f"results_{when}.json"
    kept = {name: value for name, value in results.items() if name != "samples"}
    path.write_text(json.dumps(kept, indent=2, default=harness.handle_non_serializable), encoding="utf-8")
    return path


def _summary(results: dict[str, Any], written: Path | None) -> str:
    ours = results["longgraft"]
    parts = [harness.make_table(results)]
    if ours["speed"]:
        parts.append(table([_line(row) for row in ours["speed"]]).strip("\n"))
    if "equal_scores" in ours:
        parts.append(f"scores of both: {VERDICTS[ours['equal_scores']]}")
    return "\n\n".join([*parts, str(written)] if written else parts)


def _line(row: Row) -> Row:
    return {
        "task": row["task"],
        "length": row["length"] or "-",
        "policy": row["policy"],
        "requests": row["requests"],
        "prompt": row["prompt_tokens"],
        "new": row["new_tokens"],
        "seconds": figure(row, "seconds", ".2f"),
        "tokens/s": figure(row, "decode_tokens_per_s", ".2f"),
        "decode": figure(row, "decode", ".2f"),
        "end to end": figure(row, "end_to_end", ".2f"),
        "length of acceptance": figure(row, "acceptance_length", ".2f"),
        "drafted": figure(row, "acceptance_length_drafted", ".2f"),
        "same": f"{row['same_tokens']} of {row['of']}" if "of" in row else "-",
    }
