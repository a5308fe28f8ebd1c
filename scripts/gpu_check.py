#!/usr/bin/env python3
"""What only a GPU can tell about longgraft, by one command and without a network: `python scripts/gpu_check.py`.

Builds the package in place, then runs each stage of `longgraft.eval.gpu_stages` in a process of its own, so that a
kernel that fails, hangs or spoils its CUDA context ends that stage alone. Results of checks and all figures go to a
JSON file; a short table comes last. `--dry-run` walks every stage on the CPU with small sizes, kernels in Triton's
interpreter. Knows Python's standard library only: the package may not be there yet.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Stages in order, with the most seconds each may take; ceilings come first, since times are given beside them.
LIMITS = {
    "build": 150,
    "ceilings": 60,
    "noise": 60,
    "index": 90,
    "attention": 150,
    "lossless": 150,
    "forwards": 120,
    "rounds": 120,
}
BUDGET = 345
TAIL = 2000


def main(argv: list[str] | None = None) -> int:
    """Run the stages; 0 if every check of those that ran holds, 1 if not."""
    options = _options(argv)
    begin, results = time.monotonic(), list[dict[str, Any]]()
    for name in options.stages:
        left = options.budget - (time.monotonic() - begin)
        result = _build(options) if name == "build" else _stage(name, options, left)
        results.append({"stage": name, **result})
        options.out.write_text(json.dumps({"argv": sys.argv[1:], "stages": results}, indent=1) + "\n")
        print(f"{name}: {_verdict(result)} in {result['seconds']:.0f} s", flush=True)
    print(_table(results))
    return int(any(not result["ok"] for result in results))


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="where the JSON goes")
    parser.add_argument("--only", default="", help=f"stages to run, with commas: {', '.join(LIMITS)}")
    parser.add_argument("--skip", default="", help="stages to leave out, with commas")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for all stages together")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with small sizes")
    options = parser.parse_args(argv)
    only, skip = ([name for name in text.split(",") if name] for text in (options.only, options.skip))
    if unknown := [name for name in [*only, *skip] if name not in LIMITS]:
        parser.error(f"unknown stage {unknown[0]}: expected some of {', '.join(LIMITS)}")
    options.stages = [name for name in LIMITS if name not in skip and (not only or name in only)]
    return options


def _environment(options: argparse.Namespace) -> dict[str, str]:
    """What stages run in: the checkout itself, no network, and without a GPU what a dry run needs."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    more = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    if options.dry_run:
        more |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    return {**os.environ, **more}


def _build(options: argparse.Namespace) -> dict[str, Any]:
    """Build the native modules in place, unless they are there; pip needs no network for that."""
    begin = time.monotonic()
    check = "import longgraft.index._native, longgraft.kernels._native"
    if _run([sys.executable, "-c", check], options, 60)[0] == 0:
        return _result(begin, "build", True, "the native modules are there")
    install = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "-q"]
    code, text = _run([*install, "-e", str(ROOT)], options, LIMITS["build"])
    if code and "externally-managed" in text:
        code, text = _run([*install, "--break-system-packages", "-e", str(ROOT)], options, LIMITS["build"])
    if code == 0:
        code, text = _run([sys.executable, "-c", check], options, 60)
    return _result(begin, "build", code == 0, text[-TAIL:])


def _stage(name: str, options: argparse.Namespace, left: float) -> dict[str, Any]:
    """Run one stage in a process of its own and read what it wrote."""
    begin, limit = time.monotonic(), min(LIMITS[name], left)
    if limit < 5:
        return _result(begin, name, False, f"no time left of {options.budget:.0f} s: run it with --only {name}")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        command = [sys.executable, "-m", "longgraft.eval.gpu_stages", name, "--out", str(out)]
        code, text = _run(command + ["--dry-run"] * options.dry_run, options, limit)
        found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"checks": [], "figures": []}
    if code:
        said = f"ended with {code} after {time.monotonic() - begin:.0f} of {limit:.0f} s: {text[-TAIL:]}"
        found["checks"].append({"name": name, "ok": False, "detail": said})
    is_ok = bool(found["checks"] or found["figures"]) and all(check["ok"] is not False for check in found["checks"])
    return {"ok": is_ok, "seconds": round(time.monotonic() - begin, 1), **found}


def _run(command: list[str], options: argparse.Namespace, limit: float) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command, env=_environment(options), cwd=ROOT, timeout=limit, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        said = error.output or b""
        return 124, said.decode(errors="replace") if isinstance(said, bytes) else said
    return done.returncode, done.stdout


def _result(begin: float, name: str, is_ok: bool, detail: str) -> dict[str, Any]:
    checks = [{"name": name, "ok": is_ok, "detail": detail}]
    return {"ok": is_ok, "seconds": round(time.monotonic() - begin, 1), "checks": checks, "figures": []}


def _verdict(result: dict[str, Any]) -> str:
    failed = [check["name"] for check in result["checks"] if check["ok"] is False]
    return "ok" if result["ok"] else f"FAILED ({', '.join(failed) or 'nothing came back'})"


def _table(results: list[dict[str, Any]]) -> str:
    """Return the last lines: each stage, its checks that failed or could not run, and its figures in short."""
    lines = ["", f"{'stage':10} {'result':7} {'s':>4}  checks"]
    for result in results:
        kinds = [sum(check["ok"] is kind for check in result["checks"]) for kind in (True, False, None)]
        verdict = "ok" if result["ok"] else "FAILED"
        counts = f"{kinds[0]} hold, {kinds[1]} fail, {kinds[2]} not run"
        lines.append(f"{result['stage']:10} {verdict:7} {result['seconds']:4.0f}  {counts}")
        for check in result["checks"]:
            if check["ok"] is not True:
                lines.append(
                    f"  {'FAIL' if check['ok'] is False else 'not run'} {check['name']}: {check['detail'][-300:]}"
                )
        lines += [f"  {figure['name']}: {figure['text']}" for figure in result["figures"] if figure.get("text")]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
