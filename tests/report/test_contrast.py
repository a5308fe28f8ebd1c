"""Contrast of every pair of colours that the style puts together, in both themes, by WCAG 2.2's formula."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest

from longgraft.render import COLOURS as TERMINAL
from longgraft.render import LOOKS

STYLE = resources.files("longgraft.report").joinpath("assets", "page.css").read_text(encoding="utf-8")
PAIR = re.compile(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);")
COLOURS = {name: (light, dark) for name, light, dark in PAIR.findall(STYLE)}
LETTERS = "".join(letter for letter, _, _ in LOOKS.values())
THEMES = ("light", "dark")

# Text and what it stands on: at least 4.5.
TEXT = [
    *(("ink", under) for under in ("page", "card", "edge", *LETTERS)),
    *(("quiet", under) for under in ("page", "card", *LETTERS)),
    *((name, under) for name in ("good", "bad", "accent") for under in ("page", "card")),
    *((f"{letter}-line", under) for letter in LETTERS for under in (letter, "card")),
    *(("card", f"{letter}-line") for letter in LETTERS),
    ("card", "ink"),
]
# Lines, shapes and outlines that carry meaning: at least 3.
SHAPES = [
    *((name, under) for name in ("firm", "accent") for under in ("page", "card")),
    *(("accent", letter) for letter in LETTERS),
]


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_the_formula() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", range(2), ids=THEMES)
@pytest.mark.parametrize("pair", TEXT, ids=" on ".join)
def test_text(pair: tuple[str, str], theme: int) -> None:
    assert contrast(*(COLOURS[name][theme] for name in pair)) >= 4.5


@pytest.mark.parametrize("theme", range(2), ids=THEMES)
@pytest.mark.parametrize("pair", SHAPES, ids=" on ".join)
def test_shapes(pair: tuple[str, str], theme: int) -> None:
    assert contrast(*(COLOURS[name][theme] for name in pair)) >= 3.0


def test_no_colour_outside_the_variables() -> None:
    rest = PAIR.sub("", STYLE)
    assert not re.search(r"#[0-9a-fA-F]{3,8}\b(?=[;,) ])", rest.replace("#text", "").replace("#panel", ""))
    used = set(re.findall(r"var\(--([\w-]+)\)", STYLE)) - {"tint", "mark", "way", "thick", "letter"}
    assert used <= set(COLOURS)


def rule_of(letter: str) -> str:
    (rule,) = re.findall(rf"^\.{letter} {{ (.*) }}$", STYLE, re.M)
    return str(rule)


def test_every_source_can_be_told_without_colour() -> None:
    shapes = set()
    for letter in LETTERS:
        rule = rule_of(letter)
        assert f'--letter: "{letter}"' in rule and f"--tint: var(--{letter});" in rule
        way, thick = (re.search(rf"--{name}: (\w+)", rule) for name in ("way", "thick"))
        shapes.add((way and way.group(1), thick and thick.group(1)))
    assert len(shapes) == len(LETTERS)


def test_the_docs_name_every_source_as_the_page_and_the_terminal_mark_it() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    told = {
        letter: (line, colour)
        for letter, line, colour in re.findall(r"^\| ([A-Z]) \|.*\| (.+) \| (.+) \|$", docs, re.M)
    }
    wanted = {}
    for letter, code, _ in LOOKS.values():
        if not letter:  # drawn by the model: unmarked
            continue
        rule = rule_of(letter)
        way = re.search(r"--way: (\w+)", rule)
        line = (way.group(1) if way else "solid") + (", thick" if "--thick" in rule else "")
        wanted[letter] = (line, ("underlined " if code.startswith("4;") else "") + TERMINAL[code.removeprefix("4;")])
    assert told == wanted
