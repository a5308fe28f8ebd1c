"""The sums of a report."""

from dataclasses import replace

from longgraft.audit import Audit, Difference
from longgraft.report.totals import headline, rows_of, shares_of, verdict_of
from tests.report.outputs import D, P, R, made

IDS = [5, 6, 7, 8, 9, 10]
OUTPUT = made(IDS, [P, D, R, P, P, R], "abcdef")
PLAIN = made(IDS, [R] * 6, "abcdef", wrong=0)


def test_rows_beside_plain_decoding_say_how_many_times_better() -> None:
    found = {row.name: row for row in rows_of(OUTPUT, PLAIN)}
    assert (found["passes of the model"].grafted, found["passes of the model"].plain) == ("2", "6")
    assert found["passes of the model"].gain == found["tokens a pass"].gain == "3.00x"
    assert found["decoding speed"].gain == "3.00x" and found["decoding time"].gain == "3.00x"
    assert found["reading the prompt"].gain == ""
    assert all(row.plain == row.gain == "" for row in rows_of(OUTPUT, None))


def test_no_division_by_nothing() -> None:
    empty = made([], [], "")
    assert [row.gain for row in rows_of(empty, empty)] == [""] * 6
    assert "0 tokens in 0 passes" in headline(empty, Audit(empty, empty, ()))


def test_shares_count_tokens_and_nodes_most_frequent_first() -> None:
    assert [(s.letter, s.tokens, s.proposed, s.accepted) for s in shares_of(OUTPUT)] == [
        ("P", 3, 3, 3), ("", 2, 0, 0), ("D", 1, 1, 1), ("S", 0, 2, 0)
    ]  # fmt: skip


def test_the_verdict_is_said_as_it_is() -> None:
    same = Audit(PLAIN, OUTPUT, ())
    assert "the same 6 tokens" in verdict_of(same) and "3.00x plain" in headline(OUTPUT, same)
    assert verdict_of(None) == "" and "plain" not in headline(OUTPUT, None)
    differs = replace(same, differences=(Difference(1, 2, 3, "MISMATCH", None, 0.0),))
    assert "mistake in longgraft" in verdict_of(differs)
