"""Chunks in files: what is read is what was written, or one clear error."""

from __future__ import annotations

import json
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from longgraft.config import GraftError
from longgraft.pool import ChunkPool, LayerShape
from longgraft.prefix_file import Piece, PrefixFile, write

LAYERS = (LayerShape(2, 4, 4), LayerShape(1, 3, 5), LayerShape(2, 4, 4))
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def make_pool(dtype: torch.dtype = torch.float32, side: int = 3) -> ChunkPool:
    pool = ChunkPool(LAYERS, 4, dtype, chunk_rows=4, side=side)
    for number, group in enumerate(pool._groups):
        group.copy_(torch.arange(group.numel()).reshape(group.shape) % 251 + number)
    return pool


def pieces(side: tuple[int, int] = (1, 4)) -> list[Piece]:
    tokens = np.arange(6, dtype=np.int32)
    return [Piece(2, tokens[:4], side), Piece(0, tokens[4:], (0, 2))]


def rows(pool: ChunkPool, chunk: int, count: int) -> list[torch.Tensor]:
    return [part.clone() for part in pool.rows_of(chunk, count)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_read_is_what_was_written(dtype: torch.dtype, tmp_path: Path) -> None:
    path, pool, other = tmp_path / "p", make_pool(dtype), make_pool(dtype)
    size = write(path, pool, pieces(), {"a": 1})
    assert size == path.stat().st_size and [one.name for one in tmp_path.iterdir()] == ["p"]
    for group in other._groups:
        group.zero_()
    file = PrefixFile(path)
    assert (len(file), file.about, file.chunk_rows, file.side(0)) == (2, {"a": 1}, 4, (1, 4))
    assert [one.tolist() for one in file.tokens()] == [[0, 1, 2, 3], [4, 5]]
    for number, (piece, chunk) in enumerate(zip(pieces(), (1, 3))):
        file.read(number, other, Piece(chunk, piece.token_ids, piece.side), has_side=True)
        count = len(piece.token_ids)
        assert all(map(torch.equal, rows(other, chunk, count), rows(pool, piece.chunk, count)))
        assert pool.side is not None and other.side is not None
        first, last = piece.side
        assert torch.equal(
            other.side[4 * chunk + first : 4 * chunk + last],
            pool.side[4 * piece.chunk + first : 4 * piece.chunk + last],
        )
    assert other.side is not None and not other.side[4].any()


def test_any_reader_of_safetensors_reads_it(tmp_path: Path) -> None:
    pool = make_pool()
    write(tmp_path / "p", pool, pieces(), {})
    with safe_open(str(tmp_path / "p"), framework="pt") as file:
        assert torch.equal(file.get_tensor("0.0"), pool.rows_of(2, 4)[0])
        assert file.get_tensor("1.tokens").tolist() == [4, 5]


def test_side_rows_may_be_left_out(tmp_path: Path) -> None:
    """A pool without them, or with others, takes the keys alone."""
    write(tmp_path / "p", make_pool(), pieces(), {})
    for side in (0, 5):
        pool = make_pool(side=side)
        PrefixFile(tmp_path / "p").read(0, pool, pieces()[0], has_side=False)
    write(tmp_path / "q", make_pool(side=0), pieces((0, 0)), {})
    assert PrefixFile(tmp_path / "q").side(0) == (0, 0)


def read_all(path: Path, pool: ChunkPool) -> None:
    file = PrefixFile(path)
    for number, text in enumerate(file.tokens()):
        file.read(number, pool, Piece(number, text, file.side(number)), has_side=True)


def test_every_damaged_byte_is_found(tmp_path: Path) -> None:
    path, pool = tmp_path / "p", make_pool()
    write(path, pool, pieces(), {"a": 1})
    good = path.read_bytes()
    read_all(path, pool)
    header = struct.unpack("<Q", good[:8])[0]
    spaces = len(good[: 8 + header]) - len(good[: 8 + header].rstrip(b" "))
    for place in [*range(0, 8 + header - spaces, 7), *range(8 + header, len(good), 3)]:
        path.write_bytes(good[:place] + bytes([good[place] ^ 0x11]) + good[place + 1 :])
        with pytest.raises(GraftError, match=r"prefix file .*p"):
            read_all(path, pool)


@pytest.mark.parametrize("length", [0, 1, 8, 40, 400, -1])
def test_a_cut_file_is_one_clear_error(length: int, tmp_path: Path) -> None:
    path = tmp_path / "p"
    write(path, make_pool(), pieces(), {})
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(GraftError, match=f"prefix file {path} is damaged: .*; save it again"):
        read_all(path, make_pool())


def test_what_is_no_saved_prefix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GraftError, match="no such file; expected one that save_prefix wrote"):
        PrefixFile(tmp_path / "none")
    with pytest.raises(GraftError, match="no such file"):
        PrefixFile(tmp_path)
    save_file({"x": torch.zeros(2)}, tmp_path / "other")
    with pytest.raises(GraftError, match="not a saved prefix"):
        PrefixFile(tmp_path / "other")
    for inner, message in (('{"version": 99, "about": {}, "chunk_rows": 4}', "format 99"), ("[]", "is damaged")):
        save_file({"x": torch.zeros(2)}, tmp_path / "new", {"longgraft_prefix": inner})
        with pytest.raises(GraftError, match=message):
            PrefixFile(tmp_path / "new")


def test_pieces_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """A short piece before others, as no writer of ours leaves one."""
    tokens = np.arange(3, dtype=np.int32)
    write(tmp_path / "p", make_pool(), [Piece(0, tokens, (0, 0)), Piece(1, tokens, (0, 0))], {})
    with pytest.raises(GraftError, match="does not fit among the others"):
        PrefixFile(tmp_path / "p").tokens()


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    pool = make_pool()
    broken = [pieces()[0], Piece(10**6, np.arange(4, dtype=np.int32), (0, 4))]
    pool.side = None
    with pytest.raises(ValueError, match=r"."):
        write(tmp_path / "p", pool, [broken[0], Piece(0, np.array(["x"] * 4), (0, 0))], {})  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_the_header_holds_no_tensor_twice(tmp_path: Path) -> None:
    write(tmp_path / "p", make_pool(), pieces(), {})
    data = (tmp_path / "p").read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    spans = sorted(one["data_offsets"] for name, one in header.items() if name != "__metadata__")
    assert spans[0][0] == 0 and all(one[1] == other[0] for one, other in pairwise(spans))
    assert 8 + struct.unpack("<Q", data[:8])[0] + spans[-1][1] == len(data)
