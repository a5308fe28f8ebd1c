"""Keys and the tenants they stand for.

Knows no protocol. Only hashes of keys are kept, and every look-up compares with all of them, so that neither memory nor
time tells anything about a key.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from longgraft.config import GraftError
from longgraft.index.corpus_home import NAME

DEFAULT_TENANT = "default"


class Keys:
    """Which keys open the server. Without any it is open to everybody, and everybody is one nameless tenant."""

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        """`pairs`: tenant and key; a tenant may have several keys. A key of two tenants is a `GraftError`."""
        self._tenants: dict[bytes, str] = {}
        for tenant, key in pairs:
            if not NAME.fullmatch(tenant):
                raise GraftError(f"tenant {tenant!r}: expected up to 100 letters, digits, '.', '_' and '-'")
            if not key or any(mark.isspace() for mark in key):
                raise GraftError(f"a key of tenant {tenant} is empty or holds blanks: expected one word")
            if self._tenants.setdefault(_digest(key.encode()), tenant) != tenant:
                raise GraftError(f"tenant {tenant} has another tenant's key: expected a key of its own")

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def tenant_of(self, key: bytes) -> str | None:
        """Return whose key this is, or None; takes the same time for every key."""
        asked, found = _digest(key), None
        for digest, tenant in self._tenants.items():
            if hmac.compare_digest(digest, asked):
                found = tenant
        return found


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()


def read_keys(single: Iterable[str] = (), file: str | None = None) -> Keys:
    """Return the keys of options (one tenant) and of a file with lines `TENANT KEY` (# begins a comment)."""
    pairs = [(DEFAULT_TENANT, key) for key in single]
    if file is not None:
        pairs += _pairs_in(file)
        if not pairs:
            raise GraftError(f"{file} holds no keys: expected lines with a tenant and a key")
    return Keys(pairs)


def _pairs_in(file: str) -> list[tuple[str, str]]:
    try:
        lines = Path(file).expanduser().read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise GraftError(f"{file}: keys cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8'})") from error
    pairs = []
    for number, line in enumerate(lines, 1):
        words = line.split("#", 1)[0].split()
        if words and len(words) != 2:
            raise GraftError(f"{file}, line {number}: expected a tenant and a key")
        if words:
            pairs.append((words[0], words[1]))
    return pairs
