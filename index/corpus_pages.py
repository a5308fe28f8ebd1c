"""Checksums of a file's pages, each compared the first time the page is read. Knows nothing of what the file holds.

A corpus must open in milliseconds, so it cannot be read through first; and no byte that was changed on the disk may
become a token id. Therefore: one CRC-32 for every 4096 bytes, and a byte a page that says whether it was compared.
`csrc/pages.hpp` does the same and shares that byte.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

PAGE_BYTES = 4096
Bytes = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.uint32]


class Corrupted(Exception):
    """A page does not hold what was written (`page`), or a value lies outside its range (-1)."""

    def __init__(self, page: int) -> None:
        super().__init__(page)
        self.page = page


def num_pages(num_bytes: int) -> int:
    """Return how many pages hold this many bytes."""
    return -(-num_bytes // PAGE_BYTES)


def page_sums(data: Bytes) -> Sums:
    """Return the CRC-32 of every page, the last one as short as it is. [num_pages]"""
    view = data.data
    places = range(0, len(view), PAGE_BYTES)
    return np.fromiter((zlib.crc32(view[at : at + PAGE_BYTES]) for at in places), np.uint32, len(places))


def check_pages(data: Bytes, sums: Sums, checked: Bytes, begin: int, end: int) -> None:
    """Compare the pages that hold bytes [begin, end) and were not compared yet; raises `Corrupted`."""
    first = begin // PAGE_BYTES
    for page in (np.flatnonzero(checked[first : num_pages(end)] == 0) + first).tolist():
        at = page * PAGE_BYTES
        if zlib.crc32(data[at : at + PAGE_BYTES].data) != sums[page]:
            raise Corrupted(page)
        checked[page] = 1
