"""The matcher says of a text what a new one says, however it came there; what is refused is one sentence."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from longgraft.config import GraftError
from longgraft.grammar import Grammar
from longgraft.matcher import MOST_KEPT, Grammars, Matcher
from tests.grammars import EOS, PERSON, allowed, patched, tokenizer
from tests.models import VOCAB
from tests.small_tokenizers import byte_level, cleaning

pytest.importorskip("llguidance")
PROMPT = [7, 8, 9]
GRAMMARS = {
    "dense": Grammar.json_schema(PERSON, whitespace=False),
    "free": Grammar.json_schema(PERSON),
    "object": Grammar.json_object(),
    "regex": Grammar.regex(r"[a-c]{2,5}(/[0-9]+)?"),
    "lark": Grammar.lark('start: "yes" | "no" | "nobody" TAIL?\nTAIL: /[!?]+/'),
    "gbnf": Grammar.gbnf('root ::= "yes" | "no" | "nobody" tail?\ntail ::= [!?]+  # as loud as you like'),
    "spelled": Grammar.regex("[ab]", lead="END"),
    "thought": Grammar.json_schema(PERSON, whitespace=False, lead="</think>"),
}
TEXTS = {
    "dense": ['{"name": "Jo", "age": 7, "tags": ["red"]}', '{"name": "", "age": 120, "tags": []}'],
    "free": ['{ "name":\n"é", "age":0,"tags":["red" , "blue"]}'],
    "object": ['{"a": [1, null, {"b": true}], "c": "\\n"}'],
    "regex": ["abc", "cc/12"],
    "lark": ["yes", "nobody!!?"],
    "gbnf": ["yes", "nobody!!?"],
    "spelled": ["hm ENENDa", "END\n\nb"],
    "thought": [
        'so so</think>\n{"name": "a", "age": 1, "tags": []}',
        '<think>{</think>{"name": "a", "age": 1, "tags": []}',
    ],
}
CASES = [(name, text) for name, texts in TEXTS.items() for text in texts]
made = Grammars(tokenizer(), VOCAB)


def matcher_of(name: str, prompt_len: int = len(PROMPT)) -> Matcher:
    matcher = made.open(GRAMMARS[name], prompt_len, [EOS])
    assert matcher is not None
    return matcher


def spelled(name: str, text: str) -> list[int]:
    """The tokens of a text as the grammar wants them: where it forces a spelling, that one."""
    walker, tokens = matcher_of(name, 0), list[int]()
    for token in tokenizer()(text)["input_ids"]:
        tokens.append(token)
        assert walker.allows(token) and walker.step(token), (text, tokens)
    return tokens


def mask_of(matcher: Matcher, tokens: list[int], size: int = VOCAB) -> Any:
    scores = matcher.mask([*PROMPT, *tokens], torch.zeros(size, dtype=torch.float64))
    assert set(scores.tolist()) <= {0.0, -np.inf}
    return (scores == 0).numpy()


@pytest.mark.parametrize(("name", "text"), CASES)
def test_whole_answers_are_followed_to_their_end(name: str, text: str) -> None:
    matcher, tokens = matcher_of(name), spelled(name, text)
    for count in range(len(tokens) + 1):
        mask = mask_of(matcher, tokens[:count])
        assert np.array_equal(mask, allowed(GRAMMARS[name], tokens[:count]))
        assert count == len(tokens) or mask[tokens[count]]
    assert mask[EOS], "a complete answer may not end"


@pytest.mark.parametrize("name", GRAMMARS)
def test_eos_comes_nowhere_else(name: str) -> None:
    tokens = spelled(name, TEXTS[name][0])
    ends = [bool(mask_of(matcher_of(name), tokens[:count])[EOS]) for count in range(len(tokens) + 1)]
    assert ends[-1] and not ends[0]
    if name in ("dense", "free", "object", "thought"):
        assert sum(ends) == 1


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(CASES), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 5), st.integers(0, VOCAB - 1))))
def test_walking_ahead_and_back_changes_nothing(case: tuple[str, str], walks: list[tuple[int, int, int]]) -> None:
    name, text = case
    tokens, matcher = spelled(name, text), matcher_of(name)
    for at, ahead, other in [*walks, (len(tokens), 0, 0)]:
        at = min(at, len(tokens))
        assert np.array_equal(mask_of(matcher, tokens[:at]), allowed(GRAMMARS[name], tokens[:at]))
        steps = 0
        for token in [*tokens[at : at + ahead], other]:
            matcher.forced()
            if not matcher.allows(token):
                break
            assert matcher.step(token)
            steps += 1
        if other % 2:  # else whoever asks next has to find the way back
            for _ in range(steps):
                matcher.back()


@pytest.mark.parametrize(("name", "text"), CASES)
def test_what_is_masked_in_may_be_stepped_to_and_what_is_forced_is_alone(name: str, text: str) -> None:
    matcher, tokens, was_forced = matcher_of(name), spelled(name, text), 0
    for count in range(len(tokens) + 1):
        mask = mask_of(matcher, tokens[:count])
        for token in np.flatnonzero(mask):
            assert token == EOS or matcher.allows(int(token))
        assert not matcher.allows(EOS)
        if forced := matcher.forced():
            assert np.flatnonzero(mask).tolist() == forced[:1], "one choice, but the sampler has others"
            assert forced == tokens[count : count + len(forced)]
            was_forced += 1
    assert was_forced or name in ("object", "regex", "lark", "gbnf", "spelled")


def test_other_texts_of_the_same_length_are_read_anew() -> None:
    matcher = matcher_of("regex")
    for text in ("abc", "aab", "cc", "cc/1", "abc"):
        tokens = spelled("regex", text)
        assert np.array_equal(mask_of(matcher, tokens), allowed(GRAMMARS["regex"], tokens))


def test_masks_of_larger_and_of_other_vocabularies() -> None:
    mask = mask_of(matcher_of("object"), [], VOCAB + 40)
    assert not mask[VOCAB:].any() and mask[:VOCAB].any()
    matcher = made.open(GRAMMARS["lark"], 3, [5, 300, VOCAB + 7])
    assert matcher is not None
    mask = mask_of(matcher, spelled("lark", "yes"))
    assert np.flatnonzero(mask).tolist() == [5, 300], "the request's own EOS tokens, not the tokenizer's"
    assert not mask_of(matcher, [])[[5, 300, EOS]].any()


def test_a_tokenizer_with_more_tokens_than_the_model() -> None:
    words = byte_level(VOCAB - 3)
    words.add_tokens(["<a>", "<b>", "<c>", "<d>", "<e>"])
    grammars = Grammars(words, VOCAB)
    matcher = grammars.open(Grammar.regex("ab?", lead="<a>"), 0, [EOS])
    assert matcher is not None
    assert matcher.mask([], torch.zeros(VOCAB)).tolist()[VOCAB - 3] == 0.0
    beyond = grammars.open(Grammar.lark(f"start: <[{VOCAB + 1}]>"), 0, [EOS])
    assert beyond is not None and beyond.forced() == []
    with pytest.raises(GraftError, match="allows no token at output position 0"):
        beyond.mask([], torch.zeros(VOCAB))


def test_forks_are_independent_and_begin_anew() -> None:
    matcher, tokens = matcher_of("dense"), spelled("dense", TEXTS["dense"][0])
    mask_of(matcher, tokens[:5])
    fork = matcher.fork()
    assert np.array_equal(mask_of(fork, tokens[:9]), allowed(GRAMMARS["dense"], tokens[:9]))
    assert np.array_equal(mask_of(matcher, tokens[:6]), allowed(GRAMMARS["dense"], tokens[:6]))


def test_a_walk_that_breaks_the_library_does_not_break_the_answer() -> None:
    matcher, tokens = matcher_of("dense"), spelled("dense", TEXTS["dense"][0])
    mask_of(matcher, tokens[:3])
    assert not matcher.step(tokenizer()("z")["input_ids"][0])  # not asked first: an error it never leaves
    matcher.back()
    assert np.array_equal(mask_of(matcher, tokens[:4]), allowed(GRAMMARS["dense"], tokens[:4]))


def test_a_text_that_does_not_fit_is_one_sentence() -> None:
    with pytest.raises(GraftError, match="does not fit its grammar") as caught:
        mask_of(matcher_of("dense"), spelled("regex", "abc"))
    assert "\n" not in str(caught.value)


BAD = {
    "type": (Grammar.json_schema({"type": "strnig"}), "strnig"),
    "nothing": (Grammar.json_schema(False), "cannot be compiled"),
    "not supported": (Grammar.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "dangling": (Grammar.json_schema({"$ref": "#/$defs/x"}), "cannot be compiled"),
    "regex": (Grammar.regex("(a"), "unclosed group"),
    "lark": (Grammar.lark("start: nowhere"), "nowhere"),
    "no lark": (Grammar.lark("}{"), "cannot be compiled"),
    "gbnf": (Grammar.gbnf("root ::= nowhere"), "read as GBNF: Rule 'nowhere' not found"),
    "no gbnf": (Grammar.gbnf("root ::= ["), "read as GBNF: Unexpected end"),
    "unknown special": (Grammar.lark("start: <|nobody|>"), "nobody"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_grammar_is_one_sentence(name: str) -> None:
    grammar, named = BAD[name]
    for ask in (made.compile, lambda grammar: made.open(grammar, 1, [EOS])):
        with pytest.raises(GraftError, match=named) as caught:
            ask(grammar)
        assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


def test_an_answer_needs_an_end() -> None:
    for ends in ([], [VOCAB + 1]):
        with pytest.raises(GraftError, match="ends with an EOS token"):
            made.open(GRAMMARS["regex"], 1, ends)
    assert made.open(None, 1, []) is None
    made.compile(None)


def _slow() -> Any:
    class Slow:
        def get_vocab(self) -> dict[str, int]:
            return {}

        def __len__(self) -> int:
            return 5

    return Slow()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (None, "give the engine a tokenizer"),
        (cleaning(), "decoder"),
        (_slow(), "Slow"),
    ],
)
def test_a_tokenizer_that_cannot_be_taken_is_one_sentence(words: Any, named: str) -> None:
    with pytest.raises(GraftError, match=named) as caught:
        Grammars(words, VOCAB).compile(GRAMMARS["regex"])
    assert "\n" not in str(caught.value)


def test_what_the_tokenizer_cannot_write_is_one_sentence() -> None:
    inner = Tokenizer(models.BPE({"<e>": 0, "a": 1, "b": 2}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    few = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<e>")
    matcher = Grammars(few, 3).open(Grammar.regex("az"), 0, [0])
    assert matcher is not None and matcher.mask([], torch.zeros(3)).tolist() == [-np.inf, 0.0, -np.inf]
    with pytest.raises(GraftError, match="allows no token at output position 1"):
        matcher.mask([1], torch.zeros(3))


def test_what_is_no_grammar_is_named() -> None:
    with pytest.raises(GraftError, match="grammar is a dict"):
        made.compile({"type": "object"})  # type: ignore[arg-type]


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GraftError, match=r"longgraft\[grammar\]"):
        Grammars(tokenizer(), VOCAB).compile(GRAMMARS["regex"])


def test_compiled_once_kept_up_to_a_cap_from_any_thread() -> None:
    compiled = list[str]()
    import longgraft.matcher as module

    compile_ = module._compile

    def watched(library: Any, words: Any, lark: str) -> Any:
        compiled.append(lark)
        return compile_(library, words, lark)

    with patched(module, "_compile", watched):
        fresh = Grammars(tokenizer(), VOCAB)
        threads = [threading.Thread(target=fresh.compile, args=(GRAMMARS["dense"],)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(compiled) == 1
        for number in range(MOST_KEPT):
            fresh.compile(Grammar.regex(f"a{{{number + 1}}}"))
        assert len(fresh._kept) == MOST_KEPT
        fresh.compile(GRAMMARS["dense"])
    assert len(compiled) == MOST_KEPT + 2


def test_a_slow_grammar_holds_up_nobody_whose_own_is_there() -> None:
    import longgraft.matcher as module

    fresh, is_slow, may_go_on = Grammars(tokenizer(), VOCAB), threading.Event(), threading.Event()
    fresh.compile(GRAMMARS["regex"])
    compile_ = module._compile

    def slow(*arguments: Any) -> Any:
        is_slow.set()
        assert may_go_on.wait(60)
        return compile_(*arguments)

    with patched(module, "_compile", slow):
        thread = threading.Thread(target=fresh.compile, args=(GRAMMARS["dense"],))
        thread.start()
        assert is_slow.wait(60)
        assert fresh.open(GRAMMARS["regex"], 0, [EOS]) is not None
        may_go_on.set()
        thread.join()


@pytest.mark.parametrize("depth", [50, 400])
def test_deep_schemas_are_compiled_or_refused(depth: int) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema, "maxItems": 1}
    try:
        made.compile(Grammar.json_schema(schema))
    except GraftError as error:
        assert "\n" not in str(error)


def test_free_text_may_hold_what_looks_like_an_answer() -> None:
    tokens = spelled("thought", '{"name" no</think>{"name": "", "age": 1, "tags": []}')
    assert json.loads(tokenizer().decode(tokens).split("</think>")[1])["age"] == 1
