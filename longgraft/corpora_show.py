"""How corpora look: tables and places for people, one line of JSON for scripts. Knows an open corpus; no options."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from longgraft.render import json_line

if TYPE_CHECKING:
    from longgraft.index.corpus import Corpus
    from longgraft.index.corpus_build import Change

BEFORE, AFTER = 12, 24  # tokens shown around a match
UNITS = ["B", "KiB", "MiB", "GiB", "TiB"]


def print_json(values: dict[str, Any]) -> None:
    """Print one line of JSON."""
    print(json_line(values))


def summary(name: str, corpus: Corpus) -> dict[str, Any]:
    """Return what there is to say of a corpus, JSON-ready."""
    manifest = corpus.manifest
    return {
        "name": name,
        "folder": str(corpus.folder),
        "tokens": corpus.num_tokens,
        "documents": sum(one.num_documents for one in manifest.segments),
        "files": manifest.num_files,
        "copies": manifest.num_copies,
        "bytes": corpus.num_bytes,
        "segments": len(manifest.segments),
        "skipped": manifest.skipped,
        "tokenizer": manifest.tokenizer_name,
        "roots": [printable(root) for root in manifest.roots],
        "last_build": manifest.built,
    }


def print_stats(values: dict[str, Any]) -> None:
    """Print a summary as a table of two columns."""
    table = Table(show_header=False, box=None)
    built = values["last_build"]
    per_token = values["bytes"] / values["tokens"] if values["tokens"] else 0.0
    segments = counted(values["segments"], "segment")
    rows = {
        "corpus": values["name"],
        "folder": values["folder"],
        "built of": "\n".join(map(visible, values["roots"])),
        "tokenizer": values["tokenizer"] or "(not named)",
        "tokens": f"{values['tokens']:,}",
        "files": f"{values['files']:,} ({values['copies']:,} of them copies of others)",
        "on disk": f"{size(values['bytes'])} in {segments}, {per_token:.2f} bytes a token",
        "skipped": "\n".join(f"{count:,} {why}" for why, count in values["skipped"].items()) or "nothing",
        "last build": f"{built['tokens']:,} tokens in {built['seconds']:.1f} s, {built['tokens_per_s']:,.0f} tokens/s; "
        f"indexing alone {built['index_tokens_per_s']:,.0f} tokens/s",
    }
    for key, value in rows.items():
        table.add_row(Text(key, style="bold"), Text(value))
    Console().print(table)


def print_list(rows: Sequence[dict[str, Any]]) -> None:
    """Print summaries, one a line; a corpus that cannot be opened with its reason."""
    if not rows:
        print("no corpora yet: longgraft index build NAME PATH... --tokenizer M", file=sys.stderr)
        return
    table = Table(box=None)
    for heading, justify in (("name", "left"), ("tokens", "right"), ("files", "right"), ("on disk", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    table.add_column("tokenizer")
    for row in rows:
        if "error" in row:
            table.add_row(row["name"], "", "", "", Text(row["error"], style="red"))
        else:
            cells = f"{row['tokens']:,}", f"{row['files']:,}", size(row["bytes"])
            table.add_row(row["name"], *cells, Text(row["tokenizer"]))
    Console().print(table)


def found(corpus: Corpus, token_ids: Sequence[int], limit: int, tokenizer: Any) -> dict[str, Any]:
    """Return where the end of `token_ids` occurs, JSON-ready. Without a tokenizer ids stand for text."""
    hits = corpus.lookup(token_ids, min_match=1, limit=min(limit, 1024))
    places = []
    for end in hits.ends.tolist():
        begins = corpus.passage(end, hits.match_len, 0)
        around = corpus.passage(end, hits.match_len + BEFORE, AFTER)
        path, line = corpus.origin(begins.document, begins.offset)
        cut = begins.offset - around.offset
        parts = around.token_ids[:cut], begins.token_ids, around.token_ids[cut + hits.match_len :]
        texts = [_text(part.tolist(), tokenizer) for part in parts]
        places.append(
            {"path": printable(path), "line": line, "document": begins.document, "offset": begins.offset}
            | dict(zip(("before", "match", "after"), texts))
        )
    return {"tokens": len(token_ids), "match_len": hits.match_len, "count": hits.count, "places": places}


def print_found(values: dict[str, Any]) -> None:
    """Print found places: file and line, then the match in its surroundings."""
    console = Console()
    for place in values["places"]:
        console.print(Text(visible(f"{place['path']}:{place['line']}"), style="bold cyan"), soft_wrap=True)
        shown = Text(visible(place["before"]).rpartition("\n")[2], style="dim")
        shown.append(visible(place["match"]), style="bold green")
        shown.append(visible(place["after"]))
        console.print(shown, soft_wrap=True)
        console.print()
    count, tokens = values["count"], values["tokens"]
    told = f"the last {values['match_len']} of {tokens} tokens stand in {counted(count, 'place')}"
    print(told if count else "nothing found", file=sys.stderr)


def counted(number: int, word: str) -> str:
    """Return a number with its word, in the plural where it is not one."""
    return f"{number:,} {word}{'s' * (number != 1)}"


def change_values(name: str, change: Change) -> dict[str, Any]:
    """Return what a build or update did, JSON-ready."""
    manifest = change.manifest
    return {
        "name": name,
        "is_new": change.is_new,
        "added": change.num_added,
        "dropped": change.num_dropped,
        "tokens": manifest.num_tokens,
        "files": manifest.num_files,
        "copies": manifest.num_copies,
        "skipped": manifest.skipped,
        "segments": len(manifest.segments),
        "last_build": manifest.built,
    }


def change_line(name: str, change: Change) -> str:
    """Return one line for people about a build or update."""
    manifest = change.manifest
    if not change.is_new:
        return f"{name} is up to date: {manifest.num_tokens:,} tokens of {manifest.num_files:,} files"
    skipped = ", ".join(f"{count:,} {why}" for why, count in manifest.skipped.items()) or "nothing"
    speed = manifest.built.get("tokens_per_s", 0.0)
    return (
        f"{name}: {change.num_added:,} texts added, {change.num_dropped:,} dropped; now {manifest.num_tokens:,} tokens "
        f"of {manifest.num_files:,} files ({manifest.num_copies:,} copies); skipped: {skipped}; {speed:,.0f} tokens/s"
    )


@contextmanager
def building() -> Iterator[Callable[[int, int], None]]:
    """Return a function of (files looked at, tokens made) that shows them on a terminal's stderr."""
    if not sys.stderr.isatty():
        yield lambda files, tokens: None
        return
    console = Console(stderr=True)
    with console.status("reading files") as status:
        yield lambda files, tokens: status.update(f"{files:,} files looked at, {tokens:,} tokens")


def size(num_bytes: float) -> str:
    """Return a number of bytes for people."""
    unit = 0
    while num_bytes >= 1024 and unit < len(UNITS) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:.0f} {UNITS[unit]}" if unit == 0 else f"{num_bytes:.1f} {UNITS[unit]}"


def printable(text: str) -> str:
    """Return text that any stream can hold: file names may carry bytes that are no characters."""
    return text.encode("utf-8", "replace").decode()


def visible(text: str) -> str:
    """Return text that cannot steer a terminal."""
    return "".join(c if c in "\n\t" or (c >= " " and not "\x7f" <= c < "\xa0") else "\ufffd" for c in text)


def _text(token_ids: list[int], tokenizer: Any) -> str:
    return " ".join(map(str, token_ids)) if tokenizer is None else printable(tokenizer.decode(token_ids))
