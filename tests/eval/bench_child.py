"""A benchmark in a process of its own, for a test that kills it. Says on stdout after every finished cell how many."""

import sys

import torch

from longgraft.eval import policy_plots
from longgraft.eval.policy_bench import run
from longgraft.eval.policy_folder import Folder
from longgraft.eval.policy_settings import BenchSettings

TASKS = ("longbench/lcc", "specbench/rag", "chat")


def settings(model: str, costs: str) -> BenchSettings:
    return BenchSettings(model, tasks=TASKS, contexts=(420,), new=6, policies=("plain", "adaptive"), cost_table=costs)


def main(model: str, costs: str, out: str) -> None:
    torch.set_num_threads(1)
    policy_plots.draw = lambda *_: []  # type: ignore[assignment]
    true_add = Folder.add

    def add(self: Folder, cell: dict[str, object]) -> None:
        true_add(self, cell)
        print("cell", flush=True)

    Folder.add = add  # type: ignore[method-assign]
    run(settings(model, costs), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
