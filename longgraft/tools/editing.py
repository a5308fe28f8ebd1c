"""Rewrites a file by instruction: the whole file as a prompt, the whole file as an answer, and a diff of the two.

Knows engine, files and fences; no options. The answer is begun for the model with a code block's first line, so that
the file comes first and nothing before it; and it ends where the block closes behind the file's own last lines, so that
nobody waits for remarks. The original is the prediction: most of the answer is verified many tokens at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

from longgraft.config import GraftError, Output, SamplingParams
from longgraft.engine import Engine
from longgraft.references import References
from longgraft.render import report
from longgraft.show import Interruption, fill
from longgraft.stream import TextStream
from longgraft.tools.fences import Unusable, fence_for, file_in, is_done
from longgraft.tools.frame import frame_of, text_ids
from longgraft.tools.lines import unified_diff
from longgraft.tools.source_file import SourceFile

LANGUAGES = {
    ".py": "python", ".js": "javascript", ".ts": "typescript", ".rs": "rust", ".md": "markdown", ".rb": "ruby",
    ".sh": "bash", ".yml": "yaml", ".h": "c", ".cc": "cpp", ".hpp": "cpp", ".kt": "kotlin", ".cs": "csharp",
}  # fmt: skip
# Room for what an edit adds: this part of the file, and so many tokens.
GROWTH, LEAST_GROWTH = 4, 256
CUT = {
    "length": "the answer was cut after {} new tokens: raise --max-new-tokens",
    "context": "the answer was cut after {} new tokens, where the model's context ends: the file is too long for it",
    "cancelled": "it was interrupted after {} new tokens",
}


@dataclass(frozen=True, slots=True)
class Edit:
    """What came of an instruction: the new text as it would be written, or why there is none (`reason`)."""

    source: SourceFile
    output: Output
    raw: str | None
    reason: str = ""

    @property
    def diff(self) -> str:
        """The change as a unified diff; "" if there is none."""
        return unified_diff(self.source.name, self.source.raw, self.source.raw if self.raw is None else self.raw)

    def values(self) -> dict[str, Any]:
        """Return it JSON-ready."""
        said = {"file": self.source.name, "diff": self.diff, "reason": self.reason}
        return {**said, **report(self.output)}


class _Watcher:
    """A screen that counts the tokens of the new file and ends the answer at the one that makes it whole.

    Token by token, whatever a round committed: where an answer ends must not depend on how it was decoded.
    """

    def __init__(self, stream: TextStream, begun: str, original: str, about: int) -> None:
        self._stream, self.text, self._original = stream, begun, original
        self._about, self.count, self._is_shown = about, 0, sys.stderr.isatty()
        self.is_done = False

    def push(self, token_ids: Seq[int], sources: Seq[int]) -> None:
        for token_id in token_ids:
            begin = max(0, len(self.text) - 8)  # a fence may have begun
            self.text += self._stream.push([token_id])
            self.count += 1
            if "`" in self.text[begin:] and is_done(self.text, self._original):
                self.is_done = True
                raise Interruption
        if self._is_shown:
            print(f"\rwriting: {self.count} of about {self._about} tokens", end="", file=sys.stderr, flush=True)

    def finish(self) -> None:
        if self._is_shown and self.count:
            print(file=sys.stderr)


def rewrite(
    engine: Engine, source: SourceFile, instruction: str, params: SamplingParams, max_new_tokens: int | None = None
) -> Edit:
    """Let the model rewrite a file; nothing is written. `max_new_tokens` None: as many as an edit may need."""
    fence = fence_for(source.text)
    begun = f"{fence}{LANGUAGES.get(source.path.suffix, source.path.suffix.lstrip('.'))}\n"
    tokens = text_ids(engine.tokenizer, source.text)
    size = len(tokens)
    prompt_ids = _prompt_ids(engine, source, instruction, (begun, fence))
    if max_new_tokens is None:
        max_new_tokens = size + max(LEAST_GROWTH, size // GROWTH)
        if engine.max_context - len(prompt_ids) < size + LEAST_GROWTH // 4:
            raise GraftError(
                f"{source.name} has {size} tokens, and whole in prompt and answer it needs about "
                f"{len(prompt_ids) + max_new_tokens}; the model takes {engine.max_context}: edit a shorter file, or "
                "choose a model with a longer context"
            )
    params = replace(params, max_new_tokens=max_new_tokens)
    seq = engine.open(prompt_ids, params, references=References(prediction=tokens))
    watcher = _Watcher(TextStream(engine.tokenizer, prompt_ids), begun, source.text, size)
    fill(engine, seq, watcher)
    output = engine.output(seq)
    if watcher.is_done:
        output = _first(output, watcher.count, watcher.text.removeprefix(begun))
    return judged(source, output, begun)


def _first(output: Output, count: int, text: str) -> Output:
    """Return an output that ends with its first `count` tokens; `stats` stay those of all that was computed."""
    parts = {name: getattr(output, name)[:count] for name in ("token_ids", "sources", "origins", "logprobs", "lines")}
    return replace(output, text=text, finish_reason="stop", **parts)


def _prompt_ids(engine: Engine, source: SourceFile, instruction: str, block: tuple[str, str]) -> list[int]:
    """Return the request, and the answer's beginning; `block`: the lines before and behind the file in both."""
    frame, (begun, fence) = frame_of(engine.tokenizer), block
    text = source.text if source.text.endswith("\n") else source.text + "\n"
    request = (
        f"This is the file {source.path.name}:\n\n{begun}{text}{fence}\n\n{instruction.strip()}\n\n"
        "Give back the complete file with this change, every line of it, in one code block."
    )
    asked, beginning = text_ids(engine.tokenizer, request), text_ids(engine.tokenizer, begun)
    return [*frame.head, *asked, *frame.tail, *beginning]


def judged(source: SourceFile, output: Output, begun: str) -> Edit:
    """Return the edit that an output is, as far as it can be trusted; `begun` is what was written before it."""
    if output.finish_reason not in ("eos", "stop"):
        reason = CUT.get(output.finish_reason, f"the answer ended early ({output.finish_reason})")
        return Edit(source, output, None, reason.format(len(output.token_ids)))
    try:
        text = file_in(begun + output.text, source.text)
    except Unusable as reason:
        return Edit(source, output, None, str(reason))
    return Edit(source, output, source.restored(text))
