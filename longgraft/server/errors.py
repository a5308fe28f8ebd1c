"""Errors in OpenAI's shape, whatever went wrong.

Knows what can be raised and which status it deserves; no endpoint. The one idea: `ApiError` is the only way an error
leaves, and `api_error` makes one of anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from longgraft.config import GraftError
from longgraft.request import StageError
from longgraft.service import Busy, Closed

INVALID, RATE, SERVER = "invalid_request_error", "rate_limit_error", "server_error"
INTERNAL = "internal error of the server; its log says more"
# A client that comes too early asks again after so many seconds.
RETRY_AFTER = "1"
HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": RETRY_AFTER},
    503: {"Retry-After": RETRY_AFTER},
}
MOST_SAID = 4


class ApiError(Exception):
    """One error as a client sees it."""

    def __init__(
        self, status: int, message: str, *, kind: str = INVALID, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code

    def values(self) -> dict[str, Any]:
        """Return the body."""
        # Half a character in what a client sent must not make its error unspeakable.
        message = self.message.encode("utf-8", "replace").decode()
        return {"error": {"message": message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return it as a response."""
        return JSONResponse(self.values(), self.status, HEADERS.get(self.status))


def is_known(error: BaseException) -> bool:
    """Say whether an error says all there is to say; any other is a fault of ours, and the log is to hold it."""
    return isinstance(error, ApiError | GraftError)


def api_error(error: BaseException) -> ApiError:
    """Return what a client is told of an error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Busy):
        return ApiError(429, str(error), kind=RATE, code="rate_limit_exceeded")
    if isinstance(error, Closed):
        return ApiError(503, str(error), kind=SERVER, code="shutting_down")
    if isinstance(error, StageError):
        return ApiError(500, str(error), kind=SERVER, code="engine_error")
    if isinstance(error, GraftError):
        return ApiError(400, str(error))
    return ApiError(500, INTERNAL, kind=SERVER)


def of_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the first mistake that checking a body against its schema found, and how many more there are."""
    first = errors[0]
    if first.get("type") == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    places = [[str(part) for part in one["loc"] if part != "body"] for one in errors]
    # Of a field that may have several forms there is one mistake for each.
    same = [one for one, place in zip(errors, places) if place[:1] == places[0][:1]]
    where = ".".join(places[0] if len(same) == 1 else places[0][:1])
    said = " or ".join(dict.fromkeys(str(one["msg"]).removeprefix("Value error, ") for one in same[:MOST_SAID]))
    more = f" (and mistakes in {len(errors) - len(same)} more places)" if len(errors) > len(same) else ""
    return ApiError(400, f"{where or 'body'}: {said}{more}", param=where or None)


def install(app: FastAPI) -> None:
    """Let every error of an app leave in this shape."""

    def known(request: Request, error: Exception) -> JSONResponse:
        return api_error(error).response()

    def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return of_validation(error.errors()).response()

    def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        texts = {404: f"there is no {request.url.path} here", 405: f"{request.url.path} takes no {request.method}"}
        said = ApiError(error.status_code, texts.get(error.status_code, str(error.detail))).response()
        said.headers.update(error.headers or {})
        return said

    app.add_exception_handler(ApiError, known)
    app.add_exception_handler(GraftError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, known)
