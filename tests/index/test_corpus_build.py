"""Building and updating: what is read again, what is dropped, how segments are merged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longgraft.config import GraftError
from longgraft.index import corpus_build
from longgraft.index.corpus import open_corpus
from longgraft.index.corpus_build import build_corpus, merge_plan, refresh_corpus
from longgraft.index.corpus_manifest import UNKNOWN
from tests.index.corpus_cases import QUICK, Characters, ids, text_of, write

LONG_AGO = 1_500_000_000


class Place:
    """A folder of files and the corpus of it."""

    def __init__(self, root: Path) -> None:
        self.files, self.corpus, self.tokenizer = root / "files", root / "corpus", Characters()
        self.files.mkdir()

    def write(self, **files: str) -> None:
        write(self.files, {name.replace("_", "."): text for name, text in files.items()})

    def build(self) -> corpus_build.Change:
        return build_corpus(self.corpus, [self.files], self.tokenizer)

    def refresh(self) -> corpus_build.Change:
        return refresh_corpus(self.corpus, self.tokenizer)

    def texts(self) -> dict[str, str]:
        """Return {file name: text} as the corpus holds it, its integrity checked."""
        with open_corpus(self.corpus) as corpus:
            assert corpus.check_integrity() == ""
            found = {}
            bases = np.cumsum([0, *(one.record.num_tokens for one in corpus.segments)])
            ends = [int(b + s) for b, one in zip(bases, corpus.segments) for s in one.starts[1:] - 1]
            for document, end in zip(corpus.documents, ends):
                found[Path(document.path).name] = text_of(corpus.passage(end, 10**6, 0).token_ids)
            return found

    def segments(self) -> list[int]:
        with open_corpus(self.corpus) as corpus:
            return [one.record.num_tokens for one in corpus.segments]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_only_changed_files_are_tokenised(place: Place) -> None:
    place.write(a_txt="alpha " * 50, b_txt="beta " * 50)
    place.build()
    assert place.tokenizer.num_encoded == 2
    change = place.refresh()
    assert not change.is_new and place.tokenizer.num_encoded == 2
    place.write(b_txt="gamma " * 50, c_txt="delta")
    change = place.refresh()
    assert (change.is_new, change.num_added, change.num_dropped) == (True, 2, 1)
    assert place.tokenizer.num_encoded == 4
    assert place.texts() == {"a.txt": "alpha " * 50, "b.txt": "gamma " * 50, "c.txt": "delta"}


def test_old_files_are_not_even_opened(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.write(a_txt="alpha", b_bin="x\0y", c_txt="gamma")
    for path in place.files.iterdir():
        os.utime(path, (LONG_AGO, LONG_AGO))
    monkeypatch.setattr("longgraft.index.corpus_survey.RACE_NS", 0)
    place.build()
    opened = []
    true_open = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: (opened.append(self.name), true_open(self, *a, **k))[1])
    assert not place.refresh().is_new
    assert not {"a.txt", "b.bin", "c.txt"} & set(opened)
    place.write(c_txt="GAMMA")  # as long as before
    os.utime(place.files / "c.txt", (LONG_AGO, LONG_AGO))
    assert place.refresh().num_added == 1
    assert place.texts() == {"a.txt": "alpha", "c.txt": "GAMMA"}


def test_a_file_written_in_the_same_moment_is_read_again(place: Place) -> None:
    place.write(a_txt="alpha")
    place.build()
    with open_corpus(place.corpus) as corpus:
        assert [row.stamp for row in corpus.rows()] == [UNKNOWN]
    (place.files / "a.txt").write_text("ALPHA")
    assert place.refresh().num_added == 1
    assert place.texts() == {"a.txt": "ALPHA"}


def test_copies_are_stored_once_and_reported(place: Place) -> None:
    place.write(a_txt="same text", b_txt="same text", c_txt="same text\r\n", d_txt="same text\n")
    change = place.build()
    assert (change.manifest.num_files, change.manifest.num_copies, change.num_added) == (4, 2, 2)
    with open_corpus(place.corpus) as corpus:
        copies = {Path(one.path).name: [Path(path).name for path in one.copies] for one in corpus.documents}
    assert copies == {"a.txt": ["b.txt"], "c.txt": ["d.txt"]}
    (place.files / "a.txt").unlink()
    change = place.refresh()
    assert not change.is_new and place.tokenizer.num_encoded == 2
    assert place.texts() == {"b.txt": "same text", "c.txt": "same text\n"}


def test_a_renamed_file_costs_nothing(place: Place) -> None:
    place.write(a_txt="some text", b_txt="other")
    before = place.build().manifest.segments
    (place.files / "a.txt").rename(place.files / "z.txt")
    change = place.refresh()
    assert not change.is_new and change.manifest.segments == before
    assert place.texts() == {"z.txt": "some text", "b.txt": "other"}


def test_deleted_files_are_dropped(place: Place) -> None:
    place.write(a_txt="alpha", b_txt="beta", c_txt="gamma")
    place.build()
    (place.files / "b.txt").unlink()
    assert place.refresh().num_dropped == 1
    assert place.texts() == {"a.txt": "alpha", "c.txt": "gamma"}
    for name in ("a.txt", "c.txt"):
        (place.files / name).unlink()
    assert place.refresh().num_dropped == 2
    with open_corpus(place.corpus) as corpus:
        assert corpus.lookup(ids("alpha"), 1).count == 0 and corpus.num_tokens == 0 and corpus.documents == ()
    place.write(d_txt="delta")
    assert place.refresh().num_added == 1
    assert place.texts() == {"d.txt": "delta"}


@settings(QUICK, max_examples=12)
@given(st.lists(st.dictionaries(st.sampled_from("abcdef"), st.text("xy\n", min_size=1, max_size=30)), max_size=5))
def test_any_history_ends_where_a_new_build_would(
    tmp_path_factory: pytest.TempPathFactory, versions: list[dict[str, str]]
) -> None:
    place = Place(tmp_path_factory.mktemp("history"))
    place.write(first="keep this")
    place.build()
    files: dict[str, str] = {}
    for files in versions:
        for path in place.files.iterdir():
            if path.name != "first":
                path.unlink()
        place.write(**files)
        place.refresh()
    wanted = {text for text in ["keep this", *files.values()] if text.strip()}
    assert set(place.texts().values()) == wanted
    names = {path.name for path in place.corpus.iterdir()}
    assert len(names) == 3 + len(place.segments())  # nothing is left of older versions


def test_small_segments_are_merged_and_large_ones_left(place: Place) -> None:
    place.write(big="".join(chr(97 + i * i % 26) for i in range(5000)))
    place.build()
    for i in range(12):
        place.write(**{f"small{i}": f"text number {i} " * 5})
        place.refresh()
        assert place.segments()[0] == 5001 and len(place.segments()) <= 3
    assert len(place.texts()) == 13


@QUICK
@given(st.lists(st.integers(1, 1 << 25), max_size=30))
def test_a_merge_plan_takes_each_once_and_keeps_limits(sizes: list[int]) -> None:
    plan = merge_plan(sizes)
    assert sorted(i for group in plan for i in group) == list(range(len(sizes)))
    for group in plan:
        assert len(group) == 1 or sum(sizes[i] for i in group) <= corpus_build.SEGMENT_TOKENS
    fits = sum(sizes) <= corpus_build.SEGMENT_TOKENS
    assert len(plan) <= corpus_build.MAX_SEGMENTS or not fits
    assert [max(group) for group in plan] == sorted(max(group) for group in plan)


def test_a_plan_of_plans() -> None:
    assert merge_plan([]) == []
    assert merge_plan([7]) == [[0]]
    assert merge_plan([1000, 10, 10]) == [[0], [1, 2]]
    assert merge_plan([1000, 10, 250]) == [[0], [1], [2]]
    assert merge_plan([1000, 10, 40, 200]) == [[0, 1, 2, 3]]


def test_full_segments_are_written_at_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_build, "SEGMENT_TOKENS", 100)
    monkeypatch.setattr("longgraft.index.corpus_survey.BATCH_CHARS", 10)
    texts = {f"f{i}": f"{i} " * (3 + i * 7 % 30) for i in range(20)}
    place.write(**texts)
    place.build()
    assert place.texts() == texts
    assert all(size <= 101 for size in place.segments()) and len(place.segments()) > 8


def test_skipped_files_are_counted_by_reason(place: Place) -> None:
    place.write(a_txt="text", empty_txt="  \n", bin_dat="a\0b", _gitignore="secret*\n", secret_txt="x")
    place.write(large_txt="y" * 200)
    (place.files / "link").symlink_to(place.files / "a.txt")
    change = build_corpus(place.corpus, [place.files], place.tokenizer, max_file_bytes=100)
    assert change.manifest.skipped == {"binary": 1, "empty": 1, "ignored": 1, "symbolic link": 1, "too large": 1}
    assert set(place.texts()) == {"a.txt", ".gitignore"}


def test_what_cannot_be_built_is_one_sentence(place: Place, tmp_path: Path) -> None:
    with pytest.raises(GraftError, match=r"no text was found in .*files \(no files at all\)"):
        place.build()
    assert [path.name for path in place.corpus.iterdir()] == ["lock"]
    place.write(bin_dat="\0")
    with pytest.raises(GraftError, match=r"\(1 binary\)"):
        place.build()
    with pytest.raises(GraftError, match="absent is not there"):
        build_corpus(place.corpus, [tmp_path / "absent"], place.tokenizer)
    with pytest.raises(GraftError, match="no path was given"):
        build_corpus(place.corpus, [], place.tokenizer)
    with pytest.raises(GraftError, match=r"holds 'bin\.dat', which is no corpus's"):
        build_corpus(place.files, [place.files], place.tokenizer)
    with pytest.raises(GraftError, match="has no fast backend"):
        build_corpus(place.corpus, [place.files], object())
    with pytest.raises(GraftError, match="max_file_bytes is 0"):
        build_corpus(place.corpus, [place.files], place.tokenizer, max_file_bytes=0)
    with pytest.raises(GraftError, match="there is no corpus"):
        refresh_corpus(tmp_path / "none", place.tokenizer)
    assert not (tmp_path / "none").exists()


def test_updating_with_another_tokenizer_or_without_the_files_is_refused(place: Place) -> None:
    place.write(a_txt="alpha")
    place.build()
    with pytest.raises(GraftError, match="another tokenizer"):
        refresh_corpus(place.corpus, Characters("other"))
    place.files.rename(place.files.with_name("moved"))
    with pytest.raises(GraftError, match="files is not there"):
        place.refresh()
    assert set(place.texts().values()) == {"alpha"}


def test_a_failure_leaves_the_old_version(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.write(a_txt="alpha")
    place.build()
    place.write(b_txt="beta")
    before = sorted(path.name for path in place.corpus.iterdir())

    def broken(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(place.tokenizer, "encode_batch_fast", broken)
    with pytest.raises(KeyboardInterrupt):
        place.refresh()
    assert sorted(path.name for path in place.corpus.iterdir()) == before
    assert place.texts() == {"a.txt": "alpha"}


def test_building_again_replaces(place: Place, tmp_path: Path) -> None:
    place.write(a_txt="alpha")
    place.build()
    write(tmp_path / "more", {"b.txt": "beta"})
    build_corpus(place.corpus, [tmp_path / "more"], place.tokenizer)
    assert place.texts() == {"b.txt": "beta"}


def test_a_corpus_inside_its_own_files_does_not_index_itself(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "alpha"})
    for _ in range(2):
        change = build_corpus(tmp_path / "corpus", [tmp_path], Characters())
        assert change.manifest.num_files == 1
    assert not refresh_corpus(tmp_path / "corpus", Characters()).is_new


def test_progress_is_told(place: Place) -> None:
    place.write(**{f"f{i}": f"text {i}" for i in range(100)})
    seen: list[tuple[int, int]] = []
    build_corpus(
        place.corpus, [place.files], place.tokenizer, progress=lambda files, tokens: seen.append((files, tokens))
    )
    assert [files for files, _ in seen] == [0, 64]
