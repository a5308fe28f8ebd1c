"""Chunks on disk while the pool has no room: bounded, private to the process, and never a failure of a request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from longgraft.config import GraftError
from longgraft.pool import ChunkPool, LayerShape
from longgraft.prefix_entry import Entry
from longgraft.prefix_spill import Spill

CHUNK = 4 * 2 * 3 * 4 + 4 * 4  # bytes of four rows: K and V, and one side column


def make(folder: Path, max_bytes: int = 1 << 20) -> Spill:
    pool = ChunkPool([LayerShape(1, 3, 3)], 3, torch.float32, chunk_rows=4, side=1)
    for group in pool._groups:
        group.copy_(torch.arange(group.numel()).reshape(group.shape))
    return Spill(str(folder), max_bytes, pool)


def entry(number: int, chunk: int = 0, rows: int = 4) -> Entry:
    return Entry(bytes([number]) * 32, b"", np.full(rows, number, np.int32), chunk, (1, rows))


def test_a_chunk_comes_back_as_it_went(tmp_path: Path) -> None:
    spill = make(tmp_path)
    pool = spill.pool
    spill.put(entry(1, 2))
    want = [part.clone() for part in pool.rows_of(2, 4, is_side=True)]
    for group in pool._groups:
        group.zero_()
    found = spill.restore(entry(1).name, b"parent", entry(1).token_ids)
    assert found is not None and (found.parent, found.side) == (b"parent", (1, 4))
    assert pool.references(found.chunk) == 1
    for part, (own, other) in enumerate(zip(pool.rows_of(found.chunk, 4, is_side=True), want)):
        assert torch.equal(own[:, 1:], other[:, 1:]) and (part == 2 or torch.equal(own, other))
    assert spill.num_restored == 1


def test_what_is_not_there_is_not_found(tmp_path: Path) -> None:
    spill = make(tmp_path)
    spill.put(entry(1, rows=3))
    assert len(spill) == 0 and spill.restore(entry(1).name, b"", entry(1).token_ids) is None
    spill.put(entry(2))
    assert len(spill.pool.allocate(3)) == 3
    assert spill.restore(entry(2).name, b"", entry(2).token_ids) is None


def test_files_stay_under_the_cap_and_the_oldest_go(tmp_path: Path) -> None:
    spill = make(tmp_path)
    spill.put(entry(0))
    size = spill.num_bytes
    small = make(tmp_path, 3 * size)
    for number in range(5):
        small.put(entry(number))
        small.put(entry(2 if number > 2 else 0))
    assert small.num_bytes == len(small) * size <= 3 * size == sum(f.stat().st_size for f in small.folder.iterdir())
    assert set(small._sizes) == {entry(number).name for number in (2, 3, 4)}
    make(tmp_path, CHUNK - 1).put(entry(1))
    tight = make(tmp_path, CHUNK)
    tight.put(entry(1))
    assert len(tight) == tight.num_bytes == 0


def test_a_damaged_file_is_a_warning_and_a_miss(tmp_path: Path) -> None:
    spill = make(tmp_path)
    for number in (1, 2):
        spill.put(entry(number))
    for path in spill.folder.iterdir():
        path.write_bytes(path.read_bytes()[:-40])
    with pytest.warns(UserWarning, match="computed again: prefix file .* is damaged"):
        assert spill.restore(entry(1).name, b"", entry(1).token_ids) is None
    with pytest.warns(UserWarning, match="computed again"):
        assert spill.restore(entry(2).name, b"", entry(2).token_ids) is None
    assert (len(spill), spill.num_bytes, spill.pool.num_free) == (0, 0, 3)
    spill.put(entry(1))
    with pytest.warns(UserWarning, match="holds another text"):
        assert spill.restore(entry(1).name, b"", entry(2).token_ids) is None


def test_a_folder_that_is_gone_is_a_warning(tmp_path: Path) -> None:
    spill = make(tmp_path)
    spill.close()
    with pytest.warns(UserWarning, match="could not be written"):
        spill.put(entry(1))
    assert len(spill) == 0


def test_folders_are_private_and_go_with_their_owner(tmp_path: Path) -> None:
    one, other = make(tmp_path), make(tmp_path)
    assert one.folder != other.folder and one.folder.stat().st_mode & 0o077 == 0
    folder = one.folder
    del one
    assert not folder.exists() and other.folder.exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(GraftError, match="expected a folder that can be written"):
        make(tmp_path / "file")
