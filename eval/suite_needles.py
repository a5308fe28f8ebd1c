"""Facts hidden in a long text, after the manner of RULER: any length, made from a seed, with known answers.

needle: one fact in a text about something else. needles: one key of several has three values, all are asked for.
chain: names are handed on from name to name, scattered over the text. common: which words of a long list occur most.
The text is Python's language reference, real prose that every Python brings along. Knows tokenizers and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

from longgraft.eval.fitting import Messages, Prompt, asked, encode, filled
from longgraft.eval.policy_tasks import turned

ADJECTIVES = "amber brisk calm dusty eager fond gentle hollow icy jolly keen lively mellow noble odd pale quiet".split()
NOUNS = "anchor basin candle dovecote ember ferry garden harbour inkwell jetty kettle lantern meadow orchard".split()
SYLLABLES = "ba co di fe gu ha jo ki lu me no pa ri so tu ve wa xi yo zu".split()
BLOCK, OFTEN, CHAIN = 20, 5, 5
# Words of the longest list: more than fill 128K tokens.
MOST_LINES = 60_000


@dataclass(frozen=True, slots=True)
class Hidden:
    """What is hidden in `lines`, none of which are needed, and what is asked: `facts` are spread in their order."""

    lines: Sequence[str]
    facts: Sequence[str]
    question: str
    answers: tuple[str, ...]


def needle(kind: str, context: int, tokenizer: Any, seed: int) -> Prompt:
    """Return a prompt of `context` tokens; the same for the same seed and tokenizer."""
    hidden = NEEDLES[kind](seed)
    places = sorted(Random(f"places {seed}").random() for _ in hidden.facts)

    def ask(part: Sequence[str]) -> Messages:
        text = list(part)
        for place, fact in reversed(list(zip(places, hidden.facts))):
            text.insert(round(place * len(part)), fact)
        return asked("\n".join(text) + f"\n\n{hidden.question}")

    ids = filled(kind, context, hidden.lines, lambda part: encode(ask(part), tokenizer))
    return Prompt(kind, context, ids, f"seed {seed}", hidden.answers)


def _keys(random: Random, count: int) -> list[str]:
    pairs = [f"{adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS]
    return random.sample(pairs, count)


def _number(random: Random) -> str:
    return str(random.randrange(10**6, 10**7))


def _haystack(seed: int) -> list[str]:
    return [line for _, text in turned(seed) for line in text.splitlines()]


def _needle(seed: int) -> Hidden:
    random = Random(f"needle {seed}")
    (key,), number = _keys(random, 1), _number(random)
    question = f"Which number belongs to the {key}? Give the number alone."
    return Hidden(_haystack(seed), [f"The number of the {key} is {number}."], question, (number,))


def _needles(seed: int) -> Hidden:
    random = Random(f"needles {seed}")
    wanted, *others = _keys(random, 6)
    numbers = [_number(random) for _ in range(3)]
    facts = [f"One number of the {wanted} is {number}." for number in numbers]
    facts += [f"One number of the {key} is {_number(random)}." for key in others]
    random.shuffle(facts)
    question = f"The {wanted} has three numbers. Give all three, and nothing else."
    return Hidden(_haystack(seed), facts, question, tuple(numbers))


def _chain(seed: int) -> Hidden:
    random = Random(f"chain {seed}")
    names = [name.upper() for name in _words(random, 2 * CHAIN)]
    value, other = _number(random), _number(random)
    facts = []
    for number, chain in ((value, names[:CHAIN]), (other, names[CHAIN:])):
        facts += [f"Let {chain[0]} be {number}."] + [f"Let {b} be {a}." for a, b in pairwise(chain)]
    # Interleaved, each chain in its own order.
    facts = [fact for pair in zip(facts[:CHAIN], facts[CHAIN:]) for fact in pair]
    question = f"{CHAIN} names are {value} in the end, by themselves or through another name. Give these names alone."
    return Hidden(_haystack(seed), facts, question, tuple(names[:CHAIN]))


def _common(seed: int) -> Hidden:
    """Every block of lines holds each common word once, so they lead at any length."""
    random = Random(f"common {seed}")
    often, rare, lines = _words(random, OFTEN), BLOCK - OFTEN, []
    for _ in range(MOST_LINES // BLOCK):
        drawn = random.choices(SYLLABLES, k=4 * rare)
        block = often + ["".join(drawn[start : start + 4]) for start in range(0, len(drawn), 4)]
        lines += random.sample(block, BLOCK)
    question = f"Which {OFTEN} words occur most often in this list? Give these words alone."
    return Hidden(lines, [], question, tuple(often))


def _words(random: Random, count: int) -> list[str]:
    """Return different words of three syllables."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(random.choices(SYLLABLES, k=3))] = None
    return list(found)


NEEDLES: dict[str, Callable[[int], Hidden]] = {
    "needle": _needle,
    "needles": _needles,
    "chain": _chain,
    "common": _common,
}
