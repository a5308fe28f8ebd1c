"""`longgraft index ...`: builds, updates, watches, searches and lists corpora from the command line.

Knows options and tokenizers; what a corpus is lies in `longgraft.index.corpus*`, how it looks in `corpora_show`.
Everything heavy is imported inside commands, so that --help answers at once.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longgraft.config import GraftError
from longgraft.options import JsonAlone, mendable, quieten

if TYPE_CHECKING:
    from longgraft.index.corpus import Corpus
    from longgraft.index.corpus_build import Change

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="Corpora: documents that are not in the prompt, indexed on disk for drafting from them.",
)

Name = Annotated[str, typer.Argument(help="A name, or a folder of its own (anything with a slash).")]
Paths = Annotated[list[str], typer.Argument(metavar="PATH...", help="Files and folders to read.")]
Tokenizer = Annotated[str, typer.Option("--tokenizer", "-t", help="Model with the tokenizer: hub id, folder, GGUF.")]
Again = Annotated[str | None, typer.Option("--tokenizer", "-t", help="Where the tokenizer is now, if it was moved.")]
MaxFileBytes = Annotated[int | None, typer.Option(help="Skip larger files (default 4 MiB; PDF: 16 times that).")]


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Register a command whose mistakes the user can mend: a sentence and an exit code instead of a traceback."""

    @functools.wraps(function)
    def mended(**options: Any) -> None:
        with mendable():
            function(**options)

    return app.command(name=function.__name__.removesuffix("_"))(mended)


@command
def build(
    *, name: Name, paths: Paths, tokenizer: Tokenizer, max_file_bytes: MaxFileBytes = None, as_json: JsonAlone = False
) -> None:
    """Build a corpus of files and folders; one of that name is replaced once the new one is whole."""
    from longgraft.corpora_show import building
    from longgraft.index.corpus_build import build_corpus
    from longgraft.index.corpus_files import MAX_FILE_BYTES, roots_of

    roots_of(paths)
    limit = MAX_FILE_BYTES if max_file_bytes is None else max_file_bytes
    source = _lasting(tokenizer)
    loaded = load_tokenizer(source)
    with building() as progress:
        change = build_corpus(name, paths, loaded, tokenizer_name=source, max_file_bytes=limit, progress=progress)
    _tell(name, change, as_json)


@command
def update(*, name: Name, tokenizer: Again = None, as_json: JsonAlone = False) -> None:
    """Bring a corpus up to date with its files; only what is new is tokenised."""
    from longgraft.corpora_show import building
    from longgraft.index.corpus_build import refresh_corpus

    loaded = _tokenizer_of(name, tokenizer)
    with building() as progress:
        change = refresh_corpus(name, loaded, progress=progress)
    _tell(name, change, as_json)


@command
def watch(*, name: Name, tokenizer: Again = None) -> None:
    """Keep a corpus up to date while its files change, until Ctrl-C."""
    from longgraft.index.corpus_watch import watch_corpus

    def report(outcome: Change | GraftError) -> None:
        if isinstance(outcome, GraftError):
            typer.echo(f"longgraft: {' '.join(str(outcome).split())}", err=True)
        elif outcome.is_new:
            _tell(name, outcome, as_json=False)

    loaded = _tokenizer_of(name, tokenizer)
    typer.echo(f"watching the files of {name}; Ctrl-C ends it", err=True)
    watch_corpus(name, loaded, report)


@command
def stats(
    *,
    name: Name,
    check: Annotated[bool, typer.Option("--check", help="Read everything and compare all checksums.")] = False,
    as_json: JsonAlone = False,
) -> None:
    """Show what a corpus holds."""
    from longgraft.corpora_show import print_json, print_stats, summary
    from longgraft.index.corpus import open_corpus

    with open_corpus(name) as corpus:
        wrong = corpus.check_integrity() if check else ""
        if wrong:
            raise GraftError(wrong)
        values = summary(name, corpus)
    print_json(values) if as_json else print_stats(values)


@command
def search(
    *,
    name: Name,
    text: Annotated[str | None, typer.Option("--text", help="Text to look for.")] = None,
    tokens: Annotated[str | None, typer.Option("--tokens", help='Token ids to look for: "1, 2, 3".')] = None,
    limit: Annotated[int, typer.Option(help="Most places to show.")] = 8,
    tokenizer: Again = None,
    as_json: JsonAlone = False,
) -> None:
    """Show where the end of a text, as much of it as occurs (at most 32 tokens), occurs."""
    from longgraft.corpora_show import found, print_found, print_json
    from longgraft.index.corpus import open_corpus
    from longgraft.index.corpus_tokens import tokenizer_hash

    if (text is None) == (tokens is None):
        raise GraftError("search needs one of --text and --tokens")
    if limit < 1:
        raise GraftError(f"--limit is {limit}: expected 1 or more")
    with open_corpus(name) as corpus:
        if tokens is not None:
            token_ids, loaded = _parsed(tokens), _tokenizer_or_none(corpus, tokenizer)
        else:
            loaded = load_tokenizer(tokenizer or corpus.manifest.tokenizer_name)
            token_ids = loaded(text, add_special_tokens=False)["input_ids"]
            open_corpus(name, tokenizer_hash(loaded)).close()
        values = found(corpus, token_ids, limit, loaded)
    print_json(values) if as_json else print_found(values)


@command
def list_(*, as_json: JsonAlone = False) -> None:
    """List the corpora that have a name."""
    from longgraft.corpora_show import print_json, print_list, summary
    from longgraft.index.corpus import open_corpus
    from longgraft.index.corpus_home import names

    rows: list[dict[str, Any]] = []
    for name in names():
        try:
            with open_corpus(name) as corpus:
                rows.append(summary(name, corpus))
        except GraftError as error:
            rows.append({"name": name, "error": str(error)})
    print_json({"corpora": rows}) if as_json else print_list(rows)


@command
def rm(*, name: Name) -> None:
    """Remove a corpus. The files it was built from are not touched."""
    from longgraft.index.corpus_home import remove

    remove(name)
    typer.echo(f"removed {name}", err=True)


def load_tokenizer(source: str) -> Any:
    """Return the tokenizer of a hub id, a folder, `FILE.gguf` or `hub/id:FILE.gguf`."""
    quieten()
    from transformers import AutoTokenizer

    options: dict[str, str] = {}
    place = str(Path(source).expanduser()) if source.startswith("~") else source
    if place.endswith(".gguf"):
        is_local = Path(place).is_file()
        place, _, file = place.rpartition(os.sep if is_local else ":")
        options = {"gguf_file": file}
    try:
        return AutoTokenizer.from_pretrained(place or ".", **options)
    except Exception as error:
        # What transformers raises for a bad name or folder is of a dozen types.
        reason = " ".join(str(error).split())[:300]
        raise GraftError(f"tokenizer {source!r} could not be loaded: {reason}") from error


def _lasting(tokenizer: str) -> str:
    """Return a tokenizer's name so that it means the same from every folder."""
    path = Path(tokenizer).expanduser()
    return str(path.absolute()) if path.exists() else tokenizer


def _tokenizer_of(name: str, moved: str | None) -> Any:
    from longgraft.index.corpus import open_corpus

    with open_corpus(name) as corpus:
        return load_tokenizer(moved or corpus.manifest.tokenizer_name)


def _tokenizer_or_none(corpus: Corpus, moved: str | None) -> Any:
    """Return the tokenizer for showing text, or None, having said so, where it is gone: ids are shown then."""
    try:
        return load_tokenizer(moved or corpus.manifest.tokenizer_name)
    except GraftError as error:
        typer.echo(f"token ids only: {error}", err=True)
        return None


def _parsed(tokens: str) -> list[int]:
    try:
        return [int(part) for part in tokens.replace(",", " ").split()]
    except ValueError:
        raise GraftError(f"--tokens is {tokens!r}: expected whole numbers, as in --tokens '1, 2, 3'") from None


def _tell(name: str, change: Change, as_json: bool) -> None:
    """Say what a build or update did."""
    from longgraft.corpora_show import change_line, change_values, print_json

    if as_json:
        print_json(change_values(name, change))
    else:
        typer.echo(change_line(name, change))
