"""Starts a server and ends it: socket, model, signals. The one file that knows uvicorn.

The socket is bound before the model is loaded, so that a port in use is found out at once, and the server answers while
it loads (`/health`: 503). On SIGINT or SIGTERM no more connections are taken, and answers under way have
`drain_seconds` to end.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import uvicorn

from longgraft.config import GraftError
from longgraft.engine import Engine
from longgraft.server.app import create_app
from longgraft.server.desk import Desk
from longgraft.server.errors import ApiError
from longgraft.server.settings import ServerSettings

Tell = Callable[[str], None]


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens; raises `GraftError` if that cannot be."""
    if not 0 <= port <= 65535:
        raise GraftError(f"port {port}: expected 0 (any free one) to 65535")
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(kind, socket.SOCK_STREAM)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((host, port))
        opened.listen(1024)
    except (OSError, UnicodeError) as error:
        opened.close()
        reason = getattr(error, "strerror", None) or error
        raise GraftError(f"{host}:{port} cannot be listened on ({reason}): choose another --port or --host") from None
    opened.set_inheritable(True)
    return opened


class Server:
    """One server on one socket. `run` blocks in the thread whose signals end it; `stop` ends it from elsewhere."""

    def __init__(self, settings: ServerSettings, opened: socket.socket, tell: Tell = lambda line: None) -> None:
        self.desk, self._socket, self._tell = Desk(settings), opened, tell
        config = uvicorn.Config(
            create_app(self.desk),
            log_level="warning",
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
            server_header=False,
        )
        self._uvicorn = uvicorn.Server(config)
        self._failure: GraftError | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def run(self, load: Callable[[], Engine]) -> None:
        """Serve what `load` returns until a signal or `stop`; raises `GraftError` if it cannot be loaded."""
        loader = threading.Thread(target=self._open, args=(load,), name="longgraft-load", daemon=True)
        loader.start()
        try:
            with suppress(KeyboardInterrupt):  # uvicorn raises the signal again once it has ended
                self._uvicorn.run(sockets=[self._socket])
        finally:
            self.desk.close()
            self._socket.close()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End as a signal would."""
        self._uvicorn.should_exit = True

    def _open(self, load: Callable[[], Engine]) -> None:
        try:
            engine = load()
            if not self.desk.is_draining:
                self.desk.open(engine)
                self._tell(f"serving {self.desk.settings.names[0]} at {self.url}")
                self.desk.warm()
        except (GraftError, ApiError) as error:
            self._failure = GraftError(str(error))
        except BaseException as error:
            self._failure = GraftError(f"the model could not be loaded ({type(error).__name__}: {error})")
        if self._failure is not None:
            self.stop()


def serve(settings: ServerSettings, host: str, port: int, load: Callable[[], Any], tell: Tell) -> None:
    """Bind, load and serve until a signal; raises `GraftError` for what can be mended."""
    with bound(host, port) as opened:
        Server(settings, opened, tell).run(load)
