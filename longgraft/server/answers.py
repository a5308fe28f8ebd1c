"""What endpoints answer, for the OpenAPI document. Nothing is computed from these; tests hold answers against them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """Anything may be added to an answer."""

    model_config = ConfigDict(extra="allow")


class ErrorBody(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every error."""

    error: ErrorBody


class CompletionDetails(Answer):
    """Of the prediction: tokens that the answer holds, and those that it does not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Answer):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: CompletionDetails


class Choice(Answer):
    """One of several answers."""

    index: int
    finish_reason: str
    logprobs: dict[str, Any] | None


class ChatChoice(Choice):
    """One answer of a chat."""

    message: dict[str, Any]


class TextChoice(Choice):
    """One completion."""

    text: str


class OpenAIAnswer(Answer):
    """What chats and completions share."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class ChatAnswer(OpenAIAnswer):
    """Answers to a chat."""

    choices: list[ChatChoice]


class CompletionAnswer(OpenAIAnswer):
    """Completions."""

    choices: list[TextChoice]


class LlamaAnswer(Answer):
    """llama.cpp's answer."""

    content: str
    stop: bool
    tokens_predicted: int
    tokens_evaluated: int
    timings: dict[str, float]


class Tokens(Answer):
    """A text's token ids."""

    count: int
    max_model_len: int
    tokens: list[int]


class Text(Answer):
    """The text of token ids, under both names that clients know."""

    prompt: str
    content: str


class CorpusAnswer(Answer):
    """One corpus."""

    id: str
    object: str
    tokens: int
    documents: int
    shared: bool


class ListAnswer(Answer):
    """A list."""

    object: str
    data: list[dict[str, Any]]


Responses = dict[int | str, dict[str, Any]]
STREAM: dict[str, Any] = {"text/event-stream": {}}
ERRORS: Responses = {
    400: {"model": ErrorAnswer, "description": "Something in the request is not right"},
    401: {"model": ErrorAnswer, "description": "No valid key"},
    404: {"model": ErrorAnswer, "description": "There is no such model or corpus"},
    413: {"model": ErrorAnswer, "description": "The body is too large"},
    429: {"model": ErrorAnswer, "description": "Too many requests on their way"},
    500: {"model": ErrorAnswer, "description": "Something broke; other requests are not affected"},
    503: {"model": ErrorAnswer, "description": "The model is loading, or the server shuts down"},
}
CHAT: Responses = {200: {"model": ChatAnswer, "content": STREAM}}
COMPLETION: Responses = {200: {"model": CompletionAnswer, "content": STREAM}}
LLAMA: Responses = {200: {"model": LlamaAnswer, "content": STREAM}}
