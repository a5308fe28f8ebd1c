"""What people and scripts see: marks around runs of tokens, spans, strict JSON."""

import io
import json
from typing import Any

import pytest

from longgraft.config import Output, TokenLogprob
from longgraft.render import (
    Screen,
    brackets,
    citations,
    colours,
    json_line,
    legend,
    no_paint,
    paint_for,
    report,
    spans,
    summary_line,
)
from longgraft.tree import Source
from tests import small_tokenizers as small

TOKENIZER = small.byte_level()
P, H, R, C = int(Source.PROMPT), int(Source.HISTORY), int(Source.ROOT), int(Source.CORPUS)


def output(**changes: Any) -> Output:
    values: dict[str, Any] = {
        "token_ids": (5, 6, 7),
        "text": "abc",
        "finish_reason": "length",
        "seed": 3,
        "prompt_len": 4,
        "sources": (P, P, R),
        "origins": ((0, 1), (0, 2), (-1, -1)),
    }
    return Output(**values | changes)


def shown(text: str, owner_of: Any, paint: Any, stop: Any = (), block: int = 3) -> str:
    """Show `text` in blocks of tokens; `owner_of(i)` is the source of token i."""
    out = io.StringIO()
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    screen = Screen(out, TOKENIZER, [], stop, paint)
    for begin in range(0, len(token_ids), block):
        piece = token_ids[begin : begin + block]
        screen.push(piece, [owner_of(begin + i) for i in range(len(piece))])
    screen.finish()
    return out.getvalue()


def test_unpainted_text_is_the_text_with_one_line_end() -> None:
    assert shown("two words", lambda i: P, no_paint) == "two words\n"
    assert shown("two words\n", lambda i: P, no_paint) == "two words\n"
    assert shown("", lambda i: P, no_paint) == ""


@pytest.mark.parametrize("block", [1, 2, 5])
def test_marks_stand_around_runs_whatever_the_blocks(block: int) -> None:
    text = "zq zq zq zq"
    count = len(TOKENIZER.encode(text, add_special_tokens=False))
    assert count == len(text)
    assert shown(text, lambda i: P if 3 <= i < 8 else R, brackets, block=block) == "zq ⟦P:zq zq⟧ zq\n"
    assert shown(text, lambda i: H if i >= 9 else P, brackets, block=block) == "⟦P:zq zq zq ⟧⟦H:zq⟧\n"
    assert shown(text, lambda i: P if i < 2 else R, colours, block=block) == "\x1b[32mzq\x1b[0m zq zq zq\n"


def test_a_character_split_over_tokens_belongs_to_the_token_that_completes_it() -> None:
    token_ids = TOKENIZER.encode("Ω", add_special_tokens=False)
    assert len(token_ids) == 2
    assert shown("zΩz", lambda i: [R, H, P, R][i], brackets, block=1) == "z⟦P:Ω⟧z\n"


def test_a_stop_string_is_neither_shown_nor_shifts_the_marks() -> None:
    assert shown("qqqzzz", lambda i: P if i >= 2 else R, brackets, stop=("zz",), block=4) == "qq⟦P:q⟧\n"


def test_every_source_has_marks_and_a_name() -> None:
    for source in Source:
        assert (brackets(source) == ("", "")) == (source == Source.ROOT)
        assert (colours(source) == ("", "")) == (source == Source.ROOT)
    assert len({brackets(source) for source in Source}) == len({colours(source) for source in Source}) == len(Source)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_only_where_they_show_and_are_wanted() -> None:
    assert paint_for(Terminal(), {}) is colours
    assert paint_for(io.StringIO(), {}) is brackets
    assert paint_for(Terminal(), {"NO_COLOR": "1"}) is brackets
    assert paint_for(Terminal(), {"NO_COLOR": ""}) is colours
    assert paint_for(Terminal(), {"TERM": "dumb"}) is brackets
    assert paint_for(io.StringIO(), {"FORCE_COLOR": "1"}) is colours
    assert paint_for(io.StringIO(), {"FORCE_COLOR": "1", "NO_COLOR": "1"}) is brackets


def test_legend_names_what_occurs_most_frequent_first() -> None:
    assert legend([R, P, P], brackets) == "⟦P:copied from the prompt⟧ 2 · drawn by the model 1"


def test_a_legend_where_no_colour_shows_names_them() -> None:
    found = legend([P, P, P, C, C, R], colours, in_words=True)
    assert found == "green: copied from the prompt 3 · underlined green: copied from a corpus 2 · drawn by the model 1"
    assert legend([P], brackets, in_words=True) == "⟦P:copied from the prompt⟧ 1"
    for source in Source:
        assert "\x1b" not in legend([source], colours, in_words=True)


def test_spans_join_neighbouring_origins_only() -> None:
    made = output(
        sources=(P, P, P, R, R, H, P),
        origins=((0, 1), (0, 2), (0, 9), (-1, -1), (-1, -1), (0, 10), (1, 11)),
        documents=("", "a.py"),
        lines=(3, 4, 7, 0, 0, 8, 2),
    )
    assert [tuple(span.values()) for span in spans(made)] == [
        (0, 2, "prompt", 0, 1, "", 3),
        (2, 3, "prompt", 0, 9, "", 7),
        (3, 5, "drawn", None, None, None, None),
        (5, 6, "history", 0, 10, "", 8),
        (6, 7, "prompt", 1, 11, "a.py", 2),
    ]
    assert spans(output(sources=(), origins=())) == []


def test_a_known_source_without_origin_is_one_span() -> None:
    s = int(Source.SUCCESSOR)
    made = spans(output(sources=(s, s), origins=((-1, -1), (-1, -1))))
    nowhere = {"document": None, "offset": None, "file": None, "line": None}
    assert made == [{"begin": 0, "end": 2, "source": "successor", **nowhere}]


def test_citations_name_files_and_lines_of_long_runs() -> None:
    n = 9
    made = output(
        token_ids=tuple(range(2 * n + 2)),
        sources=(C,) * (2 * n) + (P, C),
        origins=(*((1, i) for i in range(n)), *((1, 50 + i) for i in range(n)), (0, 3), (2, 0)),
        documents=("", "b.md", "c.md"),
        lines=(4,) * n + (9,) * n + (1, 1),
    )
    assert citations(made) == [f"{2 * n} tokens from b.md, lines 4, 9"]


def test_json_is_one_strict_line() -> None:
    values = report(output(text="a\nb", logprobs=(TokenLogprob(5, float("-inf"), ((5, -0.5), (6, float("nan")))),)))
    line = json_line(values)
    assert "\n" not in line and "NaN" not in line and "Infinity" not in line
    read = json.loads(line)
    assert read["text"] == "a\nb" and read["token_ids"] == [5, 6, 7]
    assert read["logprobs"] == [{"token_id": 5, "logprob": None, "top": [[5, -0.5], [6, None]]}]
    assert "logprobs" not in report(output())


def test_the_summary_line_says_why_only_if_there_is_a_reason() -> None:
    stats = {"new_tokens": 3, "decode_tokens_per_s": 12.34, "acceptance_length": 1.5, "end_to_end_s": 2.0, "why": ""}
    assert summary_line(output(stats=stats)) == "3 tokens (length), 12.3 tokens/s, 1.50 tokens a pass, 2.0 s in all"
    assert summary_line(output(stats=stats | {"why": "because"})).endswith("; because")


def test_citations_keep_files_of_one_name_and_unknown_lines_apart() -> None:
    n = 10
    s = int(Source.CORPUS)
    made = output(
        sources=(s,) * 3 * n,
        origins=tuple((d, i) for d in (1, 2) for i in range(n)) + tuple((1, 50 + i) for i in range(n)),
        documents=("", "a.py", "a.py"),
        lines=(4,) * n + (9,) * n + (0,) * n,
    )
    assert citations(made) == [f"{2 * n} tokens from a.py, lines 4", f"{n} tokens from a.py, lines 9"]
