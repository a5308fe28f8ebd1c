"""An open corpus: lookups, passages, origins, and what is refused when opening."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longgraft.config import GraftError
from longgraft.index import corpus_manifest, corpus_segment, corpus_twin
from longgraft.index.corpus import Corpus, open_corpus
from longgraft.index.corpus_build import build_corpus
from longgraft.index.corpus_tokens import tokenizer_hash
from tests.index.corpus_cases import NATIVE, Characters, each_kind, ids, text_of, write

FILES = {
    "a.txt": "first line\nthe quick brown fox\njumps over\n\n\nthe lazy dog\n",
    "b.py": "import os\n\nprint('the quick brown fox')\n",
    "c.md": "# Title\nthe quick red fox\n",
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write(tmp_path / "files", FILES)
    build_corpus(tmp_path / "corpus", [tmp_path / "files"], Characters(), tokenizer_name="letters")
    return tmp_path / "corpus"


@pytest.fixture
def corpus(place: Path) -> Corpus:
    return open_corpus(place)


def test_a_lookup_finds_the_longest_suffix_and_where_it_occurs(corpus: Corpus) -> None:
    hits = corpus.lookup(ids("zzz the quick "))
    assert (hits.match_len, hits.count) == (len("the quick "), 3) and hits.ends.dtype == np.int64
    found = set()
    for end in hits.ends.tolist():
        passage = corpus.passage(end, before=hits.match_len, after=9)
        assert text_of(passage.token_ids).startswith("the quick ")
        path, line = corpus.origin(passage.document, passage.offset)
        found.add((Path(path).name, line, text_of(passage.token_ids)[10:]))
    assert found == {("a.txt", 2, "brown fox"), ("b.py", 3, "brown fox"), ("c.md", 2, "red fox\n")}
    assert corpus.num_tokens == sum(map(len, FILES.values()))


def test_every_line_is_the_files_own(corpus: Corpus) -> None:
    for number, document in enumerate(corpus.documents):
        text = FILES[Path(document.path).name]
        assert document.num_tokens == len(text) and document.copies == ()
        for offset in range(len(text)):
            assert corpus.origin(number, offset) == (document.path, 1 + text[:offset].count("\n"))


def test_long_lines_and_long_files_have_lines_too(tmp_path: Path) -> None:
    text = "x" * 254 + "\n" + "y" * 255 + "\n" + "z" * 1000 + "\n\n\nlast"
    write(tmp_path / "files", {"long.txt": text})
    build_corpus(tmp_path / "corpus", [tmp_path / "files"], Characters())
    with open_corpus(tmp_path / "corpus") as corpus:
        for offset in (0, 253, 254, 255, 509, 510, 511, 1510, 1511, 1512, 1513, len(text) - 1):
            assert corpus.origin(0, offset)[1] == 1 + text[:offset].count("\n")


def test_passages_are_clipped_to_their_document(corpus: Corpus) -> None:
    texts = [FILES[Path(one.path).name] for one in corpus.documents]
    for _number, text in enumerate(texts):
        (end,) = corpus.lookup(ids(text), limit=1).ends.tolist()
        whole = corpus.passage(end, 10_000, 10_000)
        assert text_of(whole.token_ids) == text and whole.offset == 0
        assert texts[whole.document] == text
        assert corpus.passage(end, 0, 0).token_ids.size == 0
    last = corpus.passage(end, 3, 0)
    assert last.offset == len(text) - 3


@pytest.mark.parametrize("kind", [int, np.int32, np.int64, np.uint32, list, tuple])
def test_contexts_of_any_integer_kind(corpus: Corpus, kind: Any) -> None:
    context = ids("lazy d")
    given = kind(context) if kind in (list, tuple) else np.array(context, kind)
    hits = corpus.lookup(given)
    assert (hits.match_len, hits.count) == (6, 1)
    assert corpus.lookup(np.array(context * 1000, np.int64)[::2]).match_len <= 6


def test_contexts_that_match_nothing(corpus: Corpus) -> None:
    for context in ([], [2**40, 2**31, -7], [300], [*ids("the quick "), 2**33], (), np.zeros(0, np.int64)):
        hits = corpus.lookup(context)
        assert (hits.match_len, hits.count, len(hits.ends)) == (0, 0, 0)
    assert corpus.lookup(ids("q"), min_match=1).count == 3
    assert corpus.lookup(ids("@q")).count == 0


@pytest.mark.parametrize(
    "context", [[0.5], [[1, 2]], 3, "text", [None], np.zeros((2, 2), np.int32), [True], [[1], [1, 2]], {1}]
)
def test_contexts_that_are_refused(corpus: Corpus, context: Any) -> None:
    with pytest.raises(GraftError, match="expected one row of integers"):
        corpus.lookup(context)


def test_a_single_number_is_refused_as_an_array_too(corpus: Corpus) -> None:
    with pytest.raises(GraftError, match="expected one row of integers"):
        corpus.lookup(np.array(5))


def test_numpy_numbers_are_numbers(corpus: Corpus) -> None:
    hits = corpus.lookup(ids("lazy"), min_match=np.int64(2), limit=np.int64(3))  # type: ignore[arg-type]
    assert hits.count == 1 and len(corpus.passage(hits.ends[0], np.int64(2), np.int64(2)).token_ids) == 4  # type: ignore[arg-type]


def test_reading_needs_numpy_alone(place: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from longgraft.index.corpus import open_corpus
assert open_corpus({str(place)!r}).lookup(list(b"the quick ")).count == 3
print(*sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "numpy" in loaded
    assert not loaded & {
        "torch",
        "transformers",
        "tokenizers",
        "pathspec",
        "bs4",
        "pypdf",
        "watchfiles",
        "typer",
        "rich",
    }


def test_arguments_out_of_range_are_refused(corpus: Corpus) -> None:
    for limit in (-1, 1025):
        with pytest.raises(GraftError, match="limit is"):
            corpus.lookup([1], limit=limit)
    total = sum(one.record.num_tokens for one in corpus.segments)
    for end in (0, -1, total + 1):
        with pytest.raises(GraftError, match="as `lookup` returned it"):
            corpus.passage(end, 1, 1)
    with pytest.raises(GraftError, match="expected 0 or more"):
        corpus.passage(1, -1, 1)
    for document, offset in ((-1, 0), (3, 0), (0, -1), (0, 10_000)):
        with pytest.raises(GraftError, match="there is no such place"):
            corpus.origin(document, offset)


def test_a_closed_corpus_says_so(corpus: Corpus) -> None:
    passage = corpus.passage(5, 4, 0)
    corpus.close()
    corpus.close()
    assert len(passage.token_ids) == 4
    for call in (lambda: corpus.lookup([1]), lambda: corpus.passage(1, 1, 1), lambda: corpus.documents):
        with pytest.raises(GraftError, match="was closed"):
            call()


def test_another_tokenizer_is_refused(place: Path) -> None:
    open_corpus(place, tokenizer_hash(Characters())).close()
    with pytest.raises(GraftError, match=r"built with another tokenizer \(letters\)"):
        open_corpus(place, tokenizer_hash(Characters("other")))


def test_a_newer_schema_is_refused(place: Path) -> None:
    values = json.loads((place / "manifest.json").read_text())
    values["schema"] = corpus_manifest.SCHEMA + 1
    (place / "manifest.json").write_text(json.dumps(values))
    with pytest.raises(GraftError, match=r"has schema 2, this longgraft reads 1: upgrade longgraft"):
        open_corpus(place)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"format": "other", "schema": 1}', '{"schema": 1}', "\xff", "[" * 100_000]
)
def test_a_manifest_that_is_none_is_refused(place: Path, text: str) -> None:
    (place / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(GraftError, match=r"manifest\.json is corrupted"):
        open_corpus(place)


def test_a_corpus_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(GraftError, match="there is no corpus"):
        open_corpus(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(GraftError, match="there is no corpus"):
        open_corpus(tmp_path / "file")


@pytest.mark.parametrize("suffix", [".segment", ".files"])
def test_a_missing_file_is_named(place: Path, suffix: str) -> None:
    (path,) = place.glob("*" + suffix)
    path.unlink()
    with pytest.raises(GraftError, match=f"lacks its file .*{path.name}"):
        open_corpus(place)


@pytest.mark.parametrize("size", [0, 1, 100, -1, 5])
@pytest.mark.parametrize("suffix", [".segment", ".files"])
def test_a_file_of_another_length_is_refused(place: Path, suffix: str, size: int) -> None:
    (path,) = place.glob("*" + suffix)
    data = path.read_bytes()
    path.write_bytes(data + bytes(7) if size == 5 else data[:size])
    with pytest.raises(GraftError, match=r"is empty|bytes, not|is corrupted"):
        _ = open_corpus(place).documents


def test_whoever_has_it_open_keeps_reading(place: Path, corpus: Corpus) -> None:
    assert corpus.is_current()
    write(place.parent / "files", {"a.txt": "all new"})
    build_corpus(place, [place.parent / "files"], Characters())
    assert not corpus.is_current()
    assert corpus.lookup(ids("lazy dog")).count == 1
    assert len(corpus.documents) == 3 and corpus.check_integrity() == ""
    with open_corpus(place) as new:
        assert new.is_current() and new.lookup(ids("lazy dog"), 8).count == 0


def verdict_on(place: Path, arrays: corpus_segment.Arrays) -> str:
    """Return what the full check says of a segment with these arrays, checksums and all."""
    manifest = corpus_manifest.read_manifest(place, "corpus")
    record = corpus_segment.save(place, arrays)
    corpus_manifest.write_manifest(place, dataclasses.replace(manifest, segments=(record,)))
    return open_corpus(place).check_integrity()


def test_a_full_check_finds_what_checksums_cannot(place: Path) -> None:
    arrays = corpus_segment.MappedSegment(place, corpus_manifest.read_manifest(place, "").segments[0]).arrays()
    tokens, hashes = arrays.tokens, np.arange(48, dtype=np.uint8)
    assert verdict_on(place, arrays) == ""
    for wanted, changed in (
        ("its ends are not sorted", {"ends": arrays.ends[::-1].copy()}),
        ("outside the vocabulary", {"tokens": np.where(tokens == 10, 999, tokens)}),
        ("does not end at its sentinel", {"tokens": np.where(tokens == 10, -1, tokens)}),
        ("holds a text twice", {"hashes": np.tile(hashes[:16], 3)}),
        ("that no file has", {"hashes": hashes}),
    ):
        assert wanted in verdict_on(place, arrays._replace(**changed))


@each_kind
def test_token_ids_out_of_range_never_leave(place: Path, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest of fewer tokens than the segment holds stands for any way that such ids could come in."""
    monkeypatch.setattr(corpus_segment, "native", lambda: kind)
    corpus = open_corpus(place)
    object.__setattr__(corpus.manifest, "vocab_size", 50)
    (end,) = corpus.lookup(ids("lazy dog")).ends.tolist()
    with pytest.raises(GraftError, match="is corrupted"):
        corpus.passage(end, 8, 0)


def test_without_the_native_module_the_same_is_found(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [open_corpus(place).lookup(ids(text)) for text in ("the quick", "brown fox\n", "zz", "e")]
    monkeypatch.setattr(corpus_segment, "native", lambda: corpus_twin)
    corpus = open_corpus(place)
    for text, hits in zip(("the quick", "brown fox\n", "zz", "e"), wanted):
        found = corpus.lookup(ids(text))
        assert (found.match_len, found.count, found.ends.tolist()) == (hits.match_len, hits.count, hits.ends.tolist())


@each_kind
def test_what_follows_is_what_the_passage_holds(place: Path, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_segment, "native", lambda: kind)
    with open_corpus(place) as corpus:
        total = sum(one.record.num_tokens for one in corpus.segments)
        ends = [end for end in range(1, total + 1) if corpus.passage(end, 1, 0).token_ids.size]
        for length in (0, 1, 7, 300):
            rows = corpus.following(ends, length)
            assert rows.shape == (len(ends), length)
            for end, row in zip(ends, rows):
                wanted = corpus.passage(end, 0, length).token_ids.tolist()
                assert row.tolist() == wanted + [-1] * (length - len(wanted))
        assert corpus.following([], 3).shape == (0, 3)
        hits = corpus.lookup(ids("the quick "))
        assert {text_of(row) for row in corpus.following(hits.ends, 5)} == {"brown", "red f"}
        for bad in ([0], [total + 1], [-5]):
            with pytest.raises(GraftError, match="ends are"):
                corpus.following(bad, 1)
        with pytest.raises(GraftError, match="length is"):
            corpus.following([1], -1)
        object.__setattr__(corpus.manifest, "vocab_size", 50)
        with pytest.raises(GraftError, match="is corrupted"):
            corpus.following(hits.ends, 5)


def test_a_missing_native_module_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "longgraft.index._corpus", None)
    monkeypatch.delattr("longgraft.index._corpus", raising=False)
    with pytest.warns(RuntimeWarning, match="without its native corpus module"):
        assert corpus_segment.native.__wrapped__() is corpus_twin


def test_the_native_module_is_used_where_it_was_built() -> None:
    assert corpus_segment.native() is (NATIVE or corpus_twin)
