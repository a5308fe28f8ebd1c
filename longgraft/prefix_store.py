"""Filled chunks by what they hold: which of them begin this text?

Knows chunks and tokens; no model, no request. The one idea: a chunk's name is the hash of its tokens and of the name
of the chunk before it, so equal names mean equal texts from the first token on, and the text of a long document is
found by as many look-ups as it has chunks. The first name of all is made from everything else that rows depend on
(`root`), so whatever differs in that never meets. Tokens are compared all the same. A text may also end, or part from
another, within a chunk: then its first rows are good, and whoever comes copies them.

Chunks that nobody refers to are dropped when the pool needs room, least recently used first, and none before those
that continue it: a chunk whose beginning is gone would never be found again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from longgraft.cache import SequenceCache
from longgraft.pool import ChunkPool, Span
from longgraft.prefix_entry import Entry, Match, common, name_of, within
from longgraft.tree import IntArray

Restore = Callable[[bytes, bytes, IntArray], Entry | None]


class PrefixStore:
    """The held chunks of one pool. `on_drop(entry)` sees one go; `restore(name, parent, token_ids)` may return it."""

    def __init__(self, pool: ChunkPool, is_on: bool = True) -> None:
        """With `is_on` the pool asks this store for room; a pool may have several, each with chunks of its own."""
        self.pool = pool
        pool.keepers += [self.reclaim] if is_on else []
        self.on_drop: Callable[[Entry], None] | None = None
        self.restore: Restore | None = None
        self.num_dropped = 0
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # least recently used first
        self._children: dict[bytes, dict[bytes, None]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, root: bytes, token_ids: IntArray, live: Seq[Entry], grid: int) -> Match:
        """Return what is there of `token_ids [n]` (all but the last token of a prompt), with references taken.

        `live`: text ends that running sequences hold. Rows beyond the last multiple of `grid` are left out.
        """
        match = Match()
        try:
            self._find(match, root, token_ids, live, grid)
        except BaseException:
            self.pool.release(match.chunks)
            raise
        return match

    def _find(self, match: Match, root: bytes, token_ids: IntArray, live: Seq[Entry], grid: int) -> None:
        size, name = self.pool.chunk_rows, root
        chain, sides = list[bytes](), list[Span]()
        while len(token_ids) >= match.rows + size:
            part = token_ids[match.rows : match.rows + size]
            entry = self._take(name, part)
            if entry is None:
                break
            name = entry.name
            chain.append(name)
            sides.append(entry.side)
            match.chunks.append(entry.chunk)
            match.rows += size
        if grid % size:  # else no multiple of `grid` ends within a chunk
            self._find_end(match, name, token_ids[match.rows :], live, sides)
        self.touch(chain)
        self.shorten(match, match.rows // grid * grid)
        match.side_begin = self._side_begin(match, sides)

    def _take(self, parent: bytes, token_ids: IntArray) -> Entry | None:
        """Return the entry of a full chunk, with one more reference, or None."""
        name = name_of(parent, token_ids)
        entry = self._entries.get(name)
        if entry is None and self.restore is not None and (entry := self.restore(name, parent, token_ids)):
            self._add(entry)
            return entry  # it came with a reference
        if entry is None or not np.array_equal(entry.token_ids, token_ids):
            return None
        self.pool.share([entry.chunk])
        return entry

    def _find_end(
        self,
        match: Match,
        parent: bytes,
        token_ids: IntArray,
        live: Seq[Entry],
        sides: list[Span],
    ) -> None:
        """Add the chunk that has the most rows in common with what is left of the text."""
        held = [self._entries[name] for name in self._children.get(parent, ())]
        best, found = 0, None
        for end in [*held, *(end for end in live if end.parent == parent)]:
            rows = common(end.token_ids, token_ids)
            if rows > best:
                best, found = rows, end
        if found is not None:
            self.pool.share([found.chunk])
            match.chunks.append(found.chunk)
            match.rows += best
            sides.append(found.side)
            if found.name:
                self._entries.move_to_end(found.name)

    def shorten(self, match: Match, rows: int) -> None:
        """Give back the references to what lies beyond `rows`."""
        needed = -(-rows // self.pool.chunk_rows)
        self.pool.release(match.chunks[needed:])
        del match.chunks[needed:]
        match.rows, match.side_begin = rows, min(match.side_begin, rows)

    def _side_begin(self, match: Match, sides: list[Span]) -> int:
        """Return the first row from which on all rows of a match have side rows."""
        size, begin = self.pool.chunk_rows, match.rows
        for index in range(len(match.chunks) - 1, -1, -1):
            first, last = sides[index]
            if last + index * size < begin or first == last:
                break
            begin = min(begin, index * size + first)
            if first:
                break
        return begin

    def publish(
        self, root: bytes, token_ids: IntArray, cache: SequenceCache, rows: int, *, has_end: bool = False
    ) -> bytes:
        """Hold the first `rows` rows of `cache`, which are those of `token_ids`: full chunks, and an end if asked.

        Where a chunk is held already, the cache shares that one from now on. With `has_end` nobody may write behind
        the cache's rows any more. Returns the name of the last full chunk.
        """
        size, name, chain, chunks = self.pool.chunk_rows, root, list[bytes](), cache.chunks
        for index in range(rows // size):
            part = token_ids[index * size : (index + 1) * size]
            child = name_of(name, part)
            entry = self._entries.get(child)
            if entry is None and not self.pool.is_held(chunks[index]):
                self._add(Entry(child, name, part.copy(), chunks[index], within(cache.side_rows, index, size)))
            elif entry is None:
                break  # held as something else: whoever knows why, it is not ours to rename
            elif not np.array_equal(entry.token_ids, part):
                break  # two texts of one hash: the first one keeps the name
            elif entry.chunk != chunks[index]:
                cache.adopt(index, entry.chunk)
            name = child
            chain.append(name)
        index, end = rows // size, rows % size
        if has_end and end and index == len(chain) and not self.pool.is_held(chunks[index]):
            last = token_ids[index * size : rows].copy()
            side = within(cache.side_rows, index, size)
            self._add_end(Entry(name_of(name, last), name, last, chunks[index], (side[0], min(side[1], len(last)))))
        self.touch(chain)
        return name

    def _add_end(self, entry: Entry) -> None:
        """Hold a partly filled chunk, unless one that is held begins the same way."""
        for name in self._children.get(entry.parent, ()):
            if common(self._entries[name].token_ids, entry.token_ids) == len(entry.token_ids):
                self._entries.move_to_end(name)
                return
        self._add(entry)

    def insert(self, entries: Seq[Entry]) -> None:
        """Hold the filled chunks of one text from its beginning on, where it is not held already; they are in use."""
        for entry in entries:
            if len(entry.token_ids) < self.pool.chunk_rows:
                self._add_end(entry)
            elif entry.name not in self._entries:
                self._add(entry)
        self.touch([entry.name for entry in entries if entry.name in self._entries])

    def _add(self, entry: Entry) -> None:
        """Hold a chunk; an end that it goes on from is of no use any more."""
        for name in list(self._children.get(entry.parent, ())):
            other = self._entries[name]
            if common(other.token_ids, entry.token_ids) == len(other.token_ids) < len(entry.token_ids):
                self._drop(other)
        self.pool.hold(entry.chunk)
        self._entries[entry.name] = entry
        self._children.setdefault(entry.parent, {})[entry.name] = None

    def touch(self, chain: list[bytes]) -> None:
        """Count a text as used now, its beginning as used last."""
        for name in reversed(chain):
            self._entries.move_to_end(name)

    def reclaim(self, count: int) -> int:
        """Drop `count` held chunks that no sequence refers to, or as many as there are; return how many went."""
        total = 0
        while total < count and (dropped := self._drop_idle(count - total)):
            total += dropped
        return total

    def _drop_idle(self, count: int) -> int:
        """Drop at most `count` chunks that nobody refers to and nothing continues; return how many went."""
        dropped = 0
        for entry in list(self._entries.values()):
            if dropped == count:
                break
            if not self.pool.references(entry.chunk) and entry.name not in self._children:
                if self.on_drop is not None:
                    self.on_drop(entry)
                self._drop(entry)
                dropped += 1
        self.num_dropped += dropped
        return dropped

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.name]
        siblings = self._children[entry.parent]
        del siblings[entry.name]
        if not siblings:
            del self._children[entry.parent]
        self.pool.drop(entry.chunk)

    def clear(self) -> None:
        """Hold nothing any more; sequences keep what they refer to."""
        for entry in list(self._entries.values()):
            self.pool.drop(entry.chunk)
        self._entries.clear()
        self._children.clear()

    def check_integrity(self) -> str:
        """Return what is wrong, or an empty string."""
        chunks = [entry.chunk for entry in self._entries.values()]
        if len(set(chunks)) != len(chunks) or not all(map(self.pool.is_held, chunks)):
            return "a chunk is held under two names or under none"
        if len(self.pool.keepers) == 1 and sum(map(self.pool.is_held, range(self.pool.num_chunks))) != len(chunks):
            return "the pool holds a chunk that has no name"
        places = {name: place for place, name in enumerate(self._entries)}
        for entry in self._entries.values():
            if entry.name != name_of(entry.parent, entry.token_ids):
                return "an entry is not called what it holds"
            parent = self._entries.get(entry.parent)
            if parent is not None and places[parent.name] < places[entry.name]:
                return "a chunk would be dropped before one that continues it"
            if parent is not None and self.pool.references(entry.chunk) > self.pool.references(parent.chunk):
                return "a chunk is in use, the one before it is not"
            if entry.name not in self._children.get(entry.parent, {}):
                return "an entry is missing among its siblings"
        return ""
