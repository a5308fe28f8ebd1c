"""What `import longgraft` offers, how little it loads, and that the README's code runs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import longgraft
from tests import engines
from tests.engines import cost_of, model_of
from tests.small_tokenizers import byte_level

README = Path(__file__).parent.parent / "README.md"


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with engines.one_thread():
        yield


def test_the_names() -> None:
    assert sorted(longgraft.__all__) == [
        "Engine", "EngineConfig", "GraftError", "Grammar", "Output", "References", "SamplingParams", "Service",
        "__version__",
    ]  # fmt: skip
    for name in longgraft.__all__:
        assert getattr(longgraft, name) is not None
    assert dir(longgraft) == sorted(longgraft.__all__)
    assert re.fullmatch(r"\d+\.\d+\.\d+", longgraft.__version__)


def test_the_names_are_those_of_their_homes() -> None:
    from longgraft.config import EngineConfig, GraftError, Output, SamplingParams
    from longgraft.engine import Engine

    assert longgraft.Engine is Engine and longgraft.EngineConfig is EngineConfig
    assert longgraft.GraftError is GraftError and longgraft.Output is Output
    assert longgraft.SamplingParams is SamplingParams


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'longgraft' has no attribute 'engine_of_war'"):
        longgraft.engine_of_war  # noqa: B018


def loaded(code: str) -> set[str]:
    """Return the modules a fresh interpreter has loaded after `code`."""
    code = f"import sys; sys.path.insert(0, {str(README.parent)!r})\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import longgraft; longgraft.__version__; dir(longgraft)",
        "from longgraft import EngineConfig, GraftError, Output, SamplingParams; SamplingParams(); EngineConfig()",
        "import longgraft.tree",
        "import longgraft.index.context_index as c, numpy\nindex = c.ContextIndex(10)\n"
        "index.extend([1, 2, 3, 1, 2]); index.begin(); assert index.draft(4) is not None",
        "import longgraft.index.reference",
    ],
)
def test_no_torch_where_none_is_needed(code: str) -> None:
    modules = loaded(code)
    assert "longgraft" in modules
    assert not modules & {"torch", "transformers", "typer", "rich", "faiss"}


def readme_code() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE) if README.exists() else []


@pytest.mark.skipif(not readme_code(), reason="the README holds no Python yet")
@pytest.mark.parametrize("number", range(len(readme_code())))
def test_the_readme_runs(number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a small model in place of any that is named."""
    model, tokenizer = model_of("llama", torch.float32), byte_level(300)
    asked: list[Any] = []
    monkeypatch.setattr("longgraft.load.load", lambda name, *more: (asked.append(name), (model, tokenizer))[1])
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 5, 6]]), "attention_mask": torch.ones(1, 5, dtype=torch.long)}
    code = readme_code()[number]
    engine = longgraft.Engine(model, tokenizer, cost=cost_of())
    names: dict[str, Any] = {"model": model, "tokenizer": tokenizer, "inputs": inputs, "engine": engine}
    exec(compile(code, f"README.md[{number}]", "exec"), names)
    assert asked or "from_pretrained" not in code
    output = names.get("output")
    assert output is None or (isinstance(output, longgraft.Output) and output.text in capsys.readouterr().out)
