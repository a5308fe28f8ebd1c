"""How OpenAI writes answers down: bodies and chunks of chats and completions.

Knows followers and their outputs; no endpoint. A stream has one chunk a round, one with the finish reason and, if asked
for, one with the usage.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from longgraft import __version__
from longgraft.config import Output
from longgraft.render import spans
from longgraft.server import tally
from longgraft.server.desk import Desk
from longgraft.server.events import DONE
from longgraft.server.fields import Sampled
from longgraft.server.follow import Follower, Piece
from longgraft.server.reading import AnswerReader
from longgraft.server.scores import TokenTexts, chat_logprobs, completion_logprobs, echo_logprobs, joined

FINGERPRINT = f"longgraft-{__version__}"
# What ended an answer, in OpenAI's words; ours are among our own fields.
REASONS = {"eos": "stop", "stop": "stop"}


def reason(output: Output, num_calls: int = 0) -> str:
    """Return OpenAI's word for why an answer ended; one that was cut is so whatever calls it holds."""
    found = REASONS.get(output.finish_reason, "length")
    return "tool_calls" if num_calls and found == "stop" else found


@dataclass
class OpenAIForm:
    """What chats and completions share. `choices`: answers for each prompt."""

    desk: Desk
    body: Sampled
    model: str
    choices: int
    prefix: str
    kind: str
    chunk_kind: str
    created: int = field(default_factory=lambda: int(time.time()))
    ends: bytes = DONE

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.texts = TokenTexts(self.desk.engine.tokenizer)

    def closing(self, followers: Seq[Follower]) -> list[dict[str, Any]]:
        """Return the chunk with the usage, if it was asked for."""
        if not self.body.wants_usage:
            return []
        return [self._chunk([]) | {"usage": tally.usage(followers, self.choices)} | self._root(followers)]

    def whole(self, followers: Seq[Follower], logprobs: Seq[Seq[Any]]) -> dict[str, Any]:
        """Return all answers as one body."""
        choices = []
        for number, (follower, scores) in enumerate(zip(followers, logprobs)):
            assert follower.output is not None
            choice = {"index": number, "finish_reason": reason(follower.output), **self.answer(follower, scores)}
            choices.append(choice | self._ours(follower))
        usage = {"usage": tally.usage(followers, self.choices)}
        return self._envelope(self.kind) | {"choices": choices} | usage | self._root(followers)

    def answer(self, follower: Follower, logprobs: Seq[Any]) -> dict[str, Any]:
        """Return what one choice holds besides its number, and the reason if it is another than the engine's."""
        raise NotImplementedError

    def _envelope(self, kind: str) -> dict[str, Any]:
        about = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return about | {"system_fingerprint": FINGERPRINT}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._envelope(self.chunk_kind) | {"choices": choices}
        return chunk | {"usage": None} if self.body.wants_usage else chunk

    def _ours(self, follower: Follower) -> dict[str, Any]:
        """Return our own fields of one choice."""
        output, extras = follower.output, self.body.extras
        assert output is not None
        values = tally.ours(output) if extras.metrics != "none" else {}
        if extras.spans:
            values["spans"] = [span | {"file": self._title(span["file"])} for span in spans(output)]
        return {"longgraft": values} if values else {}

    def _title(self, file: str | None) -> str | None:
        return self.desk.shelf.title(file) if file else file

    def _root(self, followers: Seq[Follower]) -> dict[str, Any]:
        """Return vLLM's statistics of a request with one answer."""
        how = self.body.extras.metrics
        if how == "none" or len(followers) != 1:
            return {}
        return {"metrics": tally.metrics(followers[0], self.desk.engine.config.max_nodes, how == "detailed")}


@dataclass
class ChatForm(OpenAIForm):
    """Answers of `/v1/chat/completions`."""

    prefix: str = "chatcmpl"
    kind: str = "chat.completion"
    chunk_kind: str = "chat.completion.chunk"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._readers: dict[int, AnswerReader] = {}

    def piece(self, number: int, piece: Piece, follower: Follower) -> list[dict[str, Any]]:
        """Return the chunks of one round, or of the end."""
        chunks = []
        if number not in self._readers:
            self._readers[number] = AnswerReader(follower.job.structure)
            chunks.append(self._delta(number, {"role": "assistant", "content": ""}))
        reader, is_end = self._readers[number], piece.output is not None
        deltas = reader.push(piece.text, is_end)
        if not is_end and not deltas:
            deltas = [{"content": ""}]  # a round that is not known to be text yet
        scores = chat_logprobs(self.texts, piece.logprobs) if piece.logprobs else None
        chunks += [self._delta(number, delta, None if at else scores) for at, delta in enumerate(deltas)]
        if piece.output is not None:
            last = self._delta(number, {})
            last["choices"][0] |= {"finish_reason": reason(piece.output, reader.num_calls), **self._ours(follower)}
            chunks.append(last)
        return chunks

    def answer(self, follower: Follower, logprobs: Seq[Any]) -> dict[str, Any]:
        """Return the message."""
        assert follower.output is not None
        message = AnswerReader(follower.job.structure).whole(follower.text)
        scores = chat_logprobs(self.texts, logprobs) if follower.job.params.logprobs is not None else None
        ended = reason(follower.output, len(message.get("tool_calls", ())))
        return {"message": message, "logprobs": scores, "finish_reason": ended}

    def _delta(self, number: int, delta: dict[str, Any], logprobs: Any = None) -> dict[str, Any]:
        return self._chunk([{"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": None}])


@dataclass
class CompletionForm(OpenAIForm):
    """Answers of `/v1/completions`."""

    prefix: str = "cmpl"
    kind: str = "text_completion"
    chunk_kind: str = "text_completion"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._given: dict[int, int] = {}

    def piece(self, number: int, piece: Piece, follower: Follower) -> list[dict[str, Any]]:
        """Return the chunks of one round, or of the end; the first begins with what is echoed."""
        chunks, given = [], self._given.get(number)
        if given is None:
            given = len(follower.job.prompt_text)
            if follower.job.prompt_text:
                chunks.append(self._text(number, follower.job.prompt_text, self._echo_scores(follower)))
        if piece.output is None or piece.text:
            scores = completion_logprobs(self.texts, piece.logprobs, given) if piece.logprobs else None
            chunks.append(self._text(number, piece.text, scores))
        self._given[number] = given + len(piece.text)
        if piece.output is not None:
            last = self._text(number, "")
            last["choices"][0] |= {"finish_reason": reason(piece.output), **self._ours(follower)}
            chunks.append(last)
        return chunks

    def answer(self, follower: Follower, logprobs: Seq[Any]) -> dict[str, Any]:
        """Return the text."""
        before, wanted = follower.job.prompt_text, follower.job.params.logprobs is not None
        scores = completion_logprobs(self.texts, logprobs, len(before)) if wanted else None
        if scores is not None and (echoed := self._echo_scores(follower)) is not None:
            scores = joined(echoed, scores)
        return {"text": before + follower.text, "logprobs": scores}

    def _echo_scores(self, follower: Follower) -> dict[str, Any] | None:
        if follower.job.params.prompt_logprobs is None:
            return None
        return echo_logprobs(
            self.texts, follower.job.prompt_ids, follower.prompt_logprobs, len(follower.job.prompt_text)
        )

    def _text(self, number: int, text: str, logprobs: Any = None) -> dict[str, Any]:
        return self._chunk([{"index": number, "text": text, "logprobs": logprobs, "finish_reason": None}])
