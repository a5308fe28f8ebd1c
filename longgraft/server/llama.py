"""llama.cpp's `POST /completion` and `POST /infill`, which editors use.

Knows what their clients send and read; answers are `respond`'s. A request for no tokens warms the cache up: its prompt
is read, so that the next one that begins alike is answered sooner.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from longgraft.server import tally
from longgraft.server.answers import ERRORS, LLAMA
from longgraft.server.bodies import Infill, LlamaCompletion, LlamaRequest
from longgraft.server.desk import Desk, desk_of, tenant_of
from longgraft.server.fields import Extras
from longgraft.server.filling import filling
from longgraft.server.follow import Follower, Job, Piece
from longgraft.server.respond import respond
from longgraft.server.sampling import held, llama_params
from longgraft.server.structure import llama_structure

router = APIRouter()
STOPPED = {"eos": "eos", "stop": "word"}


@router.post("/completion", responses=LLAMA | ERRORS, response_class=Response, tags=["llama.cpp"])
@router.post("/completions", include_in_schema=False)
async def completion(body: LlamaCompletion, request: Request) -> Any:
    """Continue a prompt."""
    desk = desk_of(request)
    job = await desk.with_tokenizer(lambda: _job(desk, body, desk.engine.encode(body.prompt), request))
    return await _answered(request, body, job)


@router.post("/infill", responses=LLAMA | ERRORS, response_class=Response, tags=["llama.cpp"])
async def infill(body: Infill, request: Request) -> Any:
    """Write what stands between two texts."""
    desk = desk_of(request)

    def made() -> Job:
        # What the user has typed already ends the prefix.
        prefix = body.input_prefix + (body.prompt or "")
        prompt_ids, ends = filling(desk.engine, prefix, body.input_suffix, body.input_extra or ())
        job = _job(desk, body, prompt_ids, request)
        ends = () if body.ignore_eos else ends
        return replace(job, params=replace(job.params, eos_token_ids=(*(job.params.eos_token_ids or ()), *ends)))

    return await _answered(request, body, await desk.with_tokenizer(made))


async def _answered(request: Request, body: LlamaRequest, job: Job) -> Response:
    desk = desk_of(request)
    form = LlamaForm(desk, body.n_predict == 0)
    limit = body.t_max_predict_ms
    until = (lambda follower: _watch(follower, limit / 1000)) if limit is not None and limit > 0 else None
    return await respond(request, [job], form, bool(body.stream), until)


def _job(desk: Desk, body: LlamaRequest, prompt_ids: list[int], request: Request) -> Job:
    wanted = None if body.n_predict is None or body.n_predict < 0 else max(1, body.n_predict)
    params = llama_params(body, desk.engine, desk.room_for(prompt_ids, wanted))
    structure, extras = llama_structure(body), Extras()
    params = held(params, structure.grammar, desk.engine.tokenizer)
    references = desk.references(extras, tenant_of(request))
    return Job(prompt_ids, params, references, deadline=desk.deadline(extras), structure=structure)


def _watch(follower: Follower, seconds: float) -> Any:
    """Return what says that a line is whole and so much time went by since the first token."""

    def is_enough(text: str) -> bool:
        first = follower.clock.first
        return "\n" in text and first is not None and time.perf_counter() - first > seconds

    return is_enough


@dataclass
class LlamaForm:
    """llama.cpp's way to write answers down. `is_warming`: nobody wants the text."""

    desk: Desk
    is_warming: bool = False
    ends: bytes = b""

    def piece(self, number: int, piece: Piece, follower: Follower) -> list[dict[str, Any]]:
        """Return the chunk of one round, or of the end."""
        if piece.output is None:
            shown = "" if self.is_warming else piece.text
            return [{"content": shown, "tokens": list(piece.token_ids), "stop": False, "index": number}]
        return [self._last(follower) | {"content": "" if self.is_warming else piece.text}]

    def closing(self, followers: Seq[Follower]) -> list[dict[str, Any]]:
        """Return nothing: the end of the answer is the end of the stream."""
        return []

    def whole(self, followers: Seq[Follower], logprobs: Seq[Seq[Any]]) -> dict[str, Any]:
        """Return the answer."""
        return self._last(followers[0]) | {"content": "" if self.is_warming else followers[0].text}

    def _last(self, follower: Follower) -> dict[str, Any]:
        output, params = follower.output, follower.job.params
        assert output is not None
        stopped = STOPPED.get(output.finish_reason, "limit")
        word = next((s for s in params.stop if stopped == "word" and s in self._decoded(output.token_ids)), "")
        return {
            "index": 0,
            "tokens": [],
            "id_slot": 0,
            "stop": True,
            "model": self.desk.settings.names[0],
            "tokens_predicted": 0 if self.is_warming else len(output.token_ids),
            "tokens_evaluated": output.prompt_len,
            "tokens_cached": output.prompt_len + len(output.token_ids) - 1,
            "truncated": False,
            "stop_type": stopped,
            "stopping_word": word,
            "has_new_line": "\n" in follower.text,
            "generation_settings": self._settings(follower.job),
            "timings": tally.timings(follower),
        }

    def _decoded(self, token_ids: Seq[int]) -> str:
        return str(self.desk.engine.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _settings(self, job: Job) -> dict[str, Any]:
        p = job.params
        return {
            "n_predict": p.max_new_tokens, "seed": p.seed, "temperature": p.temperature, "top_k": p.top_k,
            "top_p": p.top_p, "min_p": p.min_p, "repeat_penalty": p.repetition_penalty, "stop": list(p.stop),
            "presence_penalty": p.presence_penalty, "frequency_penalty": p.frequency_penalty,
            "n_ctx": self.desk.engine.max_context,
        }  # fmt: skip
