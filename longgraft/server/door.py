"""Who may come in, with how much: keys and sizes are checked before a body is read.

Knows ASGI, keys and errors; no endpoint. What it lets in carries its tenant in the request's state.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.exceptions import HTTPException

from longgraft.server.errors import ApiError
from longgraft.server.keys import Keys

# Open to everybody: whether the server is up, and what it can do.
OPEN = frozenset({"/health", "/openapi.json"})
# Of a body that is too large so much more is read and thrown away, as many times the limit, so long (seconds), because
# a client that is still writing would never see why it was refused.
PATIENCE, GENEROSITY = 10.0, 8


class Door:
    """ASGI middleware in front of everything."""

    def __init__(self, app: Any, keys: Keys, max_body_bytes: int) -> None:
        self._app, self._keys, self._most = app, keys, max_body_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Let a request in, or say why not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        tenant, refusal = self._tenant(scope["path"], headers), None
        if self._keys and tenant is None and scope["path"] not in OPEN:
            refusal = ApiError(401, "expected a valid key: Authorization: Bearer KEY", code="invalid_api_key")
        elif (length := headers.get(b"content-length", b"0")).isdigit() and int(length[:20]) > self._most:
            refusal = self._too_large()
            await _throw_away(receive, GENEROSITY * self._most)
        if refusal is not None:
            await refusal.response()(scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, self._limited(receive), send)

    def _tenant(self, path: str, headers: dict[bytes, bytes]) -> str | None:
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            key = headers.get(b"x-api-key", b"")
        return self._keys.tenant_of(key.strip())

    def _limited(self, receive: Any) -> Any:
        """Return a `receive` that ends in an error once a body without a length has grown too large."""
        taken = 0

        async def counted() -> Any:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._most:
                raise HTTPException(413, self._too_large().message)
            return message

        return counted

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body is larger than {self._most} bytes: expected a smaller one", code="body_too_large"
        )


async def _throw_away(receive: Any, most: int) -> None:
    """Read a body to its end, or as far as is reasonable."""
    taken = 0
    try:
        async with asyncio.timeout(PATIENCE):
            while taken < most:
                message = await receive()
                taken += len(message.get("body", b""))
                if not message.get("more_body"):
                    return
    except TimeoutError:
        return
