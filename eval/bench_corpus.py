"""Corpora: building, size, opening, looking up and updating, by tokens; ends with one JSON line.

What to expect: tokenising takes most of a build, so it is shown apart; sorting a suffix array reads each token a few
times from memory. A lookup is one binary search: log2(tokens) steps, each of which waits for memory twice, and a few
more to count. The baseline beside it is the same search in plain Python. Text is the standard library's source,
repeated with edits (every twentieth line changed) until there is enough; lookups follow files that are edited
otherwise, token by token, as a generation would. Every answer of the twin is compared with the native one.

    python -m longgraft.eval.bench_corpus --tokenizer M [--sizes 1000000,5000000] [--lookups 20000]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from longgraft.corpora import load_tokenizer
from longgraft.index import corpus_segment, corpus_twin
from longgraft.index.corpus import DEPTH, Corpus, open_corpus
from longgraft.index.corpus_build import build_corpus, refresh_corpus
from longgraft.index.corpus_segment import native
from longgraft.index.corpus_tokens import Encoder

CHARS_PER_TOKEN = 3.9  # of this text, to know when there is enough; what is reported is counted
TWIN_LOOKUPS = 300
OPENINGS = 20


@dataclass(frozen=True, slots=True)
class Line:
    """One size. Speeds in tokens a second, times in the unit their name ends with.

    `first_us`: a lookup with nothing read before. `following_us`: the next 16 tokens of up to 8 places.
    """

    tokens: int
    files: int
    segments: int
    build_per_s: float
    tokenise_per_s: float
    index_per_s: float
    index_cpu_per_s: float
    bytes_per_token: float
    open_ms: float
    first_us: float
    p50_us: float
    p99_us: float
    twin_p50_us: float
    following_us: float
    found: float
    update_s: float
    updated_p50_us: float


def edited(text: str, rng: random.Random, one_in: int = 20) -> str:
    """Return a text with about every `one_in`-th line changed, doubled or left out."""
    lines = []
    for line in text.splitlines(keepends=True):
        chance = rng.randrange(3 * one_in)
        if chance == 0:
            continue
        lines.append(line.replace("self", f"obj{rng.randrange(100)}") if chance == 1 else line)
        if chance == 2:
            lines.append(line)
    return "".join(lines)


def sources() -> list[str]:
    """Return the standard library's sources, in order of names."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(folder.rglob("*.py")) if "site-packages" not in path.parts]
    return [path.read_text("utf-8", "replace") for path in paths if 200 < path.stat().st_size < 200_000]


def write_files(folder: Path, texts: Sequence[str], num_tokens: int) -> None:
    """Write sources, as they are and then edited, until there are about so many tokens."""
    rng, num_chars, number = random.Random(1), 0.0, 0
    while num_chars < num_tokens * CHARS_PER_TOKEN:
        text = texts[number % len(texts)]
        text = text if number < len(texts) else edited(text, rng)
        (folder / f"{number:06}.py").write_text(text, encoding="utf-8")
        num_chars += len(text)
        number += 1


def contexts(texts: Sequence[str], encoder: Encoder, wanted: int) -> list[np.ndarray]:
    """Return the last tokens at successive places of files that are edited more."""
    rng = random.Random(2)
    found: list[np.ndarray] = []
    while len(found) < wanted:
        (document,) = encoder.encode([edited(rng.choice(texts), rng, 5)])
        ids = document.token_ids
        found += [ids[max(0, end - DEPTH) : end] for end in range(1, len(ids))]
    return found[:wanted]


def timed_us(call: Callable[[], Any]) -> float:
    """Return the microseconds that one call takes."""
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


def lookups(corpus: Corpus, asked: Sequence[np.ndarray]) -> tuple[list[float], int]:
    """Return the microseconds of each lookup, and how many found something."""
    times, found = [], 0
    for context in asked:
        start = time.perf_counter_ns()
        hits = corpus.lookup(context)
        times.append((time.perf_counter_ns() - start) / 1e3)
        found += hits.count > 0
    return times, found


def twin_us(folder: Path, asked: Sequence[np.ndarray]) -> float:
    """Return the median microseconds of a lookup in plain Python; raise if it finds anything else."""
    corpus = open_corpus(folder)
    with patch.object(corpus_segment, "native", lambda: corpus_twin):
        plain = open_corpus(folder)
    times = []
    for context in asked[:: max(1, len(asked) // TWIN_LOOKUPS)]:
        start = time.perf_counter_ns()
        theirs = plain.lookup(context)
        times.append((time.perf_counter_ns() - start) / 1e3)
        ours = corpus.lookup(context)
        if (ours.match_len, ours.count) != (theirs.match_len, theirs.count) or (ours.ends != theirs.ends).any():
            raise SystemExit(f"native and twin differ after {context.tolist()}")
    return statistics.median(times)


def sort_cpu_s(corpus: Corpus) -> float:
    """Return the processor seconds that sorting alone takes, which other work on the machine does not stretch."""
    total = 0.0
    for segment in corpus.segments:
        tokens = segment.arrays().tokens
        start = time.process_time()
        native().sort_ends(tokens, np.empty_like(tokens))
        total += time.process_time() - start
    return total


def measure(folder: Path, num_tokens: int, tokenizer: Any, num_lookups: int) -> Line:
    """Build, open, look up, update, look up again."""
    texts, encoder = sources(), Encoder(tokenizer)
    files, place = folder / "files", folder / "corpus"
    files.mkdir()
    write_files(files, texts, num_tokens)
    built = build_corpus(place, [files], tokenizer).manifest.built
    asked = contexts(texts, encoder, num_lookups)
    openings = [timed_us(lambda: open_corpus(place)) for _ in range(OPENINGS)]
    corpus = open_corpus(place)
    first = timed_us(lambda: corpus.lookup(asked[len(asked) // 2]))
    lookups(corpus, asked)
    times, found = lookups(corpus, asked)
    twin = twin_us(place, asked)
    ends = [corpus.lookup(context).ends for context in asked[:1000]]
    tokens, index_cpu_s = corpus.num_tokens, sort_cpu_s(corpus)
    path = files / "000003.py"
    path.write_text(edited(path.read_text(encoding="utf-8"), random.Random(3)) + "# edited\n", encoding="utf-8")
    update_s = timed_us(lambda: refresh_corpus(place, tokenizer)) / 1e6
    with open_corpus(place) as updated:
        lookups(updated, asked)
        again, _ = lookups(updated, asked)
        segments = len(updated.segments)
    return Line(
        tokens=tokens,
        files=len(corpus.documents),
        segments=segments,
        build_per_s=built["tokens_per_s"],
        tokenise_per_s=built["tokens"] / built["tokenise_s"],
        index_per_s=built["index_tokens_per_s"],
        index_cpu_per_s=tokens / index_cpu_s,
        bytes_per_token=corpus.num_bytes / tokens,
        open_ms=statistics.median(openings) / 1e3,
        first_us=first,
        p50_us=statistics.median(times),
        p99_us=float(np.percentile(times, 99)),
        twin_p50_us=twin,
        following_us=statistics.median(timed_us(lambda e=e: corpus.following(e, 16)) for e in ends),  # type: ignore[misc]
        found=found / len(asked),
        update_s=update_s,
        updated_p50_us=statistics.median(again),
    )


def table(lines: Sequence[Line]) -> Iterator[str]:
    """Lay lines out for reading, one figure a row."""
    for name in Line.__slots__:
        yield f"{name:>16} " + " ".join(f"{getattr(line, name):>14,.4g}" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 where there is no native module to measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--sizes", default="1000000,5000000")
    parser.add_argument("--lookups", type=int, default=20_000)
    options = parser.parse_args(argv)
    if native() is corpus_twin:
        print("nothing to measure: the native module was not built", file=sys.stderr)
        return 1
    tokenizer = load_tokenizer(options.tokenizer)
    lines = []
    for size in map(int, options.sizes.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            lines.append(measure(Path(folder), size, tokenizer, options.lookups))
    print("\n".join(table(lines)))
    print(json.dumps({"rows": [asdict(line) for line in lines]}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
