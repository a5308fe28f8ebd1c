"""`longgraft eval`: its options, and what they say where something is missing."""

import sys
from pathlib import Path

import pytest

from longgraft.config import GraftError
from longgraft.evaluate import policies_of, whole
from tests.saved_model import calm, invoke, save


def test_which_policies_run() -> None:
    assert policies_of("adaptive", plain=False, compare_plain=False) == ("adaptive",)
    assert policies_of("adaptive", plain=True, compare_plain=False) == ("plain",)
    assert policies_of("retrieval", plain=False, compare_plain=True) == ("retrieval", "plain")
    with pytest.raises(GraftError, match="--plain and --policy retrieval: expected one of them"):
        policies_of("retrieval", plain=True, compare_plain=False)
    with pytest.raises(GraftError, match="--compare-plain: expected a policy other than plain"):
        policies_of("plain", plain=False, compare_plain=True)


def test_limits_are_numbers_or_shares() -> None:
    assert whole(None) is None and whole(0.5) == 0.5
    assert whole(20.0) == 20 and isinstance(whole(20.0), int)
    with pytest.raises(GraftError, match="expected more than 0"):
        whole(0)


def test_without_the_harness_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for name in [name for name in sys.modules if name.startswith("longgraft.eval.harness")]:
        monkeypatch.delitem(sys.modules, name)
    with calm():
        result = invoke("eval", "lm-eval", "-m", save(tmp_path), "--tasks", "x")
    assert result.exit_code == 2 and "pip install 'longgraft[eval]'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tasks", ","), "expected at least one task"),
        (("--tasks", "x", "--batch-size", "0"), "a batch size of at least 1"),
        (("--tasks", "x", "--contexts", "4k"), "--contexts '4k': expected whole numbers"),
        (("--tasks", "x", "--policy", "magic"), "policy is 'magic': expected one of plain"),
        (("--tasks", "x", "--limit", "-1"), "--limit -1"),
    ],
)
def test_mistakes_are_one_sentence(arguments: tuple[str, ...], message: str) -> None:
    result = invoke("eval", "lm-eval", "-m", "nothing", *arguments)
    assert result.exit_code == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1


def test_help_names_the_harness() -> None:
    assert "lm-eval" in invoke("eval", "--help").stdout
