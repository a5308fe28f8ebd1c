"""`longgraft bench`: every policy on every task at every context, beside what a user would pick instead, in one run.

A prompt is read once and its K/V forked, so that runs differ in decoding alone. A cell is one interleaved repeat
behind one prompt: plain, the policies, the peers, plain again (which shows the noise); it is one line of a file and
never measured twice. Trees depend on a frozen table of round costs, measured once, and on nothing that an
earlier cell left behind. Knows no looks: see `policy_report`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from longgraft.config import EngineConfig, GraftError, Output, SamplingParams
from longgraft.cost import CostTable
from longgraft.draft.base import Drafter
from longgraft.engine import Engine
from longgraft.eval.environment import commit, details
from longgraft.eval.fitting import Prompt
from longgraft.eval.peers import Peer, Rivals, open_peers
from longgraft.eval.policy_folder import Folder, whole
from longgraft.eval.policy_settings import BenchSettings
from longgraft.eval.policy_tasks import read_records
from longgraft.eval.suites import Task, open_tasks, prompt_of
from longgraft.measure import measure_costs
from longgraft.resolve import resolve
from longgraft.sequence import Sequence

AGAIN = "plain again"
WARM_UP_TOKENS, WARM_UP_PROMPT = 8, 128
Say = Callable[[str], None]
Cells = Generator[dict[str, Any]]
Group = tuple[str, int, int]  # (task, context, seed): one prompt


class Recorder:
    """A drafter that also keeps the prompt's hidden states, so that forks of the prompt can be given them again."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.rows: list[tuple[int, torch.Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def prefill(self, sequence: Sequence, first: int, features: torch.Tensor) -> None:
        """Keep a copy and pass it on."""
        self.rows.append((first, features.clone()))
        self._drafter.prefill(sequence, first, features)

    def repeat(self, sequence: Sequence) -> None:
        """Give a fork what the first reader of its prompt was given."""
        for first, features in self.rows:
            self._drafter.prefill(sequence, first, features)


class Bench:
    """The engine, its peers and the frozen costs; reads prompts and measures cells."""

    def __init__(self, settings: BenchSettings, folder: Folder) -> None:
        from longgraft.load import load

        self.settings = settings
        model, tokenizer = load(settings.model, settings.dtype, settings.device, settings.quantize)
        costs = Path(settings.cost_table or folder.path / "cost_table.json")
        self.recorder: Recorder | None = None
        if settings.draft is not None:
            from longgraft.draft.load import load_drafter

            drafter = load_drafter(settings.draft, model, tokenizer, str(costs) if costs.exists() else None)
            self.recorder = Recorder(drafter)
        plain = Engine(model, tokenizer, EngineConfig(policy="plain", prefix_cache=False))
        self.cost = self._costs(plain, costs)
        recorder: Any = self.recorder
        config = EngineConfig(gates=settings.gates, prefix_cache=False)
        self.engine = Engine(model, tokenizer, config, drafter=recorder, cost=self.cost, pool=plain.pool)
        for policy in settings.policies:
            self.engine.policies.get(policy)
        self.peers = self._open_peers(model) if settings.peers else []

    def _costs(self, plain: Engine, path: Path) -> CostTable:
        """Load the frozen table, or measure it once behind the longest context and freeze it with the drafter's."""
        if not path.exists() and self.settings.cost_table is None:
            deep = max(2048, min(max(self.settings.contexts), plain.max_context))
            with plain.target.session():
                measured = measure_costs(plain.target, plain.pool, (128, deep))
            with whole(path) as beside:
                measured.save(beside, self.recorder.cost_table if self.recorder else None)
        return CostTable.load(path)

    def _open_peers(self, model: Any) -> list[Peer]:
        settings = self.settings
        greedy = resolve(
            SamplingParams(temperature=0.0), getattr(model, "generation_config", None), self.engine.target.vocab_size
        )
        penalty = greedy.repetition_penalty or 1.0
        eos = tuple(greedy.eos_token_ids or ())
        return open_peers(settings.peers, Rivals(model, settings.draft, settings.dtype, settings.gguf, eos, penalty))

    def prompt(self, task: Task, group: Group) -> Prompt | None:
        """Return a prompt that leaves room for the new tokens, None where a suite has none for this seed."""
        label, context, seed = group
        room = min(context, self.engine.max_context - self.settings.new)
        if room < 0.75 * context:
            raise GraftError(f"a context of {context} tokens: this model's limit is {self.engine.max_context}")
        return prompt_of(task, label, room, self.engine.tokenizer, seed)

    def warm_up(self, prompt: Prompt) -> dict[str, Any]:
        """Decode a little with everything once, so that nothing is measured while it is loaded or compiled."""
        ids = prompt.token_ids[-WARM_UP_PROMPT:]
        with closing(self.cells(Prompt("", len(ids), ids, ""), 0, [0], WARM_UP_TOKENS)) as cells:
            return next(cells)

    def cells(self, prompt: Prompt, seed: int, repeats: list[int], new: int) -> Cells:
        """Read a prompt once and yield one finished cell after another."""
        params = SamplingParams(temperature=0.0, max_new_tokens=new, seed=seed)
        first, seconds = self._read(prompt, params)
        skipped = self._read_peers(prompt, new)
        try:
            for repeat in repeats:
                runs = [*self._runs(first, params), *self._peer_runs(new, skipped), self._run(first, params, AGAIN)]
                for run in runs:
                    self._finish(run, prompt, seconds)
                about = {"task": prompt.task, "context": prompt.context, "seed": seed, "repeat": repeat}
                about |= {"prompt_tokens": len(prompt.token_ids), "prompt": prompt.digest, "source": prompt.source}
                about |= {"dtype": str(self.engine.target.dtype).removeprefix("torch."), "device": self._device()}
                yield about | {"prefill_s": round(seconds, 4), "runs": runs}
        finally:
            first.cache.release()
            self.engine.drafter.reset(first)
            for peer in self.peers:
                peer.close()

    def _finish(self, run: dict[str, Any], prompt: Prompt, prefill_s: float) -> None:
        """Add what needs the prompt: the end-to-end time of a policy, and whether a known answer is there."""
        if run["kind"] == "policy":
            # Reading is done once for all policies; indexing the prompt is done by those that retrieve.
            reading = prefill_s + run["stats"]["seconds_by_stage"].get("index", 0.0)
            run["end_to_end_s"] = round(reading + run["decode_s"], 4)
        if prompt.answers and "token_ids" in run:
            text = self.engine.tokenizer.decode(run["token_ids"], skip_special_tokens=True).lower()
            run["right"] = all(answer.lower() in text for answer in prompt.answers)

    def _device(self) -> str:
        device = self.engine.target.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

    def _read(self, prompt: Prompt, params: SamplingParams) -> tuple[Sequence, float]:
        """Read a prompt, its hidden states recorded where the drafter wants them."""
        if self.recorder is not None:
            self.recorder.rows.clear()
        drafting = [name for name in self.settings.policies if self.engine.policies.get(name).drafts]
        first = self.engine.open(list(prompt.token_ids), params, policy=drafting[0] if drafting else "plain")
        with self.engine.target.session(), self.engine.drafter.session():
            self.engine.prefill(first)
        return first, first.stats.seconds["prefill"]

    def _read_peers(self, prompt: Prompt, new: int) -> dict[str, str]:
        """Let the peers read a prompt; returns why some could not."""
        reasons = {}
        for peer in self.peers:
            try:
                peer.read(prompt.token_ids, new)
            except Exception as error:  # other projects raise what they like; one that fails must not end a long run
                reasons[peer.name] = _reason(error)
        return reasons

    def _runs(self, first: Sequence, params: SamplingParams) -> Iterator[dict[str, Any]]:
        yield self._run(first, params, "plain")
        for name in self.settings.policies:
            if name != "plain":
                yield self._run(first, params, name)

    def _run(self, first: Sequence, params: SamplingParams, name: str) -> dict[str, Any]:
        """Decode behind a fork of the prompt with one policy."""
        policy = "plain" if name == AGAIN else name
        seq = self.engine.open(first.token_ids[: first.prompt_len], params, policy=policy)
        seq.cache = first.cache.fork()
        if self.recorder is not None and seq.policy.drafts:
            self.recorder.repeat(seq)
        begin = time.process_time()
        with closing(self.engine.run([seq])) as rounds:
            for _ in rounds:
                pass
        # Indexing the prompt belongs to reading it; it runs on one thread.
        cpu = time.process_time() - begin - seq.stats.seconds["index"]
        return described(name, self.engine.output(seq), cpu, self.cost)

    def _peer_runs(self, new: int, skipped: dict[str, str]) -> Iterator[dict[str, Any]]:
        for peer in self.peers:
            run: dict[str, Any] = {"name": peer.name, "kind": "peer"}
            try:
                if peer.name in skipped:
                    raise GraftError(skipped[peer.name])
                found = peer.decode(new)
            except Exception as error:  # as above
                yield run | {"skipped": _reason(error)}
                continue
            run |= {"token_ids": list(found.token_ids), "timed_tokens": found.timed}
            run |= {"decode_s": found.seconds, "cpu_s": found.cpu_seconds}
            yield run | {"end_to_end_s": round(found.read_s + found.seconds, 4)}


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def described(name: str, output: Output, cpu: float, cost: CostTable) -> dict[str, Any]:
    """Return one run of a policy as JSON-ready values.

    `frozen_s`: what its rounds and draft passes cost by the frozen tables: free of this run's hiccups.
    """
    stats, frozen, length = output.stats, 0.0, output.prompt_len
    for (nodes, _), new in zip(stats["accepted_by_round"], stats["new_tokens_by_round"]):
        frozen += float(cost.rounds(nodes + 1, length)[-1])
        length += new
    return {
        "name": name,
        "kind": "policy",
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "decode_s": stats["decode_s"],
        "cpu_s": cpu,
        "frozen_s": frozen + stats["draft_price_s"],
        "stats": stats,
    }


def run(settings: BenchSettings, out: str, say: Say = lambda line: None) -> dict[str, Any]:
    """Measure what is missing in the folder `out`, then write and return the report; raises `GraftError`."""
    from longgraft.eval.policy_report import write_report

    folder = Folder(out, settings.identity())
    try:
        _measure(settings, folder, say)
    finally:
        # A run that ends early, whatever the reason, still says what it found.
        cells = folder.cells()
        about = settings.identity() | {"environment": details()}
        report = write_report(folder.path, cells, about, settings.command(out), say) if cells else {}
    if not report:
        raise GraftError("nothing was measured: no task has a prompt that fits; give longer contexts")
    return report


def _measure(settings: BenchSettings, folder: Folder, say: Say) -> None:
    """Measure the cells that are missing; without any no model is loaded."""
    tasks = open_tasks(settings.tasks, read_records(settings.traces) if settings.traces else [])
    done = {(cell["task"], cell["context"], cell["seed"], cell["repeat"]) for cell in folder.cells()}
    missing: dict[Group, list[int]] = {}
    for group in [(t, c, s) for s in settings.seeds for c in settings.contexts for t in tasks]:
        if repeats := [repeat for repeat in range(settings.pairs) if (*group, repeat) not in done]:
            missing[group] = repeats
    if not missing:
        return
    bench = Bench(settings, folder)
    prompts = _prompts(bench, tasks, list(missing), say)
    if not prompts:
        return
    say("warming up")
    for run in bench.warm_up(next(iter(prompts.values())))["runs"]:
        if "skipped" in run:
            say(f"{run['name']} will be left out: {run['skipped']}")
    version = commit()
    for number, (group, prompt) in enumerate(prompts.items(), 1):
        say(f"{number} of {len(prompts)}: {prompt.task}, {len(prompt.token_ids)} prompt tokens")
        for cell in bench.cells(prompt, group[2], missing[group], settings.new):
            folder.add(cell | {"task": group[0], "context": group[1], "commit": version})


def _prompts(bench: Bench, tasks: dict[str, Task], groups: list[Group], say: Say) -> dict[Group, Prompt]:
    """Return the prompts of all groups that have one; says which have none."""
    found = {group: prompt for group in groups if (prompt := bench.prompt(tasks[group[0]], group))}
    if without := [
        f"{task} at {context}, seed {seed}" for task, context, seed in groups if (task, context, seed) not in found
    ]:
        say(f"no prompt that fits, left out: {'; '.join(without[:5])}{' ...' if len(without) > 5 else ''}")
    return found
