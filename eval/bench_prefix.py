"""The second question on a long document: time to its first token, beside the first question's.

    python -m longgraft.eval.bench_prefix --model M --tokens 32768 [--exact] [--check] [--folder DIR]

Knows the engine; no round. Three requests: a question behind a document, another one behind the same document, and,
in a new process that has loaded the saved document, the second again. Time to the first token counts from the request
to the round that committed it, `load_prefix` included where there is one, loading the model not. `--check` also answers
the second question without a cache and says whether the tokens agree.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from longgraft.config import EngineConfig, SamplingParams
from longgraft.engine import Engine

NEW = 16
QUESTIONS = (
    "\n\n# What does the first function above return, and which arguments does it take?\n# Answer:",
    "\n\n# Which of the classes above keep state between calls? Name three, and say why.\n# Answer:",
)


def document(tokenizer: Any, tokens: int) -> list[int]:
    """Return `tokens` tokens of the standard library's sources, file after file."""
    ids = list[int]()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        ids += tokenizer(path.read_text("utf-8", errors="replace"))["input_ids"]
        if len(ids) >= tokens:
            return ids[:tokens]
    raise SystemExit(f"the standard library has {len(ids)} tokens: expected {tokens} or more")


def engine_of(args: argparse.Namespace, is_on: bool = True) -> Engine:
    """Return an engine with room for the document twice."""
    config = EngineConfig(
        max_context=args.tokens + 256, exact=args.exact, prefix_cache=is_on, prefix_rows=args.rows, policy=args.policy
    )
    return Engine.from_pretrained(args.model, config, dtype=args.dtype)


def ask(engine: Engine, prompt: list[int]) -> tuple[float, list[int], dict[str, Any]]:
    """Return seconds to the first token, the tokens, and the stats of one request."""
    begin = time.perf_counter()
    seq = engine.open(prompt, SamplingParams(temperature=0.0, max_new_tokens=NEW, ignore_eos=True))
    with closing(engine.run([seq])) as rounds:
        next(rounds)
        first = time.perf_counter() - begin
        for _ in rounds:
            pass
    return first, list(seq.new_token_ids), seq.stats.summary()


def restarted(args: argparse.Namespace) -> dict[str, Any]:
    """Load the saved document, ask the second question; what the new process prints."""
    engine = engine_of(args)
    text = document(engine.tokenizer, args.tokens)
    begin = time.perf_counter()
    rows = engine.load_prefix(args.restored)
    loaded = time.perf_counter() - begin
    first, tokens, stats = ask(engine, text + engine.encode(QUESTIONS[1]))
    return {"load_s": loaded, "rows": rows, "ttft_s": loaded + first, "tokens": tokens, "hit": stats["prefix_rows"]}


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Run all requests and return the table."""
    engine = engine_of(args)
    text = document(engine.tokenizer, args.tokens)
    one, two = (text + engine.encode(question) for question in QUESTIONS)
    cold_s, _, _ = ask(engine, one)
    warm_s, warm, stats = ask(engine, two)
    result: dict[str, Any] = {
        "tokens": args.tokens,
        "first_ttft_s": cold_s,
        "second_ttft_s": warm_s,
        "second_share": warm_s / cold_s,
        "reused_rows": stats["prefix_rows"],
        "read_rows": len(two) - 1 - stats["prefix_rows"],
    }
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = str(Path(folder) / "document.safetensors")
        begin = time.perf_counter()
        result["saved_rows"] = engine.save_prefix(path, text)
        result["save_s"], result["file_bytes"] = time.perf_counter() - begin, Path(path).stat().st_size
        command = [sys.executable, "-m", "longgraft.eval.bench_prefix", *sys.argv[1:], "--restored", path]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    after = json.loads(said.splitlines()[-1])
    result |= {"restart_load_s": after["load_s"], "restart_ttft_s": after["ttft_s"]}
    result |= {"restart_share": after["ttft_s"] / cold_s, "restart_agrees": after["tokens"] == warm}
    if args.check:
        again_s, alone, _ = ask(engine_of(args, is_on=False), two)
        result |= {"without_cache_ttft_s": again_s, "agrees": alone == warm}
    return result


def main() -> None:
    """Parse the command line, measure, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--policy", default="adaptive")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--rows", action="store_true", help="reuse any rows (EngineConfig.prefix_rows)")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--folder", help="where the saved document lies meanwhile")
    parser.add_argument("--restored", help=argparse.SUPPRESS)
    args = parser.parse_args()
    print(json.dumps(restarted(args) if args.restored else measured(args)))


if __name__ == "__main__":
    main()
