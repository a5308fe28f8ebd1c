"""Origins in words."""

from dataclasses import replace
from typing import Any

from longgraft.references import HISTORY, PREDICTION
from longgraft.report.places import LONGEST, Places
from tests import small_tokenizers as small
from tests.report.outputs import P, made

TOKENIZER = small.byte_level()


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def places(prompt: str, origins: list[tuple[int, int]], lines: list[int], **texts: str) -> Places:
    names = ("", "a<b>.py", PREDICTION, HISTORY)
    n = len(origins)
    values: dict[str, Any] = {"documents": names, "lines": tuple(lines)}
    output = made(ids("zq")[:1] * n, [P] * n, "z" * n, origins=origins, **values)
    return Places(output, TOKENIZER, ids(prompt), texts)


def test_the_prompt_the_answer_and_documents_have_names_and_lines() -> None:
    prompt = "one\ntwo\nthree"
    far = len(ids(prompt)) + 1
    found = places(prompt, [(0, 4), (0, far), (1, 0), (2, 9), (3, 1), (-1, -1)], [2, 3, 2, 1, 0, 0])
    assert [found.label(i) for i in range(6)] == [
        ("the prompt, line 2", "two"),
        ("this answer, line 1", "threezzzzzz"),
        ("a<b>.py, line 2", ""),
        ("the prediction, line 1", ""),
        ("an earlier answer", ""),
        ("", ""),
    ]


def test_lines_of_known_texts_are_shown_cut_and_safe() -> None:
    origins, lines = [(1, 0), (1, 0), (1, 0)], [2, 3, 9]
    found = places("p", origins, lines, **{"a<b>.py": "x\n  y\u202e  \n" + "w" * 400})
    assert found.label(0) == ("a<b>.py, line 2", "y⟨U+202E⟩")
    assert found.label(1)[1].endswith("w…") and len(found.label(1)[1]) == LONGEST
    assert found.label(2) == ("a<b>.py, line 9", "")


def test_whoever_knows_better_may_say_it() -> None:
    found = replace(
        places("one\ntwo", [(0, 4), (0, 0), (-1, -1)], [2, 1, 0]), notes={0: "a.pdf p. 7\u202e", 2: "b.pdf p. 1"}
    )
    assert [found.label(i) for i in range(3)] == [
        ("a.pdf p. 7⟨U+202E⟩", "twozzz"), ("the prompt, line 1", "one"), ("b.pdf p. 1", "")
    ]  # fmt: skip


def test_an_origin_without_a_name_or_line_is_no_error() -> None:
    found = places("p", [(9, 0), (1, 5), (0, 0)], [])
    assert [found.label(i) for i in range(3)] == [("", ""), ("a<b>.py", ""), ("the prompt", "")]
