"""README and manual: every command exists with these options, every link leads somewhere; and all of it is run."""

import ast
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.saved_model import PROMPT, invoke, save

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
# What does not end by itself, or fetches a model over the network: tried by tests of their own.
ENDLESS = {("serve",), ("index", "watch"), ("demo",)}
# Pages whose commands are run by the tests of what they are about.
ELSEWHERE = {"ask", "code", "server", "report", "evaluation"}


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in FENCE.findall(page.read_text()) if kind == language]


def commands(page: Path) -> list[list[str]]:
    """Commands in a page's shell blocks, split into words; continued lines joined, `a && b` taken apart."""
    found = []
    for text in blocks(page, "bash"):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words:
                end = words.index("&&") if "&&" in words else len(words)
                found.append(words[:end])
                words = words[end + 1 :]
    return [words for words in found if words]


def ours() -> list[pytest.param]:
    return [
        pytest.param(words[1:], id=f"{page.stem}-{' '.join(words[1:4])}")
        for page in PAGES
        for words in commands(page)
        if words[0] == "longgraft"
    ]


@pytest.mark.parametrize("words", ours())
def test_every_command_exists_with_these_options(words: list[str]) -> None:
    result = invoke(*words, "--help")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_extra_and_module_that_is_named_exists(page: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"pip install (?:-e )?'(?:\.|longgraft)\[([\w,]+)\]'", page.read_text()):
        assert set(extras.split(",")) <= set(project["optional-dependencies"])
    for module in re.findall(r"python -m ([\w.]+)", page.read_text()):
        assert importlib.util.find_spec(module), f"{page.name}: {module}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_in_a_page_is_python_and_its_imports_exist(page: Path) -> None:
    for text in blocks(page, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("longgraft"):
                module = importlib.import_module(node.module or "")
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = (page.parent / path) if path else page
            assert target.exists(), f"{page.name}: {link}"
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M) if anchor else []
            slugs = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
            assert not anchor or anchor in slugs, f"{page.name}: {link}"


def test_every_page_is_in_the_manuals_contents() -> None:
    named = set(re.findall(r"(\w+\.md)", (ROOT / "mkdocs.yml").read_text()))
    assert named == {page.name for page in PAGES[1:]}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages' commands name, and a saved model."""
    path = tmp_path_factory.mktemp("desk")
    save(path / "model")
    shutil.copytree(ROOT / "tests" / "data" / "desk", path, dirs_exist_ok=True)
    (path / "notes.txt").write_text(PROMPT)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if p.stem not in ELSEWHERE], ids=lambda page: page.stem)
def test_every_command_of_a_page_runs_in_its_order(page: Path, desk: Path) -> None:
    """With a tiny model in place of the ones that are named."""
    environment = os.environ | {"XDG_DATA_HOME": str(desk / "data"), "XDG_CACHE_HOME": str(desk / "cache")}
    for words in commands(page):
        if words[0] != "longgraft" or any(tuple(words[1 : 1 + len(name)]) == name for name in ENDLESS):
            continue
        given = ["model" if re.fullmatch(r"(Qwen|HuggingFaceTB)/[\w.-]+", word) else word for word in words[1:]]
        command = [sys.executable, "-m", "longgraft", *given]
        done = subprocess.run(command, cwd=desk, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stderr[-2000:]}"


@pytest.mark.slow
def test_the_manual_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "site" / "round.svg").exists()
    assert "round.svg" in (tmp_path / "site" / "round" / "index.html").read_text()
