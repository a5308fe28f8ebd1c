"""Related files: what is imported in many languages, what lies near, what a budget holds."""

from pathlib import Path

import pytest

from longgraft.tools.related import chosen, imported, ranked, repository_files
from tests.index.corpus_cases import write

IMPORTS = [
    ("src/a/b.py", "from ..x.y import (One,\n    Two)\n", ("src", "x", "y")),
    ("src/a/b.py", "    from . import near\n", ("src", "a", "near")),
    ("a.py", "import pkg.mod as m, other\n", ("pkg", "mod")),
    ("a.py", "from pkg import member\n", ("pkg", "member")),
    ("web/app.ts", "import { x } from './lib/tool';\n", ("web", "lib", "tool")),
    ("web/app.js", "const y = require('../up')\n", ("up",)),
    ("web/app.js", "export * from './all.js'\n", ("web", "all")),
    ("a.c", '#include "deep/x.h"\n', ("deep", "x")),
    ("a.c", "  # include <x.h>\n", ("x",)),
    ("main.go", '\timport "example.com/m/pkg"\n', ("example.com", "m", "pkg")),
    ("src/main.rs", "use crate::net::tcp;\n", ("net", "tcp")),
    ("src/main.rs", "pub mod shapes;\n", ("shapes",)),
    ("A.java", "import static org.x.Tool;\n", ("org", "x", "Tool")),
    ("a.rb", "require_relative 'b/c'\n", ("b", "c")),
]


@pytest.mark.parametrize(("path", "text", "wanted"), IMPORTS, ids=[text.strip() for _, text, _ in IMPORTS])
def test_imports(path: str, text: str, wanted: tuple[str, ...]) -> None:
    assert wanted in imported(path, text)


def test_what_imports_nothing() -> None:
    assert imported("a.py", "# no import\nimportant = 3\nx = 'from a import b'\n") == []


FILES = [
    "docs/a.md", "far/off/and/away.py", "pkg/__init__.py", "pkg/core.py", "pkg/deep/inner.py", "pkg/near.py",
    "pkg/util/__init__.py", "pkg/util/text.py", "setup.py", "tests/test_near.py", "web/near.ts",
]  # fmt: skip


def test_imports_come_first_then_names_then_neighbours() -> None:
    text = "from pkg.util import text\nfrom .core import run\n"
    assert ranked("pkg/near.py", text, FILES) == [
        "pkg/util/text.py", "pkg/util/__init__.py", "pkg/core.py",  # as they are imported
        "tests/test_near.py", "web/near.ts",  # of the same name
        "pkg/__init__.py", "pkg/deep/inner.py", "setup.py",  # near
    ]  # fmt: skip
    assert ranked("pkg/near.py", text, FILES[::-1]) == ranked("pkg/near.py", text, FILES)


def test_a_repository_may_be_a_package_itself() -> None:
    text = "from whole.deep.inner import x\nimport whole.core\n"
    files = ["above/deep/inner.py", "core.py", "deep/inner.py", "off/core.py"]
    assert ranked("a.py", text, files) == ["deep/inner.py", "core.py", "off/core.py", "above/deep/inner.py"]


def test_ignored_files_are_not_there(tmp_path: Path) -> None:
    pytest.importorskip("pathspec")
    files = {"a.py": "", "b/c.py": "", "b/made.py": "", ".gitignore": "made.py\n/build/\n", "build/x.py": ""}
    write(tmp_path, files | {".git/config": ""})
    assert repository_files(tmp_path, tmp_path / "none") == [".gitignore", "a.py", "b/c.py"]


def words(text: str) -> int:
    return len(text.split())


def test_a_budget_holds_the_most_related_last(tmp_path: Path) -> None:
    lines = "word word word word\n"
    write(tmp_path, {"one.py": lines * 5, "two.py": lines * 200, "three.py": lines * 5, "bin.py": "\0"})
    found = chosen(tmp_path, ["one.py", "gone.py", "bin.py", "two.py", "three.py"], 400, words)
    assert [path for path, _ in found] == ["three.py", "two.py", "one.py"]
    sizes = {path: words(text) for path, text in found}
    assert sizes["one.py"] == 20 and 150 < sizes["two.py"] <= 200 and sum(sizes.values()) <= 400
    assert all(text.endswith("\n") for _, text in found)
    assert chosen(tmp_path, ["one.py"], 0, words) == []
