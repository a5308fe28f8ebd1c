"""Every command in the manual pages of the tools runs as it stands there, on a tiny model."""

import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from longgraft.eval.tiny_pdf import pdf_of
from tests.index.corpus_cases import write
from tests.saved_model import invoke
from tests.tools.scripted import quickly, writing
from tests.tools.test_completing import APP, FAR, SHAPES

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "The report names the supply of copper from a single mine, and the age of the furnace, as its risks."


def commands(name: str) -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", (DOCS / name).read_text(), re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the pages name, one for all commands: some use what others saved."""
    root = tmp_path_factory.mktemp("there")
    lines = "".join(f"Line {number} of the first chapter.\n" for number in range(120))
    files = {"notes.md": "# Notes\n\nWe met.\n", "page.html": "<p>Hello there</p>", "long.txt": lines}
    files |= {"shapes.py": SHAPES, "project/app.py": APP + "\n" * 8, "project/far/off/far.py": FAR}
    (write(root, files) / "report.pdf").write_bytes(pdf_of([PAGE, "The end."]))
    return root


@pytest.fixture(autouse=True)
def calmly(there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("pypdf")
    pytest.importorskip("bs4")
    monkeypatch.chdir(there)
    with quickly():
        os.environ["XDG_CACHE_HOME"] = str(tmp_path)
        yield


def test_the_pages_are_short_and_name_every_command() -> None:
    shown = "".join(invoke(command, "-h").stdout for command in ("ask", "edit", "complete"))
    for name in ("ask.md", "code.md"):
        text = (DOCS / name).read_text()
        assert text.count("\n") <= 100 and len(commands(name)) >= 5
        for option in re.findall(r"`(--[a-z-]+)", text):
            assert f"{option} " in shown, option


@pytest.mark.parametrize("line", commands("ask.md"))
def test_asking(line: str, folder: str) -> None:
    words = [folder if word == "M" else word for word in shlex.split(line)[1:]]
    more = ["--prefill-rows", "128", "-n", "8"]
    result = invoke(*words, *more, stdin="Who?\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip()
    assert "--json" not in words or json.loads(result.stdout)["quotes"] == []


@pytest.mark.parametrize("line", commands("code.md"))
def test_editing_and_completing(line: str, folder: str) -> None:
    words = [folder if word == "M" else word for word in shlex.split(line)[1:]]
    path = Path("shapes.py")
    path.write_text(SHAPES)
    if words[0] == "complete":
        result = invoke(*words, "-n", "8", stdin='{"file": "app.py", "line": 12}\n')
        if "--loop" in words:
            assert len(json.loads(result.stdout)["token_ids"]) == 8, result.stderr
            return
        assert result.exit_code == 0 and "no tokens for filling in the middle" in result.stderr
        return
    with writing(f"{SHAPES.replace('area', 'surface')}```\n"):
        result = invoke(*words)
    assert result.exit_code == 0 and "+def surface(shape):\n" in result.stdout
    assert path.read_text() == (SHAPES.replace("area", "surface") if "--write" in words else SHAPES)
