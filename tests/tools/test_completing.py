"""Completing: the cursor, the prompt, the corpus of the repository, where it ends."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longgraft import Engine, SamplingParams
from longgraft.config import GraftError
from longgraft.index.corpus import open_corpus
from longgraft.tools.completing import Budget, cursor_at, repository_corpus, request_for
from longgraft.tree import Source
from tests.index.corpus_cases import write
from tests.models import tiny_model
from tests.saved_model import byte_level, cheap_rows, invoke, save
from tests.test_fim import QWEN
from tests.tools.scripted import quickly, writing

PARAMS = SamplingParams(max_new_tokens=12, seed=1, temperature=0.0)
APP = "from lib.shapes import area\n\n\ndef report(shape):\n    \n\nprint(report(3))\n"
SHAPES = "def area(shape):\n    return shape * shape\n"
FAR = "def report(shape):\n    total = area(shape) + border(shape)\n    return f'{total} square metres in all'\n"


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose tokenizer has Qwen's tokens for filling in."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = byte_level(310)
    tokenizer.add_special_tokens({"additional_special_tokens": QWEN.split()})
    assert len(tokenizer) <= 320
    tiny_model("llama").save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def engine(folder: str) -> Engine:
    return Engine.from_pretrained(folder)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    pytest.importorskip("pathspec")
    files = {"app.py": APP, "lib/shapes.py": SHAPES, "deep/down/below/far.py": FAR, ".gitignore": "made.py\n"}
    root = write(tmp_path / "project", files | {"made.py": "made = 1\n"})
    monkeypatch.chdir(root)
    with quickly():
        os.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
        yield root


def complete(folder: str, *more: str, stdin: str | None = None) -> dict[str, Any]:
    result = invoke(
        "complete", "-m", folder, "-r", ".", "-f", "app.py", "-l", "5", "-n", "12", "--json", *more, stdin=stdin
    )
    assert result.exit_code == 0, result.stderr
    return dict(json.loads(result.stdout))


def test_the_cursor_stands_where_it_is_told(root: Path) -> None:
    end = cursor_at(root, "app.py", 5, None)
    assert (end.path, end.before[-5:], end.behind[:2]) == ("app.py", "\n    ", "\n\n")
    assert cursor_at(root, "app.py", 5, 1).before == end.before[:-4]
    assert cursor_at(root, "app.py", 8, None).behind == "" and cursor_at(root, "new.py", 1, None, "").before == ""
    assert cursor_at(root, str(root / "lib" / "shapes.py"), 1, 5).behind.startswith("area(")
    assert cursor_at(root, "app.py", 2, 2, "a\r\nbc\r\n").before == "a\nb"
    for line, column, said in ((9, None, "the lines 1 to 8"), (0, None, "--line is 0"), (5, 6, "the columns 1 to 5")):
        with pytest.raises(GraftError, match=said):
            cursor_at(root, "app.py", line, column)
    with pytest.raises(GraftError, match="is not in the repository"):
        cursor_at(root, "../outside.py", 1, None, "")
    with pytest.raises(GraftError, match="is no folder"):
        cursor_at(root / "app.py", "app.py", 1, None)
    with pytest.raises(GraftError, match="cannot be read"):
        cursor_at(root, "gone.py", 1, None)


def test_the_prompt_is_the_models_own(engine: Engine, root: Path) -> None:
    request = request_for(engine, cursor_at(root, "app.py", 5, None), PARAMS, Budget())
    text = engine.tokenizer.decode(request.prompt_ids)
    before, behind = APP.split("    \n", 1)
    assert text == (
        f"<|repo_name|>project\n<|file_sep|>lib/shapes.py\n{SHAPES}<|file_sep|>app.py\n"
        f"<|fim_prefix|>{before}    <|fim_suffix|>\n{behind}<|fim_middle|>"
    )
    assert request.related == ("lib/shapes.py",) and request.note == "" and request.params.stop == ()
    assert set(engine.tokenizer.convert_tokens_to_ids(QWEN.split())) <= set(request.params.eos_token_ids or ())


def test_budgets_hold_on_both_sides_of_the_cursor(engine: Engine, root: Path) -> None:
    cursor = cursor_at(root, "app.py", 5, None)
    request = request_for(engine, cursor, PARAMS, Budget(file=40, related=0))
    text = engine.tokenizer.decode(request.prompt_ids).split("<|fim_prefix|>")[1]
    before, behind = text.removesuffix("<|fim_middle|>").split("<|fim_suffix|>")
    assert cursor.before.endswith(before) and cursor.behind.startswith(behind)
    assert len(engine.tokenizer(before)["input_ids"]) == 30 and len(engine.tokenizer(behind)["input_ids"]) == 10
    assert request.related == ()
    with pytest.raises(GraftError, match="leave no room for code"):
        request_for(engine, cursor, SamplingParams(max_new_tokens=2048), Budget())


def test_without_such_tokens_it_goes_on_from_left_to_right(plain_folder: str, root: Path) -> None:
    engine = Engine.from_pretrained(plain_folder)
    request = request_for(engine, cursor_at(root, "app.py", 5, None), PARAMS, Budget())
    text = engine.tokenizer.decode(request.prompt_ids)
    assert text == f"# lib/shapes.py\n{SHAPES}\n# app.py\n" + APP.split("    \n")[0] + "    "
    assert request.params.stop == ("\nprint(report(3))",) and "no tokens for filling in the middle" in request.note
    with writing("return area(shape)\n\nprint(report(3))\nand so on"):
        said = invoke("complete", "-m", plain_folder, "-r", ".", "-f", "app.py", "-l", "5")
    assert said.stdout == "return area(shape)\n" and "no tokens for filling in the middle" in said.stderr
    with pytest.raises(GraftError, match="nothing before the cursor"):
        request_for(engine, cursor_at(root, "new.txt", 1, None, ""), PARAMS, Budget())


def test_the_repository_is_indexed_once_and_kept_up_to_date(engine: Engine, folder: str, root: Path) -> None:
    corpus = repository_corpus(root, engine.tokenizer, folder)
    assert corpus is not None and not corpus.is_relative_to(root)
    with open_corpus(corpus) as opened:
        built, names = opened.manifest, {Path(one.path).name for one in opened.documents}
    assert names == {"app.py", "shapes.py", "far.py", ".gitignore"}
    assert repository_corpus(root, engine.tokenizer, folder) == corpus
    with open_corpus(corpus) as opened:
        assert opened.manifest == built
    (root / "lib" / "new.py").write_text("def border(shape):\n    return 4 * shape\n")
    assert repository_corpus(root, engine.tokenizer, folder) == corpus
    with open_corpus(corpus) as opened:
        assert "new.py" in {Path(one.path).name for one in opened.documents}


def test_a_corpus_that_cannot_be_had_is_no_obstacle(
    engine: Engine, folder: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ["XDG_CACHE_HOME"] = str(root / "app.py")
    assert repository_corpus(root, engine.tokenizer, folder) is None
    assert "the repository's corpus is as it was" in capsys.readouterr().err


def test_tokens_are_copied_from_files_the_model_does_not_see(folder: str, tmp_path: Path) -> None:
    table = cheap_rows(tmp_path / "costs.json")
    answer = "total = area(shape) + border(shape)\n    return f'{total} square metres in all'\n"
    with writing(answer):
        values = complete(folder, "--cost-table", table, "-n", "120")
    assert values["text"] == answer and values["related"] == ["lib/shapes.py"]
    copied = [span for span in values["spans"] if span["source"] == Source.CORPUS.name.lower()]
    assert any(span["file"].endswith("far.py") for span in copied)
    assert values["stats"]["accepted_by_source"]["corpus"] > 20


def test_with_and_without_the_corpus_and_plainly_it_is_the_same(folder: str) -> None:
    grafted, alone, plain = complete(folder), complete(folder, "--no-corpus"), complete(folder, "--plain")
    assert grafted["token_ids"] == alone["token_ids"] == plain["token_ids"]
    assert plain["stats"]["nodes"] == 0 and plain["prompt_tokens"] == grafted["prompt_tokens"]


def test_a_single_line_ends_with_it(folder: str) -> None:
    with writing("return area(shape)\nmore"):
        assert complete(folder, "--single-line", "-n", "40")["text"] == "return area(shape)"
        assert complete(folder, "-n", "40")["text"] == "return area(shape)\nmore"


def test_the_text_of_an_editor_counts(folder: str) -> None:
    typed = complete(folder, "--stdin", stdin=APP.replace("def report", "def report_all"))
    assert typed["prompt_tokens"] > complete(folder)["prompt_tokens"]
