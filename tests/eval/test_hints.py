"""Hints are what a store would have said in generation: nothing from the future, and files hold them all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from longgraft.config import GraftError
from longgraft.eval.hidden_states import Thoughts, file_of, save
from longgraft.eval.hints import Hinted, hints_of, load_hints, main, save_hints
from longgraft.eval.traces import Trace
from longgraft.index.dense_store import DenseStore
from tests.eval.thoughts import made_up


def test_hints_come_from_before() -> None:
    thoughts = made_up(0, True)
    hinted, start = hints_of(thoughts, 1, 16), thoughts.trace.prompt_len
    for place in range(start, len(thoughts.trace.token_ids), 17):
        places, cosines = hinted.at(place)
        assert len(places) == 16 and np.all((places >= 2) & (places < place))
        assert np.all(np.diff(cosines) <= 0)
        store = DenseStore(dim=16)
        store.extend(thoughts.states[: start - 1, 0])
        store.search(thoughts.states[start - 2, 0], 1)  # the first search fixes the projection
        store.extend(thoughts.states[start - 1 : place - 1, 0])
        positions, _ = store.search(thoughts.states[place - 2, 0], 16)
        assert places.tolist() == (positions + 2).tolist()


def test_states_of_later_tokens_change_nothing() -> None:
    thoughts = made_up(1, True)
    other = thoughts.states.copy()
    other[400:] = 1.0
    changed = hints_of(Thoughts(thoughts.trace, (1,), other, thoughts.top_ids), 1, 16)
    same = hints_of(thoughts, 1, 16)
    np.testing.assert_array_equal(changed.places[: 402 - 300], same.places[: 402 - 300])


@pytest.mark.parametrize("prompt_len", [0, 1, 2, 5])
def test_a_short_prompt_has_no_hints(prompt_len: int) -> None:
    thoughts = made_up(2, True)
    short = Trace("f", "g", thoughts.trace.token_ids[:12], prompt_len)
    hinted = hints_of(Thoughts(short, (1,), thoughts.states[:12], thoughts.top_ids[:12]), 1)
    assert hinted.places.shape == (12 - prompt_len, 16)
    assert len(hinted.at(11)[0]) == 0


def test_files_hold_what_was_written(tmp_path: Path) -> None:
    thoughts = made_up(3, True)
    states = file_of(tmp_path, "m", (1,), thoughts.trace)
    save(states, thoughts)
    assert main([str(states), "--layer", "1", "--dim", "16", "--out", str(tmp_path / "out")]) == 0
    kept, made = load_hints(tmp_path / "out" / states.name), hints_of(thoughts, 1, 16)
    for name in ("places", "cosines", "top_ids"):
        np.testing.assert_array_equal(getattr(kept, name), getattr(made, name))
    assert (kept.trace.family, kept.trace.prompt_len) == (thoughts.trace.family, 300)


def test_what_are_no_hints_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    thoughts = made_up(4, True)
    hinted = hints_of(thoughts, 1, 16)
    save_hints(tmp_path / "short.npz", Hinted(hinted.trace, hinted.top_ids, hinted.places[1:], hinted.cosines))
    (tmp_path / "empty.npz").write_bytes(b"")
    np.savez(tmp_path / "other.npz", token_ids=hinted.trace.token_ids)
    for name, message in (("short", "do not fit"), ("empty", "cannot be read"), ("other", "cannot be read")):
        with pytest.raises(GraftError, match=message):
            load_hints(tmp_path / f"{name}.npz")
    with pytest.raises(GraftError, match="layer 7"):
        hints_of(thoughts, 7)
    assert main([str(tmp_path / "none.npz"), "--layer", "1", "--out", str(tmp_path)]) == 2
    assert "none.npz" in capsys.readouterr().err
