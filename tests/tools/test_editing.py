"""Editing: from the instruction to the diff and the file."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from longgraft import Engine, EngineConfig, SamplingParams
from longgraft.audit import plain_twin
from longgraft.config import GraftError
from longgraft.tools.editing import rewrite
from longgraft.tools.lines import lines_of
from longgraft.tools.source_file import read_source
from longgraft.tree import Source
from tests.saved_model import invoke, last_json
from tests.tools.scripted import quickly, writing
from tests.tools.test_fences import FILE, MARKDOWN

EDITED = FILE.replace('"two"', '"three"')
ASK = "Say three in place of two."


@pytest.fixture(autouse=True)
def calmly() -> Iterator[None]:
    with quickly():
        yield


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "paths.py"
    path.write_bytes(FILE.replace("\n", "\r\n").encode())
    path.chmod(0o640)
    return path


def test_the_request_holds_the_file_and_begins_the_answer(engine: Engine, path: Path) -> None:
    with writing(f"{EDITED}```"):
        found = rewrite(engine, read_source(str(path)), ASK, SamplingParams())
    assert found.raw == EDITED.replace("\n", "\r\n") and found.reason == ""
    assert found.output.finish_reason == "eos"
    # Everything up to the edit was offered as it stands in the original.
    sources = set(found.output.sources)
    assert sources & {Source.PREDICTION, Source.PROMPT} and found.output.stats["acceptance_length"] > 2


def test_remarks_are_not_waited_for(engine: Engine, path: Path) -> None:
    answer = f"{FILE.replace('first', 'begin', 1)}```\n\nI changed"
    with writing(f"{answer} one name and nothing else at all.", end=False):
        found = rewrite(engine, read_source(str(path)), ASK, SamplingParams())
    assert found.output.finish_reason == "stop" and found.output.text.startswith(answer.split("\n\nI")[0])
    assert "nothing else" not in found.output.text
    assert found.diff.count("\n-") == 1 and "+def begin(x):\r\n" in found.diff


def test_an_answer_ends_where_plain_decoding_ends_it(engine: Engine, path: Path) -> None:
    """Not with the block of tokens in which the file became whole."""
    answer = f"{FILE.replace('first', 'begin', 1)}```\n\nI changed one name, and more of that."
    with writing(answer, end=False):
        one, other = (rewrite(e, read_source(str(path)), ASK, SamplingParams()) for e in (engine, plain_twin(engine)))
    assert one.output.token_ids == other.output.token_ids and one.output.text == other.output.text
    assert one.output.text == answer.partition("\n\nI")[0] + "\n" and len(one.output.lines) == len(one.output.token_ids)
    assert one.diff == other.diff != "" and one.output.stats["rounds"] < other.output.stats["rounds"]


def test_a_file_with_code_blocks(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "use.md"
    path.write_text(MARKDOWN)
    with writing(f"{MARKDOWN.replace('make', 'ninja')}````\n\nDone."):
        found = rewrite(engine, read_source(str(path)), ASK, SamplingParams())
    assert found.raw == MARKDOWN.replace("make", "ninja")


def edit(folder: str, path: Path, *more: str) -> tuple[int, str, str]:
    result = invoke("edit", "--model", folder, "--file", str(path), ASK, *more)
    return result.exit_code, result.stdout, result.stderr


def test_the_diff_is_printed_and_nothing_written(folder: str, path: Path) -> None:
    before = path.read_bytes()
    with writing(f"{EDITED}```"):
        code, diff, said = edit(folder, path)
    assert (code, said, path.read_bytes()) == (0, "", before)
    diff = "".join(line if line[:2] in ("--", "++", "@@") else line[:-1] + "\r\n" for line in lines_of(diff))
    done = subprocess.run(
        ["git", "apply", "-p0", "--unsafe-paths", "-"],
        cwd=path.parent,
        input=diff.replace(f"a{path}", path.name).replace(f"b{path}", path.name).encode(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == EDITED.replace("\n", "\r\n").encode()


def test_write_puts_it_in_place(folder: str, path: Path) -> None:
    with writing(f"{EDITED}```"):
        result = invoke("edit", "-m", folder, "-f", str(path), ASK, "--write", "--json")
    values = last_json(result.stdout)
    assert result.exit_code == 0 and values["written"] and '+    return first(x) + "three"' in values["diff"]
    assert path.read_bytes() == EDITED.replace("\n", "\r\n").encode() and path.stat().st_mode & 0o777 == 0o640
    with writing(f"{EDITED}```"):
        code, diff, said = edit(folder, path, "--write")
    assert (code, diff) == (0, "") and "the answer changes nothing" in said


@pytest.mark.parametrize(
    ("answer", "more", "why"),
    [
        (f"{EDITED}```", ["-n", "20"], "was cut after 20 new tokens: raise --max-new-tokens"),
        (EDITED, [], "the answer's code block was never closed"),
        ("import os\n# ... rest of the file unchanged\n```", [], "leaves parts of the file out"),
    ],
)
def test_an_answer_that_is_not_whole_is_never_written(
    folder: str, path: Path, answer: str, more: list[str], why: str
) -> None:
    before = path.read_bytes()
    with writing(answer):
        code, diff, said = edit(folder, path, "--write", *more)
    assert (code, diff, path.read_bytes()) == (1, "", before)
    assert why in said and said.endswith("nothing was written\n")


def test_plain_decoding_gives_the_same_file(folder: str, path: Path) -> None:
    with writing(f"{EDITED}```"):
        grafted, plain = (last_json(edit(folder, path, "--json", *more)[1]) for more in ([], ["--plain"]))
    assert grafted["diff"] == plain["diff"] and grafted["token_ids"] == plain["token_ids"]
    assert plain["stats"]["nodes"] == 0 < grafted["stats"]["accepted"]


def test_mistakes_are_named(folder: str, path: Path, engine: Engine) -> None:
    assert "the instruction is empty" in invoke("edit", "-m", folder, "-f", str(path), " ").stderr
    gone = invoke("edit", "-m", folder, "-f", str(path.with_name("gone")), ASK)
    assert gone.exit_code == 2 and "cannot be read" in gone.stderr
    path.write_text(FILE * 12)
    with pytest.raises(GraftError, match=r"whole in prompt and answer it needs about \d+; the model takes 2048"):
        rewrite(engine, read_source(str(path)), ASK, SamplingParams())
    small = Engine(engine.target.model, engine.tokenizer, EngineConfig(max_context=250), cost=engine.cost)
    path.write_text(FILE)
    with writing(EDITED), pytest.raises(GraftError, match="the model takes 250"):
        rewrite(small, read_source(str(path)), ASK, SamplingParams())
