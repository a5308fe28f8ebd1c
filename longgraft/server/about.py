"""What a server is: its health, models, version and numbers, and its tokenizer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from longgraft import __version__
from longgraft.server.answers import ERRORS, ListAnswer, Text, Tokens
from longgraft.server.bodies import DetokenizeRequest, TokenizeRequest
from longgraft.server.desk import desk_of
from longgraft.server.errors import ApiError
from longgraft.server.messages import render
from longgraft.server.metrics import CONTENT_TYPE
from longgraft.template import template_ids

router = APIRouter()


@router.get("/health", responses={503: ERRORS[503]}, tags=["about"])
async def health(request: Request) -> dict[str, str]:
    """Say whether requests are answered."""
    desk_of(request).check_ready()
    return {"status": "ok"}


@router.get("/version", responses={401: ERRORS[401]}, tags=["about"])
async def version() -> dict[str, str]:
    """Say which version this is."""
    return {"version": __version__}


@router.get("/v1/models", response_model=ListAnswer, responses={401: ERRORS[401], 503: ERRORS[503]}, tags=["openai"])
async def models(request: Request) -> dict[str, Any]:
    """List the names the model is served under."""
    return {"object": "list", "data": [_model(request, name) for name in desk_of(request).settings.names]}


@router.get("/v1/models/{name:path}", responses=ERRORS, tags=["openai"])
async def model(name: str, request: Request) -> dict[str, Any]:
    """Tell about one of them."""
    return _model(request, desk_of(request).check_model(name))


def _model(request: Request, name: str) -> dict[str, Any]:
    desk = desk_of(request)
    about = {"id": name, "object": "model", "created": request.app.state.started, "owned_by": "longgraft"}
    return about | {"root": desk.settings.names[0], "parent": None, "max_model_len": desk.engine.max_context}


@router.get("/metrics", responses={401: ERRORS[401]}, response_class=Response, tags=["about"])
async def metrics(request: Request) -> Response:
    """Tell Prometheus."""
    return Response(desk_of(request).metrics.text(), headers={"content-type": CONTENT_TYPE})


@router.post("/tokenize", response_model=Tokens, responses=ERRORS, tags=["tokens"])
async def tokenize(body: TokenizeRequest, request: Request) -> Any:
    """Return the token ids of a text or a chat."""
    desk = desk_of(request)
    tokenizer = desk.engine.tokenizer

    def ids() -> list[int]:
        if body.messages is not None:
            rendered = render(tokenizer, body.messages, add_generation_prompt=body.add_generation_prompt)
            return template_ids(tokenizer, rendered)
        # vLLM's texts begin as a prompt does, llama.cpp's do not.
        begins = body.add_special_tokens if body.prompt is not None else body.add_special
        special = body.prompt is not None if begins is None else begins
        text = body.prompt if body.prompt is not None else body.content
        return [int(token_id) for token_id in tokenizer(text, add_special_tokens=special)["input_ids"]]

    found = await desk.with_tokenizer(ids)
    values: dict[str, Any] = {"count": len(found), "max_model_len": desk.engine.max_context, "tokens": found}
    if body.return_token_strs:
        values["token_strs"] = tokenizer.convert_ids_to_tokens(found)
    return JSONResponse(values)


@router.post("/detokenize", response_model=Text, responses=ERRORS, tags=["tokens"])
async def detokenize(body: DetokenizeRequest, request: Request) -> Any:
    """Return the text of token ids."""
    desk = desk_of(request)
    if wrong := [token_id for token_id in body.tokens if token_id >= desk.engine.target.vocab_size]:
        said = f"token id {wrong[0]}: expected 0 to {desk.engine.target.vocab_size - 1}"
        raise ApiError(400, said, param="tokens")
    text = await desk.with_tokenizer(lambda: str(desk.engine.tokenizer.decode(body.tokens)))
    return JSONResponse({"prompt": text, "content": text})


@router.get("/tokenizer_info", responses={401: ERRORS[401], 503: ERRORS[503]}, tags=["tokens"])
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """Tell what evaluation suites ask of a tokenizer."""
    engine = desk_of(request).engine
    tokenizer = engine.tokenizer
    special = {name: getattr(tokenizer, name, None) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return {
        "tokenizer_class": type(tokenizer).__name__,
        **special,
        "vocab_size": engine.target.vocab_size,
        "model_max_length": engine.max_context,
        "chat_template": getattr(tokenizer, "chat_template", None),
    }
