"""`POST /v1/chat/completions`. Knows what a chat request means; answers are `respond`'s."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from longgraft.server.answers import CHAT, ERRORS
from longgraft.server.bodies import ChatRequest
from longgraft.server.desk import Desk, desk_of, tenant_of
from longgraft.server.follow import Job
from longgraft.server.messages import render, template_options
from longgraft.server.openai_form import ChatForm
from longgraft.server.respond import respond
from longgraft.server.sampling import held, params_of
from longgraft.server.structure import chat_structure, lead_of
from longgraft.template import template_ids

router = APIRouter()


@router.post("/v1/chat/completions", responses=CHAT | ERRORS, response_class=Response, tags=["openai"])
async def chat_completions(body: ChatRequest, request: Request) -> Any:
    """Answer a chat, whole or as a stream."""
    desk = desk_of(request)
    model = desk.check_model(body.model)
    choices = desk.count(body, 1)
    jobs = await desk.with_tokenizer(lambda: _jobs(desk, body, tenant_of(request), choices))
    return await respond(request, jobs, ChatForm(desk, body, model, choices), bool(body.stream))


def _jobs(desk: Desk, body: ChatRequest, tenant: str | None, choices: int) -> list[Job]:
    tokenizer, extras = desk.engine.tokenizer, body.extras
    options = template_options(body, tokenizer)
    if body.tools:
        options["tools"] = body.tools
    prompt = render(tokenizer, body.messages, **options)
    prompt_ids = desk.engine.encode(template_ids(tokenizer, prompt))
    lead = lead_of(tokenizer.chat_template, prompt, body.chat_template_kwargs or {})
    structure = chat_structure(body, tokenizer, lead)
    wanted = body.max_completion_tokens or body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = params_of(body, desk.engine, desk.room_for(prompt_ids, wanted), logprobs)
    params = held(params, structure.grammar, tokenizer)
    prediction = body.prediction.text if body.prediction is not None else None
    references = desk.references(extras, tenant, prediction)
    predicted, deadline = desk.predicted(references.prediction), desk.deadline(extras)
    job = Job(prompt_ids, params, references, extras.policy, deadline, predicted, structure=structure)
    return [replace(job, params=replace(params, sample_index=number)) for number in range(choices)]
