"""Completes code at a cursor: the text round it, related files of its repository, and all others to copy from.

Knows engine, fill-in-the-middle prompts and corpora; no options. What the model sees is bounded (a budget of tokens);
what it may copy from is not: the whole repository lies in a corpus on disk, built once and brought up to date at every
start.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longgraft.config import GraftError, SamplingParams
from longgraft.engine import Engine
from longgraft.fim import Surroundings, fim_prompt, fim_tokens, plain_prompt
from longgraft.references import References
from longgraft.tools.frame import beginning, text_ids
from longgraft.tools.lines import lines_of
from longgraft.tools.related import chosen, ranked, repository_files

# Of the tokens of the file itself, the part before the cursor: what follows tells less.
BEFORE_SHARE = 0.75
# A line of the suffix ends an answer of a model that cannot see it, if it says at least so much.
TELLING = 8
NO_FIM = (
    "this model has no tokens for filling in the middle: it goes on from what stands before the cursor and does not "
    "see what stands behind it"
)


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in a file of a repository: `path` relative to `root`, and the text on both sides."""

    root: Path
    path: str
    before: str
    behind: str


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens of the file itself round the cursor, and of related files."""

    file: int = 4096
    related: int = 2048


@dataclass(frozen=True, slots=True)
class Request:
    """A completion ready to run. `related`: paths of the files that the model sees. `note`: what should be known."""

    prompt_ids: list[int]
    params: SamplingParams
    related: tuple[str, ...]
    note: str = ""


def cursor_at(root: Path, file: str, line: int, column: int | None, text: str | None = None) -> Cursor:
    """Return the cursor before character `column` of `line` (both from 1 on; None: behind the line's last).

    `file`: as seen from here, or from `root`. `text`: what the file holds now (default: what is on disk).
    """
    root = folder_of(root)
    try:
        path = next((one for one in (Path(file), root / file) if one.exists()), root / file).resolve()
    except (OSError, ValueError) as error:  # a name that is too long, or no name at all
        raise GraftError(f"{file[:80]!r} cannot be a file of the repository {root}: {error}") from None
    if not path.is_relative_to(root):
        raise GraftError(f"{file} is not in the repository {root}: name a file in it")
    if text is None:
        from longgraft.prompts import read_file

        text = read_file(str(path))
    text = text.replace("\r\n", "\n")
    lines = lines_of(text)
    if not text or text.endswith("\n"):
        lines.append("")
    if not 1 <= line <= len(lines):
        raise GraftError(f"--line is {line}: {file} has the lines 1 to {len(lines)}")
    length = len(lines[line - 1].rstrip("\n"))
    if column is not None and not 1 <= column <= length + 1:
        raise GraftError(f"--column is {column}: line {line} of {file} has the columns 1 to {length + 1}")
    at = sum(map(len, lines[: line - 1])) + (length if column is None else column - 1)
    return Cursor(root, path.relative_to(root).as_posix(), text[:at], text[at:])


def folder_of(root: Path) -> Path:
    """Return a repository's folder as an absolute path."""
    if not root.is_dir():
        raise GraftError(f"{root} is no folder: expected the repository's")
    return root.resolve()


def request_for(engine: Engine, cursor: Cursor, params: SamplingParams, budget: Budget) -> Request:
    """Return the prompt and where to stop. `params.stop` is kept; ends of the model's own are added to its EOS."""
    tokenizer = engine.tokenizer

    def encode(text: str) -> list[int]:
        return text_ids(tokenizer, text)

    tokens = fim_tokens(tokenizer)
    room = engine.max_context - params.max_new_tokens - 64  # the signs between the parts
    if room < 1:
        raise GraftError(
            f"{params.max_new_tokens} new tokens leave no room for code: the model takes {engine.max_context}"
        )
    before, behind = _sides(encode(cursor.before), encode(cursor.behind) if tokens else [], min(budget.file, room))
    related = min(budget.related, room - len(before) - len(behind))
    files = ranked(cursor.path, cursor.before + cursor.behind, repository_files(cursor.root, cache_folder()))
    others = chosen(cursor.root, files, related, lambda text: len(encode(text)))
    around = Surroundings(cursor.root.name, others, cursor.path, before, behind)
    begin, paths = beginning(tokenizer), tuple(path for path, _ in others)
    if tokens is None:
        prompt_ids = plain_prompt(begin, around, encode)
        params = replace(params, stop=(*params.stop, *_behind(cursor.behind)))
        note = NO_FIM
    else:
        prompt_ids, note = fim_prompt(tokens, begin, around, encode), ""
        params = replace(params, eos_token_ids=_ends(engine, tokens.ends))
    if not prompt_ids:
        raise GraftError(
            f"there is nothing before the cursor in {cursor.path}, and the model has no token to begin with"
        )
    return Request(prompt_ids, params, paths, note)


def _sides(before: Sequence[int], behind: Sequence[int], most: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return the tokens nearest to the cursor, `most` in all; what one side does not need the other gets."""
    num_before = max(int(most * BEFORE_SHARE), most - len(behind))
    before = before[max(0, len(before) - num_before) :]
    return before, behind[: most - len(before)]


def _behind(text: str) -> tuple[str, ...]:
    """Return the stop string by which an answer ends where the suffix would begin: its first line that says much."""
    line = next((line.rstrip() for line in text.split("\n")[1:] if line.strip()), "")
    return (f"\n{line}",) if len(line.strip()) >= TELLING else ()


def _ends(engine: Engine, ends: Sequence[int]) -> tuple[int, ...]:
    own = getattr(engine.target.model.generation_config, "eos_token_id", None)
    known = [own] if isinstance(own, int) else list(own or ())
    return tuple(dict.fromkeys([*known, *ends]))


def cache_folder() -> Path:
    """Return the folder of the repositories' corpora."""
    from longgraft.demo import cache_folder as everything

    return everything() / "repositories"


def repository_corpus(root: Path, tokenizer: Any, tokenizer_name: str) -> Path | None:
    """Return the corpus of a repository, built now or brought up to date; None, having said why, if there is none."""
    from longgraft.corpora_show import building
    from longgraft.index.corpus_build import build_corpus, refresh_corpus
    from longgraft.index.corpus_home import MANIFEST
    from longgraft.index.corpus_tokens import tokenizer_hash

    name = hashlib.sha256(f"{root}\0{tokenizer_hash(tokenizer)}".encode()).hexdigest()[:16]
    folder = cache_folder() / name
    try:
        with building() as progress:
            if (folder / MANIFEST).is_file():
                refresh_corpus(folder, tokenizer, progress=progress)
            else:
                build_corpus(folder, [root], tokenizer, tokenizer_name=tokenizer_name, progress=progress)
    except GraftError as error:
        print(f"longgraft: the repository's corpus is as it was: {error}", file=sys.stderr)
    return folder if (folder / MANIFEST).is_file() else None


def references_for(corpus: Path | None) -> References:
    """Return what else a completion may copy from."""
    return References(corpora=[corpus] if corpus else [])
