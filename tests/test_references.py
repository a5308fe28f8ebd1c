"""What a request may copy from besides itself: it speeds up, changes nothing, and says where it came from."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longgraft.config import EngineConfig, GraftError, SamplingParams
from longgraft.engine import Engine
from longgraft.index.corpus import Corpus, open_corpus
from longgraft.index.corpus_build import build_corpus
from longgraft.references import HISTORY, PREDICTION, References
from longgraft.tree import Source
from tests.engines import all_nodes, engine_for, model_of, one_thread, prompt_of
from tests.small_tokenizers import byte_level

NEW = 40
GREEDY = SamplingParams(temperature=0, max_new_tokens=NEW)
WARM = SamplingParams(temperature=0.9, seed=5, max_new_tokens=NEW)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with one_thread():
        yield


@lru_cache
def truth(params: SamplingParams = GREEDY) -> list[int]:
    return list(engine_for(policy="plain").generate(prompt_of(80), params).token_ids)


def fast_engine(tokenizer: Any = None, **settings: Any) -> Engine:
    return Engine(model_of(), tokenizer, EngineConfig(**settings), cost=all_nodes())


@pytest.mark.parametrize("params", [GREEDY, WARM])
def test_a_prediction_is_copied_and_changes_nothing(params: SamplingParams) -> None:
    expected = truth(params)
    engine = fast_engine()
    alone = engine.generate(prompt_of(80), params)
    output = engine.generate(prompt_of(80), params, references=References(prediction=expected))
    assert list(output.token_ids) == list(alone.token_ids) == expected
    assert output.stats["rounds"] < alone.stats["rounds"] / 2
    assert Source.PREDICTION in output.sources
    place = output.sources.index(Source.PREDICTION)
    number, offset = output.origins[place]
    assert expected[offset] == output.token_ids[place]
    assert number > 0


def test_a_wrong_prediction_changes_nothing() -> None:
    expected = truth()
    wrong = [(token + 1) % 64 for token in expected] + expected[10:20]
    output = fast_engine().generate(prompt_of(80), GREEDY, references=References(prediction=wrong))
    assert list(output.token_ids) == expected


def test_documents_are_named() -> None:
    expected = truth()
    references = References(documents={"a.txt": expected[:20], "b.txt": expected[16:], "empty": []})
    engine = fast_engine(byte_level(300))
    output = engine.generate(prompt_of(80), GREEDY, references=references)
    assert list(output.token_ids) == expected
    assert output.documents == ("", "a.txt", "b.txt")
    copied = [origin for origin, source in zip(output.origins, output.sources) if source == Source.DOCUMENT]
    assert {number for number, _ in copied} == {1, 2}
    for token, source, (number, offset) in zip(output.token_ids, output.sources, output.origins):
        if source == Source.DOCUMENT:
            assert token == (expected[:20] if number == 1 else expected[16:])[offset]


def test_lines_are_those_of_the_text() -> None:
    """The line of a token's origin is one more than the line breaks before it."""
    tokenizer = byte_level(300)
    text = "alpha beta\ngamma delta\n\nepsilon zeta eta\ntheta"
    engine = fast_engine(tokenizer)
    index: Any = engine.retrieval.open(References(documents={"t": text}), engine.encode)
    ids = engine.encode(text)
    lines = index.lines_of([(1, i) for i in range(len(ids))], engine.retrieval.wording.newlines)
    assert lines == [1 + tokenizer.decode(ids[:i]).count("\n") for i in range(len(ids))]
    index.extend(ids)
    assert index.lines_of([(0, i) for i in range(len(ids))], engine.retrieval.wording.newlines) == lines
    assert index.lines_of([(-1, -1), (1, len(ids)), (7, 0)], engine.retrieval.wording.newlines) == [0, 0, 0]


def test_a_tenant_copies_from_its_own_answers() -> None:
    engine = fast_engine(history_tokens=1000)
    prompt = prompt_of(80)
    first = engine.generate(prompt, GREEDY, references=References(tenant="a"))
    other = engine.generate(prompt, GREEDY, references=References(tenant="b"))
    again = engine.generate(prompt, GREEDY, references=References(tenant="a"))
    alone = engine.generate(prompt, GREEDY)
    assert first.token_ids == other.token_ids == again.token_ids == alone.token_ids
    assert other.stats["rounds"] == first.stats["rounds"] == alone.stats["rounds"]
    assert again.stats["rounds"] < first.stats["rounds"] / 2
    assert again.documents == ("", HISTORY) and other.documents == ("",)


def test_a_tenant_needs_something_to_share() -> None:
    engine = engine_for(prefix_cache=False)
    with pytest.raises(GraftError, match="a tenant shares nothing: set history_tokens"):
        engine.generate(prompt_of(80), GREEDY, references=References(tenant="a"))


def make_corpus(folder: Path, tokens: list[int]) -> Corpus:
    """A corpus whose one document decodes to these tokens' text."""
    tokenizer = byte_level(300)
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text(tokenizer.decode(tokens), "utf-8")
    build_corpus(folder / "corpus", [str(folder / "texts")], tokenizer)
    return open_corpus(folder / "corpus")


def test_passages_of_a_corpus_are_brought_and_cited(tmp_path: Path) -> None:
    """The prompt ends in the middle of a document; what follows there is proposed."""
    tokenizer = byte_level(300)
    text = "def scale(values, factor):\n    return [value * factor for value in values]\n" * 2
    ids = tokenizer(text)["input_ids"]
    corpus = make_corpus(tmp_path, ids)
    engine = fast_engine(tokenizer)
    index: Any = engine.retrieval.open(References(corpora=[corpus]), engine.encode)
    stored = corpus.passage(1, 1, 4000).token_ids
    index.extend(stored[:12])
    found = index.draft(20)
    assert found is not None
    node = int(np.flatnonzero((found.sources == Source.CORPUS) & (found.parents == -1))[0])
    assert found.token_ids[node] == stored[12]
    number, offset = found.origins[node].tolist()
    assert index.documents[number].endswith("a.txt")
    assert stored[offset] == stored[12]
    line = index.lines_of([(number, offset)], engine.retrieval.wording.newlines)[0]
    assert line == corpus.origin(0, offset)[1]
    before = index.fed_len
    index.draft(20)
    assert index.fed_len == before > 0, "a passage is brought once"


def test_a_corpus_never_changes_the_output(tmp_path: Path) -> None:
    expected = truth()
    corpus = make_corpus(tmp_path, [*prompt_of(80)[-20:], *expected])
    output = fast_engine(byte_level(300)).generate(prompt_of(80), GREEDY, references=References(corpora=[corpus]))
    assert list(output.token_ids) == expected


def test_a_corpus_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    make_corpus(tmp_path, truth())
    other = byte_level(300)
    other.add_tokens(["another"])
    with pytest.raises(GraftError, match="another tokenizer"):
        fast_engine(other).generate(prompt_of(80), GREEDY, references=References(corpora=[str(tmp_path / "corpus")]))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"documents": ["a"]}, "documents"),
        ({"corpora": "name"}, "corpora"),
        ({"tenant": ""}, "tenant"),
        ({"tenant": 3}, "tenant"),
    ],
)
def test_bad_references_are_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(GraftError, match=named):
        References(**values)


def test_a_bad_text_is_named() -> None:
    with pytest.raises(GraftError, match="document a: prompt token id 99999"):
        fast_engine().generate(prompt_of(80), GREEDY, references=References(documents={"a": [99999]}))
    with pytest.raises(GraftError, match=r"prediction: .*no tokenizer"):
        fast_engine().generate(prompt_of(80), GREEDY, references=References(prediction="text"))
    assert PREDICTION.startswith("(")


def test_plain_decoding_copies_from_nothing() -> None:
    engine = engine_for(policy="plain")
    output = engine.generate(prompt_of(80), GREEDY, references=References(prediction=truth()))
    assert list(output.token_ids) == truth()
    assert output.stats["rounds"] == NEW


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"documents": {"": "text"}}, "documents holds the name ''"),
        ({"documents": {5: "text"}}, "documents holds the name 5"),
        ({"documents": {"a": None}}, "document a is a NoneType"),
        ({"prediction": 5}, "prediction is a int"),
        ({"prediction": b"abc"}, "prediction is a bytes"),
        ({"prediction": (i for i in [1])}, "prediction is a generator"),
        ({"prediction": np.array(3)}, "prediction is a ndarray"),
        ({"prediction": "half \ud800"}, "half a character at place 5"),
        ({"corpora": [5]}, "corpora holds 5"),
    ],
)
def test_what_is_no_reference_is_named_when_it_is_made(values: dict[str, Any], named: str) -> None:
    with pytest.raises(GraftError, match=named):
        References(**values)


@pytest.mark.parametrize("plain", [False, True])
def test_references_are_of_their_own_type(plain: bool) -> None:
    wrong: Any = {"prediction": [1]}
    with pytest.raises(GraftError, match="references is a dict"):
        engine_for(policy="plain" if plain else "adaptive").generate(prompt_of(80), GREEDY, references=wrong)


def test_arrays_are_texts() -> None:
    output = fast_engine().generate(prompt_of(80), GREEDY, references=References(prediction=np.array(truth())))
    assert list(output.token_ids) == truth() and Source.PREDICTION in output.sources


def test_texts_of_one_name_are_told_apart() -> None:
    """A document may be named as a prediction is, and a tenant has many answers: offsets are of one text each."""
    expected = truth()
    index: Any = fast_engine().retrieval.open(
        References(documents={PREDICTION: expected[:20]}, prediction=expected), fast_engine().encode
    )
    assert index.documents == ["", PREDICTION, PREDICTION]
    index.extend(expected[:18])
    found = index.draft(40)
    origins = {int(number): int(offset) for number, offset in found.origins[found.parents == -1] if number > 0}
    assert origins and all(offset == 18 for offset in origins.values())


def corrupt(corpus: Corpus) -> None:
    """Change every page of a corpus's tokens that was not compared yet, in its file."""
    path = corpus.segments[0].path
    data = bytearray(path.read_bytes())
    data[: 4 * corpus.segments[0].record.num_tokens] = bytes(4 * corpus.segments[0].record.num_tokens)
    with path.open("r+b") as file:
        file.write(data)


@pytest.mark.parametrize("spoil", [corrupt, Corpus.close])
def test_a_corpus_that_fails_is_left_out_and_the_request_goes_on(tmp_path: Path, spoil: Any) -> None:
    expected = truth()
    tokens = [*prompt_of(80)[-20:], *expected]
    (tmp_path / "good").mkdir()
    (tmp_path / "bad").mkdir()
    bad, good = make_corpus(tmp_path / "bad", tokens), make_corpus(tmp_path / "good", tokens)
    engine = fast_engine(byte_level(300))
    seq = engine.open(prompt_of(80), GREEDY, references=References(corpora=[bad, good]))
    spoil(bad)
    with pytest.warns(RuntimeWarning, match="goes on without it") as caught:
        for _ in engine.run([seq]):
            pass
    assert len(caught) == 1
    assert list(engine.output(seq).token_ids) == expected


def test_a_closed_corpus_is_refused(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path, truth())
    corpus.close()
    with pytest.raises(GraftError, match="was closed"):
        fast_engine(byte_level(300)).generate(prompt_of(80), GREEDY, references=References(corpora=[corpus]))


def test_an_opened_corpus_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path, truth())
    other = byte_level(300)
    other.add_tokens(["another"])
    with pytest.raises(GraftError, match="another tokenizer"):
        fast_engine(other).generate(prompt_of(80), GREEDY, references=References(corpora=[corpus]))
