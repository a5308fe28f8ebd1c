"""The window of features against a plain list of all rows."""

from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, arange

from longgraft.draft.block_window import FeatureWindow

STEPS = st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.integers(0, 12)), max_size=30)


def rows(first: int, count: int) -> Tensor:
    return arange(first, first + count).float()[:, None]


@settings(deadline=None, max_examples=150)
@given(STEPS, st.integers(1, 6), st.integers(0, 5))
def test_context_is_always_a_recent_stretch_of_the_text(
    steps: list[tuple[int, bool, int]], window: int, more: int
) -> None:
    capacity = window + max(more, 1)
    held = FeatureWindow(window, capacity)
    known: list[float] = []  # rows without a gap before the end
    context: list[float] = []
    end = 0
    for count, passes, gap in steps:
        if gap > 10:
            known, end = [], end + gap
        held.append(end, rows(end, count))
        known += [float(end + i) for i in range(count)]
        end += count
        assert held.end == end and held.kept <= window + 9 and (held.kept > 0 or not known)
        if passes and held.kept:
            expected, before = held.next_rows, held.held
            taken, restart = held.take()
            assert len(taken) == expected and before == (0 if restart else len(context))
            context = taken[:, 0].tolist() if restart else context + taken[:, 0].tolist()
            assert context == known[-len(context) :]
            assert min(window, len(known)) <= len(context) <= capacity
            assert held.next_rows == 0 and held.held == len(context)


def test_a_long_prompt_is_cut_and_not_kept_alive() -> None:
    held = FeatureWindow(4, 8)
    chunk = rows(0, 1000)
    held.append(0, chunk)
    taken, restart = held.take()
    assert restart and taken[:, 0].tolist() == [996, 997, 998, 999]
    assert taken.untyped_storage().nbytes() < 100 < chunk.untyped_storage().nbytes()


def test_a_drafter_that_is_not_asked_for_long_holds_a_window_only() -> None:
    held = FeatureWindow(4, 8)
    for position in range(500):
        held.append(position, rows(position, 1))
    assert held.kept == 4 and held.must_restart
    taken, restart = held.take()
    assert restart and taken[:, 0].tolist() == [496, 497, 498, 499]
