"""The prefix cache: what was computed for one request serves the next one that begins alike.

Knows sequences, the target's identity and a store of filled chunks; not how chunks are found or written to disk, and
not how prompts are read. The one idea: before a prompt is read, its beginning is looked up and attached; after it
was read, and once more when the request ends, what is there is published. Nobody but the pool ever decides what goes.

Which rows may be reused. Keys and values of a row depend, in their last bits, on the rows that were computed together
with it, unless the kernels keep rows apart (`exact`). So in other modes only rows that a cold run computes in the same
forwards are reused: whole forwards of the prompt's grid. Where rows are independent, in float64, or if the config says
so (`prefix_rows`), any row is: answers, and ends of texts within a chunk, too.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from functools import partial
from math import lcm
from typing import Any

import numpy as np
import torch

from longgraft.config import EngineConfig, GraftError, SamplingParams
from longgraft.draft.base import Drafter
from longgraft.pool import ChunkPool
from longgraft.prefix_entry import Entry, name_of, within
from longgraft.prefix_file import Piece, PrefixFile, write
from longgraft.prefix_identity import identity, signature
from longgraft.prefix_spill import Spill
from longgraft.prefix_store import PrefixStore
from longgraft.references import References
from longgraft.sequence import Sequence
from longgraft.target import Target


@dataclass(slots=True)
class _Run:
    """A sequence between its first row and its release: its root name, and an unfinished chunk others may copy."""

    seq: Sequence
    root: bytes
    signature: bytes
    good: int | None = None
    end: Entry | None = None


class PrefixCache:
    """Filled chunks of one engine's pool, found by their text, per tenant; see the module."""

    def __init__(self, target: Target, pool: ChunkPool, config: EngineConfig, drafter: Drafter) -> None:
        self.target, self.pool, self.config, self.drafter = target, pool, config, drafter
        self.is_on = config.prefix_cache
        self.store = PrefixStore(pool, self.is_on)
        self.spill: Spill | None = None
        if self.is_on and config.prefix_spill is not None:
            self.spill = Spill(config.prefix_spill, config.prefix_spill_bytes, pool)
            self.store.on_drop, self.store.restore = self.spill.put, self.spill.restore
        is_free = config.exact or config.prefix_rows or target.dtype == torch.float64
        self.grid = 1 if is_free else config.prefill_rows
        self.requests = self.hits = self.rows = 0
        self._runs: dict[int, _Run] = {}
        self._secret = os.urandom(32)
        self._identity: tuple[bytes, dict[str, str]] | None = None

    def begin(self, seq: Sequence) -> None:
        """Attach what is there of a sequence's text to its empty cache; called before the first row is computed."""
        if not self.is_on or seq.cache.length or seq.cache.pool is not self.pool:
            return
        now = signature(self.target.model)
        root = self._root(now, seq.long_rope, seq.tenant)
        # Rows whose logits somebody wants are computed anew: what is kept of a row does not hold them.
        last, scores = len(seq.token_ids) - 1, seq.prompt_scores
        if scores is not None and not scores.is_complete:
            last = min(last, scores.next_row)
        match = self.store.find(root, np.asarray(seq.token_ids[:last], np.int32), self._live(), self.grid)
        size = self.pool.chunk_rows
        if match.rows % size and not self.pool.num_free:  # no room for a copy of the last chunk's rows
            self.store.shorten(match, match.rows // lcm(self.grid, size) * lcm(self.grid, size))
        try:
            seq.cache.attach(match.chunks, match.rows % size, match.side_begin)
        except BaseException:
            self.pool.release(match.chunks)
            raise
        self._runs[id(seq)] = _Run(seq, root, now)
        seq.cache.before_release = partial(self._retire, seq)
        self._count(seq, match.rows)

    def _live(self) -> list[Entry]:
        """Return the unfinished chunks of running sequences, where they lie now: a fork may have moved them."""
        found = list[Entry]()
        for run in self._runs.values():
            index = (run.good or 0) // self.pool.chunk_rows
            if run.end is not None and run.seq.cache.length >= (run.good or 0):
                found.append(replace(run.end, chunk=run.seq.cache.chunks[index]))
        return found

    def _count(self, seq: Sequence, rows: int) -> None:
        self.requests += 1
        self.hits += rows > 0
        self.rows += rows
        seq.stats.prefix_rows += rows
        seq.stats.prefix_chunks += rows // self.pool.chunk_rows

    def finish(self, seq: Sequence) -> None:
        """Publish the prompt's rows, and show the drafter its last states; called after the last row was computed."""
        run = self._runs.get(id(seq))
        if run is not None:
            self._publish(run)
        if seq.policy.drafts and self.pool.side is not None:
            self._show_drafter(seq)

    def _publish(self, run: _Run, has_end: bool = False) -> None:
        """Hold what may be reused of a sequence's rows, unless the model is no longer what it was."""
        seq, size = run.seq, self.pool.chunk_rows
        known = min(seq.cache.length, len(seq.token_ids) - 1)
        if run.good is None or self.grid == 1:  # rows that decoding adds are not those a cold run computes
            run.good = known // self.grid * self.grid
        rows = min(run.good, known)
        run.end = None
        if not rows or signature(self.target.model) != run.signature:
            return
        tokens = np.asarray(seq.token_ids[:rows], np.int32)
        name = self.store.publish(run.root, tokens, seq.cache, rows, has_end=has_end)
        if rows % size and not has_end:
            index = rows // size
            side = within(seq.cache.side_rows, index, size)
            run.end = Entry(b"", name, tokens[index * size :], seq.cache.chunks[index], side)

    def _show_drafter(self, seq: Sequence) -> None:
        """Give the drafter the states of the last prompt rows, in the pieces in which a cold run computes them.

        Where the states of some reused rows are not known, it gets those behind them.
        """
        begin, end = seq.cache.side_rows
        if end != seq.cache.length:
            return
        first, grid = max(begin, end - self.drafter.feature_window), self.config.prefill_rows
        while first < end:
            last = min(end, (first // grid + 1) * grid)
            self.drafter.prefill(seq, first, seq.cache.read_side(first, last))
            first = last

    def _retire(self, seq: Sequence) -> None:
        """Publish all that may be reused of a sequence whose cache is about to give its chunks back."""
        run = self._runs.pop(id(seq), None)
        if run is not None:
            self._publish(run, has_end=True)

    def _root(self, now: bytes, long_rope: bool, tenant: str | None) -> bytes:
        """Return the name before a text's first chunk: all that its rows depend on besides tokens, and whose it is."""
        owner = b"" if tenant is None else b"tenant " + tenant.encode("utf-8", "surrogatepass")
        return hashlib.sha256(b"".join([self._secret, now, bytes([long_rope]), owner])).digest()

    def save(self, path: str | os.PathLike[str], seq: Sequence) -> int:
        """Write the reusable rows of a sequence whose prompt was read; return how many."""
        self.require_on()
        size = self.pool.chunk_rows
        rows = seq.cache.length // self.grid * self.grid
        if not rows:
            raise GraftError(
                f"a prompt of {len(seq.token_ids)} tokens has no rows to save: expected more than {self.grid} "
                "(prefill_rows, or 1 with exact or prefix_rows)"
            )
        tokens, pieces = np.asarray(seq.token_ids[:rows], np.int32), list[Piece]()
        for index in range(-(-rows // size)):
            part = tokens[index * size : (index + 1) * size]
            begin, end = within(seq.cache.side_rows, index, size)
            pieces.append(Piece(seq.cache.chunks[index], part, (begin, min(end, len(part)))))
        about = {**self._about(), "long_rope": seq.long_rope, "tenant": _tenant_mark(seq.tenant, os.urandom(8).hex())}
        try:
            write(path, self.pool, pieces, {**about, "side": self._side()})
        except OSError as error:
            raise GraftError(f"prefix file {path} could not be written: {error}") from error
        return rows

    def load(self, path: str | os.PathLike[str], tenant: str | None = None) -> int:
        """Hold the rows of a file that `save` wrote; return how many. Anything that differs is a `GraftError`."""
        self.require_on()
        file = PrefixFile(path)
        self._require_same(file, tenant)
        texts, has_side = file.tokens(), file.about.get("side") == self._side()
        if len(file) > self.pool.num_free:
            raise GraftError(
                f"prefix file {path} needs {len(file)} chunks of KV cache, {self.pool.num_free} are free: "
                "raise kv_bytes or release sequences"
            )
        name = self._root(signature(self.target.model), bool(file.about["long_rope"]), tenant)
        entries = list[Entry]()
        chunks = list[int]()
        try:
            for number, text in enumerate(texts):
                chunks += self.pool.allocate(1, chunks[-1] if chunks else None)
                side = file.side(number) if has_side and self.pool.side is not None else (0, 0)
                file.read(number, self.pool, Piece(chunks[-1], text, side), has_side)
                entries.append(Entry(name_of(name, text), name, text, chunks[-1], side))
                name = entries[-1].name
            self.store.insert(entries)
        finally:
            self.pool.release(chunks)
        return sum(map(len, texts))

    def require_on(self) -> None:
        """Raise `GraftError` if the cache is off."""
        if not self.is_on:
            raise GraftError("prefixes are neither kept nor saved: set prefix_cache of EngineConfig")

    def _require_same(self, file: PrefixFile, tenant: str | None) -> None:
        found, wanted = file.about, self._about()
        mark = str(found.get("tenant"))
        wanted["tenant"] = _tenant_mark(tenant, mark.partition(":")[0])
        for name, own in wanted.items():
            if found.get(name) != own:
                seen = "another" if name in ("tenant", "weights") else repr(found.get(name))
                mine = "this one's" if name in ("tenant", "weights") else repr(own)
                raise GraftError(f"prefix file {file.path}: its {name} is {seen}, expected {mine}; save it again")
        if not isinstance(found.get("long_rope"), bool) or file.chunk_rows != self.pool.chunk_rows:
            raise GraftError(f"prefix file {file.path}: expected chunks of {self.pool.chunk_rows} rows; save it again")

    def _about(self) -> dict[str, Any]:
        """Return what a file must agree with; what is easiest to understand first."""
        now = signature(self.target.model)
        if self._identity is None or self._identity[0] != now:
            self._identity = now, identity(self.target.model)
        about: dict[str, Any] = dict(self._identity[1])
        rows = "any" if self.grid == 1 else f"forwards of {self.grid} rows"
        kernels = f"{self.target.backend} attention, {self.target.linear.name} linear"
        weights = about.pop("weights")
        return {**about, "arithmetic": f"{rows}, {kernels}", "weights": weights}

    def _side(self) -> Any:
        """Return what side rows are, or None where there are none."""
        return None if self.pool.side is None else {"layers": list(self.drafter.feature_layers)}

    def clear(self) -> None:
        """Forget everything that no running sequence uses, on disk too."""
        self.store.clear()
        if self.spill is not None:
            self.spill.clear()

    def summary(self) -> dict[str, int]:
        """Return plain counts: requests, those that found something, rows reused, chunks held, dropped, on disk."""
        spill = self.spill
        return {
            "requests": self.requests,
            "hits": self.hits,
            "rows": self.rows,
            "chunks": len(self.store),
            "dropped": self.store.num_dropped,
            "spilled": spill.num_written if spill else 0,
            "restored": spill.num_restored if spill else 0,
        }


def _tenant_mark(tenant: str | None, salt: str) -> str:
    """Return what a file says of its tenant: enough to compare, not to read."""
    return "none" if tenant is None else f"{salt}:{hashlib.sha256(f'{salt} {tenant}'.encode()).hexdigest()}"


def side_columns(target: Target, drafter: Drafter, config: EngineConfig) -> int:
    """Return how many numbers are kept of each row besides K and V: the hidden states that a drafter reads."""
    return len(drafter.feature_layers) * int(target.config.hidden_size) if config.prefix_cache else 0


def save_prompt(engine: Any, path: str, prompt: Any, tenant: str | None, new_tokens: int) -> int:
    """Read `prompt` as far as it is not cached, write its K/V to the file `path`, and return the number of rows.

    A request that begins with the same tokens, in this process or after `load_prefix` in another, need not read them.
    Without `exact` or `prefix_rows` whole forwards of `prefill_rows` rows are written, and less than one is a
    `GraftError`. `tenant`: whose requests may use it. `new_tokens`: how long answers will be; only models with two RoPE
    regimes ask.
    """
    engine.prefixes.require_on()
    references = References(tenant=tenant) if tenant is not None else None
    ids = engine.encode(prompt)
    # A prompt's last token is never read, so that all rows are, one more stands behind them.
    params = SamplingParams(max_new_tokens=max(1, new_tokens - 1))
    seq = engine.open([*ids, ids[-1]], params, references=references, policy="plain")
    try:
        with engine.target.session():
            engine.prefill(seq)
        return int(engine.prefixes.save(path, seq))
    finally:
        seq.cache.release()
