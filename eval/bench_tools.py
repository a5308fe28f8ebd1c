"""`longgraft ask`, `edit` and `complete` beside themselves with --plain, end to end, as a user runs them.

    python -m longgraft.eval.bench_tools --model M [--tools ask,edit,complete] [--pairs N] [--quantize int8]

Knows the command line alone: every figure is of a process of its own, grafted and plain in turns. `process`: seconds
from start to end, loading and measuring the model included. `request`: the engine's own end-to-end time, summed over
the requests of the process. `tok_s`: new tokens over the time of all rounds. Texts are Python's own: its language
reference as a PDF of 30 pages and as 300 KB of text (cut to the model's context, as `--fit` does), `textwrap.py` to
edit, and an installed package, copied, with the bodies of three functions taken out, to complete.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from longgraft.eval import policy_tasks
from longgraft.eval.bench import table
from longgraft.eval.environment import environment
from longgraft.eval.tiny_pdf import pages_of, pdf_of

QUESTIONS = (
    "What does the document say about the assert statement? Quote it.",
    "How are assignments to attribute references evaluated? Quote the passage.",
    "Which binary arithmetic operations are described? Quote one sentence about each.",
)
INSTRUCTION = "Rename the method `_split` to `_split_words` everywhere."
PDF_PAGES, TEXT_BYTES = 30, 300_000
BODY_LINES = range(8, 31)  # of the functions that are taken out
FILE_LINES = range(100, 401)  # of the files they are taken from
HOLES = 3
TOOLS = ("ask", "edit", "complete")


class Case(NamedTuple):
    """One thing to measure: the arguments behind `longgraft`."""

    name: str
    arguments: list[str]


class Refused(Exception):
    """A command that could not be run with this model; the message is its own."""


class Run(NamedTuple):
    """One process: its seconds, and what its last lines say."""

    seconds: float
    answers: list[dict[str, Any]]


def main() -> None:
    """Parse the command line, measure, print a table and JSON."""
    parser = argparse.ArgumentParser(prog="python -m longgraft.eval.bench_tools", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--new", type=int, default=160, help="most new tokens of an answer and of a completion")
    parser.add_argument("--repo", help="a package's folder; default: transformers'")
    parser.add_argument("--max-context", help="of all tools")
    parser.add_argument("--cost-table", help="frozen round costs, else every process measures them")
    parser.add_argument("--quantize", help="int8 or int4, of all tools")
    parser.add_argument("--folder", help="where everything lies meanwhile")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = measured(args, Path(folder))
    print(table(rows))
    print(json.dumps({"bench": "tools", "model": args.model, "rows": rows, "environment": environment()}))


def measured(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each case; files are written to `folder`."""
    common = ["--model", args.model, "--dtype", args.dtype, "--json", "--seed", "0"]
    for option in ("max_context", "cost_table", "quantize"):
        common += [f"--{option.replace('_', '-')}", value] if (value := getattr(args, option)) else []
    environ = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    rows: list[dict[str, Any]] = []
    for case in cases(args, folder):
        say(case.name)
        try:
            rows.append(_measured_one(case, [*case.arguments, *common], args.pairs, environ))
        except Refused as why:  # the other cases count all the same
            rows.append({"case": case.name, "refused": str(why)})
        say(json.dumps(rows[-1]))
    return rows


def _measured_one(case: Case, command: list[str], pairs: int, environ: dict[str, str]) -> dict[str, Any]:
    """Return one row; before the pairs of `complete` the repository's corpus is built, in `first_process_s`."""
    first = {"first_process_s": run(command, environ).seconds} if case.arguments[0] == "complete" else {}
    runs = [(run([*command, "--plain"], environ), run(command, environ)) for _ in range(pairs)]
    return row(case.name, runs) | first


def cases(args: argparse.Namespace, folder: Path) -> Iterator[Case]:
    """Write the files of each case and yield it."""
    tools, new = args.tools.split(","), ["--max-new-tokens", str(args.new)]
    if unknown := set(tools) - set(TOOLS):
        raise SystemExit(f"--tools holds {sorted(unknown)}: expected some of {', '.join(TOOLS)}")
    asked = [word for question in QUESTIONS for word in ("--question", question)]
    if "ask" in tools:
        text = reference()
        (folder / "reference.pdf").write_bytes(pdf_of(pages_of(text, PDF_PAGES)))
        (folder / "reference.txt").write_text(text.encode()[:TEXT_BYTES].decode(errors="ignore"))
        yield Case("ask: PDF", ["ask", str(folder / "reference.pdf"), *asked, "--fit", *new])
        yield Case("ask: text", ["ask", str(folder / "reference.txt"), *asked, "--fit", *new])
    if "edit" in tools:
        source = Path(str(textwrap.__file__)).read_text()
        (folder / "textwrap.py").write_text(source)
        yield Case("edit", ["edit", "--file", str(folder / "textwrap.py"), INSTRUCTION])
    if "complete" in tools:
        root = package(args.repo)
        copied = shutil.copytree(root, folder / root.name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        for file, line in holes(copied):
            place = ["--repo", str(copied), "--file", str(copied / file), "--line", str(line)]
            yield Case(f"complete: {file}", ["complete", *place, *new])


def reference() -> str:
    """Return Python's language reference as plain text."""
    return "\n\n".join(text.strip() for _, text in policy_tasks.reference())


def package(name: str | None) -> Path:
    """Return the folder to complete in."""
    if name is not None:
        return Path(name)
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def holes(root: Path) -> list[tuple[str, int]]:
    """Take the body of one function out of each of a few files, spread over all by name; return where they were."""
    files = []
    for path in sorted(root.rglob("*.py")):
        text = path.read_text("utf-8", errors="replace")
        if text.count("\n") in FILE_LINES and (functions := _functions(text)):
            files.append((path, text, functions[len(functions) // 2]))
    if len(files) < HOLES:
        raise SystemExit(f"{root} has {len(files)} files with a function to take out: expected {HOLES} or more")
    places = []
    for number in range(HOLES):
        path, text, function = files[(2 * number + 1) * len(files) // (2 * HOLES)]
        lines = text.splitlines(keepends=True)
        first, last = function.body[0].lineno, function.end_lineno or 0
        indent = " " * function.body[0].col_offset
        path.write_text("".join([*lines[: first - 1], indent + "\n", *lines[last:]]))
        places.append((path.relative_to(root).as_posix(), first))
    return places


def _functions(text: str) -> list[ast.FunctionDef]:
    try:
        found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    except SyntaxError:
        return []
    return [node for node in found if (node.end_lineno or 0) - node.body[0].lineno + 1 in BODY_LINES]


def run(arguments: Sequence[str], environ: dict[str, str]) -> Run:
    """Run the command line in a process of its own."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "longgraft", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    seconds = time.perf_counter() - begin
    lines = done.stdout.splitlines()
    if not lines:
        raise Refused(done.stderr.strip()[-500:])
    return Run(seconds, [json.loads(line) for line in lines])


def row(name: str, runs: Sequence[tuple[Run, Run]]) -> dict[str, Any]:
    """Return medians over pairs of (plain, grafted)."""

    def over(get: Any) -> list[float]:
        return [statistics.median(get(pair[i]) for pair in runs) for i in (0, 1)]

    process, request = over(lambda one: one.seconds), over(lambda one: _sum(one, "end_to_end_s"))
    decode = over(lambda one: _sum(one, "new_tokens") / _sum(one, "decode_s"))
    first = runs[0][1].answers
    return {
        "case": name,
        "prompt": max(one["prompt_tokens"] for one in first),
        "new": int(_sum(runs[0][1], "new_tokens")),
        "plain_process_s": process[0],
        "process_s": process[1],
        "process_ratio": process[0] / process[1],
        "plain_request_s": request[0],
        "request_s": request[1],
        "request_ratio": request[0] / request[1],
        "plain_tok_s": decode[0],
        "tok_s": decode[1],
        "decode_ratio": decode[1] / decode[0],
        "acceptance_length": _sum(runs[0][1], "new_tokens") / _sum(runs[0][1], "rounds"),
        "ended": ",".join(sorted({one["finish_reason"] for one in first})),
        "same_text": all([a["text"] for a in one.answers] == [b["text"] for b in two.answers] for one, two in runs),
    }


def _sum(one: Run, name: str) -> float:
    return sum(float(answer["stats"][name]) for answer in one.answers)


def say(line: str) -> None:
    """Tell on stderr how far it is."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
