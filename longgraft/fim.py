"""Prompts for filling in the middle: which special tokens a model has for it, and what goes where.

Knows a tokenizer's vocabulary; no files, no engine, no protocol. A model is known by its tokens, not by its name.
Formats are those of the models' own papers and cards: prefix, suffix, middle in this order, but for Mistral's, which
has the suffix first and no middle; files of a repository before that, each behind a separator and its path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# Prefix, suffix, middle: Qwen-Coder and CodeGemma; StarCoder and Granite; SantaCoder; DeepSeek-Coder; Code Llama.
PREFIX_FIRST = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
SUFFIX_FIRST = ("[PREFIX]", "[SUFFIX]")  # Codestral
REPOSITORY = ("<|repo_name|>", "<repo_name>", "<reponame>")
SEPARATOR = ("<|file_sep|>", "<file_sep>", "<|file_separator|>", "<filename>")
# What such models write behind the middle, besides their EOS.
ENDS = (
    "<|endoftext|>", "<|end_of_text|>", "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|file_separator|>", "<EOT>",
    "▁<EOT>",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001
)  # fmt: skip
HASH_COMMENTS = frozenset(
    {".py", ".pyi", ".rb", ".sh", ".bash", ".toml", ".yaml", ".yml", ".pl", ".r", ".jl", ".cmake"}
)

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class FimTokens:
    """A model's token ids for filling in. `middle` None: the suffix comes first. `ends`: all that end an answer."""

    prefix: int
    suffix: int
    middle: int | None
    repository: int | None
    separator: int | None
    ends: tuple[int, ...]


def fim_tokens(tokenizer: Any) -> FimTokens | None:
    """Return the tokens for filling in; None if the tokenizer has none."""
    for family in (*PREFIX_FIRST, SUFFIX_FIRST):
        ids = [token_id for name in family if (token_id := _known(tokenizer, name)) is not None]
        if len(ids) == len(family):
            break
    else:
        return None
    prefix, suffix, *middle = ids
    repository, separator = (next(iter(_all_known(tokenizer, kind)), None) for kind in (REPOSITORY, SEPARATOR))
    ends = [*ids, *_all_known(tokenizer, ENDS), *(one for one in (repository, separator) if one is not None)]
    return FimTokens(prefix, suffix, middle[0] if middle else None, repository, separator, tuple(dict.fromkeys(ends)))


def _all_known(tokenizer: Any, names: Sequence[str]) -> list[int]:
    return [token_id for name in names if (token_id := _known(tokenizer, name)) is not None]


def _known(tokenizer: Any, name: str) -> int | None:
    """Return the id of a token; asked one by one, as listing a whole vocabulary takes a tenth of a second."""
    found = tokenizer.convert_tokens_to_ids(name)
    return None if found is None or found == getattr(tokenizer, "unk_token_id", None) else found


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a completion is to fit: the repository's name, other files (path, text), the file, and both sides of the
    cursor as token ids. Without a path and other files nothing is said of a repository.
    """

    repository: str
    others: Sequence[tuple[str, str]]
    path: str
    before: Sequence[int]
    behind: Sequence[int]


def fim_prompt(tokens: FimTokens, begin: Sequence[int], around: Surroundings, encode: Encode) -> list[int]:
    """Return the prompt for filling in at the cursor; `begin`: the tokens every text begins with."""
    if tokens.separator is None:
        files = _remarked(around.others, encode)
        head = [*begin, *files]
    else:
        head = list(begin)
        is_placed = tokens.repository is not None and bool(around.path)
        if tokens.repository is not None and (is_placed or around.others):
            head += [tokens.repository, *encode(f"{around.repository}\n")]
        for path, text in around.others:
            head += [tokens.separator, *encode(f"{path}\n{_ended(text)}")]
        if is_placed or around.others:
            head += [tokens.separator, *encode(f"{around.path}\n")]
    if tokens.middle is None:
        return [*head, tokens.suffix, *around.behind, tokens.prefix, *around.before]
    return [*head, tokens.prefix, *around.before, tokens.suffix, *around.behind, tokens.middle]


def plain_prompt(begin: Sequence[int], around: Surroundings, encode: Encode) -> list[int]:
    """Return a prompt that goes on from left to right: other files under their paths, then all before the cursor."""
    header = encode(_remark(around.path)) if around.others else []
    return [*begin, *_remarked(around.others, encode), *header, *around.before]


def _remarked(others: Sequence[tuple[str, str]], encode: Encode) -> list[int]:
    return [token for path, text in others for token in encode(f"{_remark(path)}{_ended(text)}\n")]


def _remark(path: str) -> str:
    suffix = path[path.rfind(".") :] if "." in path else ""
    return f"{'#' if suffix in HASH_COMMENTS else '//'} {path}\n"


def _ended(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"
