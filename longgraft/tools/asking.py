"""Questions about documents: one prompt each, of which all but the question is read once.

Knows engine, documents and quotations; no options. The one idea: documents come first and the question last, so the
engine's prefix cache serves every further question, and a saved prefix a later process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import numpy as np

from longgraft.config import GraftError, Output, SamplingParams
from longgraft.engine import Engine
from longgraft.prefix_file import PrefixFile
from longgraft.render import reading_progress, report
from longgraft.show import LONG_PROMPT, CtrlC, Interruption, fill
from longgraft.tools.documents import Document, fitting
from longgraft.tools.frame import Frame, frame_of, text_ids
from longgraft.tools.marked_screen import MarkedScreen, Marks
from longgraft.tools.quotes import Quotable, Quote

TASK = (
    "Answer the question at the end from the documents that follow. Quote them word for word where that helps, and "
    "say so if they do not hold the answer.\n\n"
)
# Tokens kept free for questions that are not known yet, and where documents are cut: so they are cut alike for all.
QUESTION_ROOM = 256


@dataclass(frozen=True, slots=True)
class Desk:
    """Documents laid out before a model: `front` are the tokens before every question."""

    engine: Engine
    frame: Frame
    front: tuple[int, ...]
    source: Quotable
    params: SamplingParams

    def prompt_ids(self, question: str) -> list[int]:
        """Return the prompt of a question."""
        return [*self.front, *_question_ids(self.engine, question), *self.frame.tail]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one question."""

    question: str
    output: Output
    quotes: tuple[Quote, ...]

    def values(self) -> dict[str, Any]:
        """Return it JSON-ready."""
        return {"question": self.question, **report(self.output), "quotes": [asdict(one) for one in self.quotes]}


def _question_ids(engine: Engine, question: str) -> list[int]:
    return text_ids(engine.tokenizer, f"---\n\nQuestion: {question}")


def lay_out(
    engine: Engine, documents: Sequence[Document], questions: Sequence[str], params: SamplingParams, fit: bool
) -> Desk:
    """Return the documents ready for these questions, or for any if there are none.

    What the model has no room for is a `GraftError`, or, with `fit`, left out from the end, which is said on stderr.
    """
    frame = frame_of(engine.tokenizer)
    task = text_ids(engine.tokenizer, TASK)
    asked = max((len(_question_ids(engine, one)) for one in questions), default=QUESTION_ROOM)
    room = engine.max_context - params.max_new_tokens - len(frame.head) - len(task) - len(frame.tail)
    texts = [text_ids(engine.tokenizer, one.text) for one in documents]
    if sum(map(len, texts)) > room - asked:
        documents, said = _cut(engine, documents, room - max(asked, QUESTION_ROOM), params.max_new_tokens)
        if not documents or not fit:
            raise GraftError(f"{said}; ask about less, or add --fit to read as much as fits" if documents else said)
        print(f"longgraft: {said}; the rest is left out", file=sys.stderr)
        texts = [text_ids(engine.tokenizer, one.text) for one in documents]
    front = (*frame.head, *task, *(token for text in texts for token in text))
    return Desk(engine, frame, front, Quotable(documents), params)


def _cut(engine: Engine, documents: Sequence[Document], room: int, new: int) -> tuple[list[Document], str]:
    """Return what fits of the documents, and a sentence on it."""

    def count(text: str) -> int:
        return len(text_ids(engine.tokenizer, text))

    kept, words = fitting(documents, room, count)
    return kept, (
        f"the documents have {sum(count(one.text) for one in documents)} tokens, room is for {max(0, room)} (the "
        f"context of {engine.max_context} less a question and {new} new tokens): that holds {words}"
    )


def read(desk: Desk, save: str | None = None) -> int:
    """Read the documents before any question, and write what was read to the file `save`; return the saved rows."""
    engine = desk.engine
    params = SamplingParams(max_new_tokens=desk.params.max_new_tokens + QUESTION_ROOM)
    # A prompt's last token is never read, so one more stands behind them.
    seq = engine.open([*desk.front, desk.front[-1]], params, policy="plain")
    is_long = seq.prompt_len >= LONG_PROMPT and sys.stderr.isatty()
    try:
        with CtrlC() as ctrl_c, reading_progress(sys.stderr, is_long) as progress, engine.target.session():

            def watch(done: int, total: int, seconds: float) -> None:
                progress(done, total, seconds)
                ctrl_c.check()

            engine.prefill(seq, watch)
        return engine.prefixes.save(save, seq) if save is not None else 0
    except Interruption:
        raise KeyboardInterrupt from None
    finally:
        seq.cache.release()


def bring_back(desk: Desk, path: str) -> int:
    """Load what `read` saved; a `GraftError` if it is of other documents."""
    tokens = np.concatenate([np.zeros(0, np.int32), *PrefixFile(path).tokens()])
    if tokens.tolist() != list(desk.front[: len(tokens)]):
        raise GraftError(
            f"prefix file {path} was saved for other documents, for others before them or with another model: give the "
            "same files in the same order, or save it again with --save-prefix"
        )
    return desk.engine.load_prefix(path)


def answer(desk: Desk, question: str, out: TextIO, marks: Marks) -> Answer:
    """Answer a question, writing to `out` as text comes; after Ctrl-C what exists."""
    engine, prompt_ids = desk.engine, desk.prompt_ids(question)
    if len(prompt_ids) >= engine.max_context:
        raise GraftError(
            f"with this question the prompt has {len(prompt_ids)} tokens, the model takes {engine.max_context}: ask "
            "more briefly"
        )
    seq = engine.open(prompt_ids, desk.params)
    screen = MarkedScreen(out, engine.tokenizer, prompt_ids, seq.sampler.params.stop, source=desk.source, marks=marks)
    fill(engine, seq, screen)
    return Answer(question, engine.output(seq), tuple(screen.quotes))


def typed_questions() -> Iterator[str]:
    """Yield what is typed, line by line, until Ctrl-D; blank lines ask nothing."""
    with suppress(ImportError):
        __import__("readline")  # lets input() edit a line
    is_seen = sys.stdin.isatty() and sys.stdout.isatty()
    while True:
        try:
            line = input("\nquestion (Ctrl-D ends): " if is_seen else "")
        except EOFError:
            if is_seen:
                print()
            return
        except UnicodeDecodeError as error:
            raise GraftError(f"stdin: not UTF-8 text (byte {error.start}); convert it first") from error
        if line.strip():
            yield line.strip()
