"""Prompts for filling in what stands between two texts, by the model's own special tokens.

Knows the vocabularies of such models and a tokenizer; no engine. The one idea: a family of models is recognised by its
tokens, so nothing depends on a model's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longgraft.server.bodies import File
from longgraft.server.errors import ApiError

REPOSITORY = "project"


@dataclass(frozen=True, slots=True)
class Marks:
    """The token strings of one family; `order`: which parts a prompt holds, `ends`: what else ends an answer."""

    prefix: str
    suffix: str
    middle: str
    order: str = "prefix suffix middle"
    repository: str = ""
    file: str = ""
    ends: tuple[str, ...] = ()


FAMILIES = (
    # Qwen2.5-Coder, CodeGemma
    Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", repository="<|repo_name|>", file="<|file_sep|>",
          ends=("<|fim_pad|>", "<|endoftext|>", "<|file_separator|>")),
    # StarCoder 1 and 2, Granite
    Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>", repository="<repo_name>", file="<file_sep>",
          ends=("<fim_pad>", "<|endoftext|>")),
    Marks("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<fim-pad>", "<|endoftext|>")),
    # DeepSeek-Coder: the hole stands where the suffix begins, and the answer follows the end mark
    Marks("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),
    # Code Llama
    Marks("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
    # Codestral, Devstral: the suffix comes first, and no mark stands before the answer
    Marks("[PREFIX]", "[SUFFIX]", "", order="suffix prefix"),
)  # fmt: skip


class Infiller:
    """Makes prompts for one tokenizer; `ends` are token ids that end an answer besides the model's own."""

    def __init__(self, tokenizer: Any) -> None:
        """Raises `ApiError` if the tokenizer has no tokens for filling in."""
        self._tokenizer = tokenizer
        self.marks = next((marks for marks in FAMILIES if self._has(marks)), None)
        if self.marks is None:
            raise ApiError(400, "this model has no tokens for filling in: suffix and /infill need a model that does")
        names = (*self.marks.ends, self.marks.prefix, self.marks.suffix, self.marks.middle)
        names = (*names, self.marks.repository, self.marks.file)
        self.ends = tuple(sorted({i for name in names if name and (i := self._id(name)) is not None}))

    def prompt(self, prefix: str, suffix: str, files: Sequence[File] = ()) -> list[int]:
        """Return token ids that ask for what stands between `prefix` and `suffix`; `files` come before."""
        assert self.marks is not None
        ids = self._beginning() + self._files(files)
        for part in self.marks.order.split():
            ids.append(self._known(getattr(self.marks, part)))
            ids += self._text({"prefix": prefix, "suffix": suffix, "middle": ""}[part])
        return ids

    def _files(self, files: Sequence[File]) -> list[int]:
        """Return other files, under their names where the model has marks for that."""
        assert self.marks is not None
        if not files:
            return []
        file, repository = self._id(self.marks.file), self._id(self.marks.repository)
        if file is None:
            return self._text("".join(f"{one.text}\n" for one in files))
        ids = [repository, *self._text(f"{REPOSITORY}\n")] if repository is not None else []
        for one in files:
            ids += [file, *self._text(f"{one.filename or 'file'}\n{one.text}\n")]
        return [*ids, file, *self._text("current\n")]

    def _has(self, marks: Marks) -> bool:
        names = [marks.prefix, marks.suffix] + [marks.middle] * bool(marks.middle)
        return all(self._id(name) is not None for name in names)

    def _id(self, name: str) -> int | None:
        if not name:
            return None
        found = self._tokenizer.convert_tokens_to_ids(name)
        unknown = getattr(self._tokenizer, "unk_token_id", None)
        return found if isinstance(found, int) and (found != unknown or name == self._tokenizer.unk_token) else None

    def _known(self, name: str) -> int:
        found = self._id(name)
        assert found is not None
        return found

    def _text(self, text: str) -> list[int]:
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        return [int(token_id) for token_id in ids]

    def _beginning(self) -> list[int]:
        """Return what this tokenizer puts before every text: its first token, if that is the one that begins texts."""
        begin = getattr(self._tokenizer, "bos_token_id", None)
        found = self._tokenizer("a")["input_ids"]
        return [begin] if begin is not None and found and found[0] == begin else []
