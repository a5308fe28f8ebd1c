"""Corpora that requests may copy from: those shared by all, and those that tenants bring.

Knows corpora and tenants; no protocol. The one idea: a client never names a path. A name is looked up among the shared
ones and in its tenant's own folder, and names cannot hold a separator or begin with a dot.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from longgraft.config import GraftError
from longgraft.index.corpus_home import MANIFEST, NAME, folder_of, remove
from longgraft.server.errors import RATE, ApiError

if TYPE_CHECKING:
    from longgraft.engine import Engine

NAMELESS = "-"  # no tenant can be called so
ENDING = ".txt"
LONGEST_NAME = 200  # bytes of a file's name, escaped


class Shelf:
    """`home`: folder of what tenants bring (None: they bring nothing). `shared`: names or folders open to all."""

    def __init__(self, home: Path | None, shared: tuple[str, ...] = (), most: int = 64) -> None:
        self.home, self.most = home, most
        self._building = threading.Lock()
        self.shared = {Path(name).name: folder_of(name) for name in shared}
        if len(self.shared) != len(shared):
            raise GraftError(f"corpora {', '.join(shared)}: expected different names")

    def check(self, engine: Engine) -> None:
        """Raise `GraftError` if a shared corpus does not fit the model."""
        from longgraft.index.corpus import open_corpus
        from longgraft.index.corpus_tokens import tokenizer_hash

        for folder in self.shared.values():
            open_corpus(folder, tokenizer_hash(engine.tokenizer)).close()

    def find(self, names: list[str] | None, tenant: str | None) -> tuple[Path, ...]:
        """Return the folders of some corpora (None: all shared ones); an `ApiError` for a name that is not there."""
        if names is None:
            return tuple(self.shared.values())
        return tuple(self._folder(name, tenant) for name in names)

    def rows(self, tenant: str | None) -> list[dict[str, Any]]:
        """Return what there is for a tenant, as JSON-ready values."""
        folders = {name: (folder, True) for name, folder in self.shared.items()}
        folders |= {name: (self._own(tenant) / name, False) for name in self._names(tenant)}
        return [_row(name, folder, shared) for name, (folder, shared) in folders.items()]

    def row(self, name: str, tenant: str | None) -> dict[str, Any]:
        """Return one of them."""
        folder = self._folder(name, tenant)
        return _row(name, folder, self.shared.get(name) == folder)

    def build(self, name: str, tenant: str | None, documents: Mapping[str, str], tokenizer: Any) -> None:
        """Build a tenant's corpus of texts, in place of one of that name; raises `ApiError` or `GraftError`.

        One at a time: builds are long, and whoever waited for one would hold a thread that others need.
        """
        if self.home is None:
            raise ApiError(403, "this server takes no corpora", code="corpora_closed")
        if not NAME.fullmatch(name) or name in self.shared:
            raise ApiError(400, f"corpus name {name!r}: expected one that is free, without separators", param="name")
        names = self._names(tenant)
        if name not in names and len(names) >= self.most:
            raise ApiError(400, f"there are {self.most} corpora already: remove one first", code="too_many_corpora")
        if not self._building.acquire(blocking=False):
            raise ApiError(429, "another corpus is being built: try again later", kind=RATE, code="building")
        try:
            self._build(self._own(tenant), name, documents, tokenizer)
        finally:
            self._building.release()

    def _build(self, own: Path, name: str, documents: Mapping[str, str], tokenizer: Any) -> None:
        from longgraft.index.corpus_build import build_corpus

        own.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".texts-", dir=own) as texts:
            for title, text in documents.items():
                (Path(texts) / _file_name(title)).write_text(text, "utf-8", newline="")
            largest = 1 + max(len(text.encode()) for text in documents.values())
            build_corpus(own / name, [texts], tokenizer, max_file_bytes=largest)

    def remove(self, name: str, tenant: str | None) -> None:
        """Remove a tenant's own corpus; answers that copy from it go on."""
        folder = self._folder(name, tenant)
        if name in self.shared:
            raise ApiError(403, f"corpus {name!r} is shared by all: clients cannot remove it", code="corpus_shared")
        remove(folder)
        shutil.rmtree(folder, ignore_errors=True)

    def title(self, path: str) -> str:
        """Return what a client calls a document that is known by a path."""
        if self.home is None or not Path(path).is_relative_to(self.home):
            return path
        return unquote(Path(path).name.removesuffix(ENDING))

    def _folder(self, name: str, tenant: str | None) -> Path:
        if (shared := self.shared.get(name)) is not None:
            return shared
        if name in self._names(tenant):
            return self._own(tenant) / name
        raise ApiError(404, f"there is no corpus {name!r}: see /v1/longgraft/corpora", code="corpus_not_found")

    def _own(self, tenant: str | None) -> Path:
        assert self.home is not None and (tenant is None or NAME.fullmatch(tenant))
        return self.home / (NAMELESS if tenant is None else tenant)

    def _names(self, tenant: str | None) -> list[str]:
        if self.home is None or not (own := self._own(tenant)).is_dir():
            return []
        found = (path for path in own.iterdir() if NAME.fullmatch(path.name) and (path / MANIFEST).is_file())
        return sorted(path.name for path in found if not path.is_symlink())


def _row(name: str, folder: Path, shared: bool) -> dict[str, Any]:
    from longgraft.index.corpus import open_corpus

    with open_corpus(folder) as corpus:
        tokens, documents = corpus.manifest.num_tokens, len(corpus.documents)
    return {"id": name, "object": "corpus", "tokens": tokens, "documents": documents, "shared": shared}


def _file_name(title: str) -> str:
    """Return a name that is one file's, whatever a document is called."""
    escaped = quote(title, safe="", errors="replace")
    if not title or len(escaped) > LONGEST_NAME:
        raise ApiError(400, f"document {title[:40]!r}: expected a name of at most some 60 to {LONGEST_NAME} characters")
    return escaped.replace(".", "%2E") + ENDING
