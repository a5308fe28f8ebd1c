"""A short soak; the long one is run by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from longgraft.eval.soak import soak
from tests import engines


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


def test_nothing_leaks_and_every_request_ends() -> None:
    report = soak(40, seed=3)
    assert report["wrong"] == []
    assert sum(report["ends"].values()) == 40
    assert report["ends"]["error"] > 0 and sum(report["injected"].values()) > 0
    assert report["ends"]["length"] > 12
