"""Runs one generation in front of somebody: text on stdout as it becomes final, progress on stderr, Ctrl-C heeded.

Knows the engine and `render`'s screen; nothing of options.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator
from collections.abc import Sequence as Seq
from contextlib import closing
from typing import Protocol, TextIO, cast

from longgraft.config import Output, SamplingParams
from longgraft.engine import Engine
from longgraft.references import References
from longgraft.render import Screen, citations, colours, legend, no_paint, paint_for, reading_progress, summary_line
from longgraft.sequence import Sequence

Rounds = Generator[list[list[int]], None, None]
# Prompts shorter than this are read before a progress bar is worth drawing.
LONG_PROMPT = 1024


class Shows(Protocol):
    """What is shown of a generation while it runs; `render.Screen` is the usual one."""

    def push(self, token_ids: Seq[int], sources: Seq[int]) -> None:
        """Take newly committed tokens and their sources."""

    def finish(self) -> None:
        """No more tokens come."""


class Interruption(Exception):
    """Ends reading a prompt early; raised by `CtrlC.check`."""


class CtrlC:
    """The first Ctrl-C asks for an end between two rounds, so that everything stays whole; the second is at once."""

    def __init__(self) -> None:
        self.is_pressed = False

    def __enter__(self) -> CtrlC:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: object) -> None:
        if self.is_pressed:
            raise KeyboardInterrupt
        self.is_pressed = True

    def check(self) -> None:
        """Raise `Interruption` if Ctrl-C was pressed."""
        if self.is_pressed:
            raise Interruption


def show(
    engine: Engine,
    prompt_ids: list[int],
    params: SamplingParams,
    *,
    in_colour: bool,
    sums: bool = True,
    references: References | None = None,
    out: TextIO | None = None,
) -> Output:
    """Generate and write text to `out` (stdout) as it becomes final; return what exists, also after Ctrl-C."""
    seq = engine.open(prompt_ids, params, references=references)
    out = out or sys.stdout
    paint = paint_for(out) if in_colour else no_paint
    screen = Screen(out, engine.tokenizer, prompt_ids, seq.sampler.params.stop, paint)
    fill(engine, seq, screen)
    output = engine.output(seq)
    if in_colour:
        print(legend(output.sources, paint, in_words=paint_for(sys.stderr) is not colours), file=sys.stderr)
        for line in citations(output):
            print(line, file=sys.stderr)
    if sums and sys.stderr.isatty():
        print(summary_line(output), file=sys.stderr)
    return output


def fill(engine: Engine, seq: Sequence, screen: Shows) -> None:
    """Run a sequence to its end or to Ctrl-C, writing to the screen; reading a long prompt shows how far it is."""
    is_long = seq.prompt_len >= LONG_PROMPT and sys.stderr.isatty()
    with CtrlC() as ctrl_c, reading_progress(sys.stderr, is_long) as progress:

        def watch(done: int, total: int, seconds: float) -> None:
            progress(done, total, seconds)
            ctrl_c.check()

        try:
            with closing(cast(Rounds, engine.run([seq], watch))) as rounds:
                for committed in rounds:
                    screen.push(committed[0], seq.sources[-len(committed[0]) :])
                    ctrl_c.check()
        except Interruption:
            pass
        finally:
            screen.finish()
