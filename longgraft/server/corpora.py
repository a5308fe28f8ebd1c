"""Corpora over the network: list, bring, remove. Clients send texts and names, never paths."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool

from longgraft.server.answers import ERRORS, CorpusAnswer, ListAnswer
from longgraft.server.bodies import CorpusRequest
from longgraft.server.desk import desk_of, tenant_of
from longgraft.server.fields import titled

router = APIRouter(tags=["corpora"])
HOME = "/v1/longgraft/corpora"
REFUSALS = ERRORS | {403: ERRORS[400] | {"description": "The server does not allow it"}}


@router.get(HOME, response_model=ListAnswer, responses={401: ERRORS[401]})
async def listed(request: Request) -> dict[str, Any]:
    """List the corpora that this key's requests may name."""
    rows = await run_in_threadpool(desk_of(request).shelf.rows, tenant_of(request))
    return {"object": "list", "data": rows}


@router.get(HOME + "/{name}", response_model=CorpusAnswer, responses=REFUSALS)
async def one(name: str, request: Request) -> dict[str, Any]:
    """Tell about one corpus."""
    return await run_in_threadpool(desk_of(request).shelf.row, name, tenant_of(request))


@router.post(HOME, response_model=CorpusAnswer, responses=REFUSALS)
async def build(body: CorpusRequest, request: Request) -> dict[str, Any]:
    """Build a corpus of texts; one of that name is replaced once the new one is whole."""
    desk, tenant, documents = desk_of(request), tenant_of(request), titled(body.documents)
    # Without the tokenizer's lock, which would hold up everybody's requests: building only reads it.
    await run_in_threadpool(desk.shelf.build, body.name, tenant, documents, desk.engine.tokenizer)
    return await run_in_threadpool(desk.shelf.row, body.name, tenant)


@router.delete(HOME + "/{name}", responses=REFUSALS)
async def remove(name: str, request: Request) -> dict[str, Any]:
    """Remove a corpus that this key's tenant brought."""
    await run_in_threadpool(desk_of(request).shelf.remove, name, tenant_of(request))
    return {"id": name, "object": "corpus", "deleted": True}
