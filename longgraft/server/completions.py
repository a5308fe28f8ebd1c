"""`POST /v1/completions`: texts and token ids, one prompt or several, and what stands between two texts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from longgraft.server.answers import COMPLETION, ERRORS
from longgraft.server.bodies import CompletionRequest
from longgraft.server.desk import Desk, desk_of, tenant_of
from longgraft.server.errors import ApiError
from longgraft.server.filling import filling
from longgraft.server.follow import Job
from longgraft.server.openai_form import CompletionForm
from longgraft.server.respond import respond
from longgraft.server.sampling import held, params_of
from longgraft.server.structure import structure_of

router = APIRouter()
# OpenAI's own length for completions that name none.
NEW_TOKENS = 16


@router.post("/v1/completions", responses=COMPLETION | ERRORS, response_class=Response, tags=["openai"])
async def completions(body: CompletionRequest, request: Request) -> Any:
    """Continue one prompt or several, whole or as a stream."""
    desk = desk_of(request)
    model = desk.check_model(body.model)
    choices = desk.count(body, len(body.prompts))
    jobs = await desk.with_tokenizer(lambda: _jobs(desk, body, tenant_of(request), choices))
    return await respond(request, jobs, CompletionForm(desk, body, model, choices), bool(body.stream))


def _jobs(desk: Desk, body: CompletionRequest, tenant: str | None, choices: int) -> list[Job]:
    structure = structure_of(body)
    references, jobs = desk.references(body.extras, tenant), []
    predicted = desk.predicted(references.prediction)
    wanted = NEW_TOKENS if body.max_tokens is None else body.max_tokens
    for prompt in body.prompts:
        prompt_ids, ends = _encoded(desk, body, prompt)
        params = params_of(body, desk.engine, desk.room_for(prompt_ids, wanted), body.logprobs)
        ends = (*(params.eos_token_ids or ()), *(() if body.ignore_eos else ends))
        params = replace(params, eos_token_ids=ends, prompt_logprobs=body.logprobs if body.echo else None)
        params = held(params, structure.grammar, desk.engine.tokenizer)
        before = _text(desk, prompt) if body.echo else ""
        policy, deadline = body.extras.policy, desk.deadline(body.extras)
        job = Job(prompt_ids, params, references, policy, deadline, predicted, before, structure)
        jobs += [replace(job, params=replace(params, sample_index=number)) for number in range(choices)]
    # Answers to one request that names no seed share one, so that each can be had again.
    return [replace(job, params=replace(job.params, seed=jobs[0].params.seed)) for job in jobs]


def _encoded(desk: Desk, body: CompletionRequest, prompt: str | list[int]) -> tuple[list[int], tuple[int, ...]]:
    """Return a prompt's token ids, and what ends its answer besides the model's own end."""
    engine = desk.engine
    if body.suffix:
        if not isinstance(prompt, str):
            raise ApiError(400, "suffix needs a prompt that is text", param="suffix")
        return filling(engine, prompt, body.suffix)
    if isinstance(prompt, str) and not body.add_special_tokens:
        return engine.encode(engine.tokenizer(prompt, add_special_tokens=False)["input_ids"]), ()
    return engine.encode(prompt), ()


def _text(desk: Desk, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else str(desk.engine.tokenizer.decode(prompt, skip_special_tokens=True))
