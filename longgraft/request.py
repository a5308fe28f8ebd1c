"""One request on its way through the scheduler: its sequence, who waits for it, and how it ended.

Knows no model and no other request. The one idea: **a failure belongs to somebody**. Whatever is done for one request
alone is done inside `guarded`, so an error there is that request's end and nobody else's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field

from longgraft.config import GraftError
from longgraft.prefill import ReadingClock
from longgraft.sequence import Sequence
from longgraft.target import Progress

OnTokens = Callable[[Seq[int]], None]


class StageError(GraftError):
    """An error inside a stage: not something that whoever asked can mend."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong for one request, and in which stage."""

    stage: str
    error: Exception

    def sentence(self) -> GraftError:
        """Return the one error that whoever asked is given; one that is clear already stays as it is."""
        if isinstance(self.error, GraftError):
            return self.error
        said = f"{type(self.error).__name__}: {self.error}".removesuffix(": ")
        return StageError(
            f"the request ended in an error of the {self.stage} ({said}); other requests are not affected"
        )


@dataclass(eq=False)
class Request:
    """State of one request. `number`: by order of arrival; a lower one is older.

    `deadline`: when it ends with what it has, on the clock of `time.perf_counter`. `passed`: how often a younger one
    was admitted before it. `behind`: whose reading it waits for, to share the rows. `end_reason`: why it ended where no
    stop rule says it; `ended_at`: when.
    """

    seq: Sequence
    number: int
    progress: Progress | None = None
    on_tokens: OnTokens | None = None
    deadline: float | None = None
    since: float = field(default_factory=time.perf_counter)
    is_reading: bool = False
    clock: ReadingClock | None = None
    passed: int = 0
    behind: Request | None = None
    failure: Failure | None = None
    end_reason: str | None = None
    ended_at: float | None = None

    @property
    def is_over(self) -> bool:
        """True once nothing more will be done for it."""
        return self.failure is not None or self.end_reason is not None or self.seq.is_finished

    @property
    def seconds_left(self) -> float | None:
        """How long reading its prompt is expected to take from now on; None while it does not read."""
        if not self.is_reading or self.clock is None:
            return None
        return self.clock.seconds_left(self.seq.cache.length, time.perf_counter())

    @contextmanager
    def guarded(self, stage: str) -> Iterator[None]:
        """Make an error of the enclosed block this request's end."""
        try:
            yield
        except Exception as error:  # any at all: what stages raise is not ours to list, and others must go on
            self.fail(stage, error)

    def fail(self, stage: str, error: Exception) -> None:
        """End in an error; the first one counts."""
        if self.failure is None:
            self.failure = Failure(stage, error)

    def tell_progress(self) -> None:
        """Tell how far reading is: rows done, rows in all, seconds left."""
        if self.progress is not None and self.clock is not None:
            done, total = self.seq.cache.length - self.clock.first, self.clock.end - self.clock.first
            self.progress(done, total, self.clock.seconds_left(self.seq.cache.length, time.perf_counter()))


def raise_first(requests: Seq[Request]) -> None:
    """Raise the error that ended the first of these requests, if any ended in one."""
    for request in requests:
        if request.failure is not None:
            raise request.failure.error
