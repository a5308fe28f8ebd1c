"""Every mistake a user can mend is one sentence on stderr and exit code 2."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from longgraft import Engine, GraftError
from longgraft.prompts import refuse_stdin_twice
from tests.models import VOCAB, tiny_model
from tests.saved_model import PROMPT, byte_level, calm, invoke


@pytest.fixture(autouse=True)
def calmly() -> Iterator[None]:
    with calm():
        yield


def bad_inputs(folder: str, tmp: Path) -> dict[str, tuple[list[str], str]]:
    """Return arguments of `generate` that are wrong in one way each, and what the sentence must name."""
    files = {"empty.txt": b"", "latin.txt": b"caf\xe9", "bad.json": b"[{", "text.json": b'"hello"', "none.json": b"[]"}
    files |= {"system.json": b'[{"role": "system", "content": "x"}]', "table.json": b"{}"}
    files["long.txt"] = b"cat " * 3000
    for name, content in files.items():
        (tmp / name).write_bytes(content)
    (tmp / "unknown").mkdir()
    (tmp / "unknown" / "config.json").write_text('{"model_type": "no_such_thing"}')
    with_prompt = ["-m", folder, "-p", PROMPT]
    return {
        "no prompt": (["-m", folder], "--prompt-file"),
        "two prompts": ([*with_prompt, "-f", "x"], "--prompt and --prompt-file"),
        "missing file": (["-m", folder, "-f", str(tmp / "nowhere.txt")], "nowhere.txt"),
        "folder as file": (["-m", folder, "-f", str(tmp)], "cannot be read"),
        "empty file": (["-m", folder, "-f", str(tmp / "empty.txt")], "empty"),
        "empty prompt": (["-m", folder, "-p", ""], "empty"),
        "not UTF-8": (["-m", folder, "-f", str(tmp / "latin.txt")], "UTF-8"),
        "too long": (["-m", folder, "-f", str(tmp / "long.txt")], "2048"),
        "longer than asked": ([*with_prompt, "--max-context", "8"], "at most 8"),
        "bad JSON": (["-m", folder, "--chat", str(tmp / "bad.json")], "not JSON"),
        "no messages": (["-m", folder, "--chat", str(tmp / "text.json")], "list of messages"),
        "empty chat": (["-m", folder, "--chat", str(tmp / "none.json")], "list of messages"),
        "role": (["-m", folder, "--chat", str(tmp / "system.json")], "unknown role"),
        "missing folder": (["-m", str(tmp / "no-model"), "-p", "x"], "no-model"),
        "missing GGUF": (["-m", str(tmp / "no.gguf"), "-p", "x"], "no.gguf"),
        "unknown type": (["-m", str(tmp / "unknown"), "-p", "x"], "no_such_thing"),
        "dtype": ([*with_prompt, "--dtype", "float7"], "float7"),
        "device": ([*with_prompt, "--device", "abacus"], "abacus"),
        "missing table": ([*with_prompt, "--cost-table", str(tmp / "nowhere.json")], "nowhere.json"),
        "bad table": ([*with_prompt, "--cost-table", str(tmp / "table.json")], "table.json"),
        "NaN": ([*with_prompt, "--temperature", "nan"], "temperature"),
        "negative temperature": ([*with_prompt, "--temperature", "-1"], "temperature"),
        "negative length": ([*with_prompt, "-n", "-1"], "max_new_tokens"),
        "negative nodes": ([*with_prompt, "--max-nodes", "-1"], "max_nodes"),
        "zero rows": ([*with_prompt, "--prefill-rows", "0"], "prefill_rows"),
        "negative seed": ([*with_prompt, "--seed", "-3"], "seed"),
        "top-p": ([*with_prompt, "--top-p", "0"], "top_p"),
        "top-k": ([*with_prompt, "--top-k", "-2"], "top_k"),
        "empty stop": ([*with_prompt, "--stop", ""], "stop"),
        "logprobs": ([*with_prompt, "--json", "--logprobs", "21"], "logprobs"),
        "logprobs without JSON": ([*with_prompt, "--logprobs", "1"], "--json"),
    }


def test_every_mistake_is_one_sentence(folder: str, tmp_path: Path) -> None:
    for name, (arguments, named) in bad_inputs(folder, tmp_path).items():
        result = invoke("generate", *arguments)
        assert result.exit_code == 2, name
        assert result.stdout == "", name
        assert result.stderr.startswith("longgraft: ") and result.stderr.count("\n") == 1, (name, result.stderr)
        assert named in result.stderr, (name, result.stderr)
        assert "Traceback" not in result.stderr, name


def test_a_missing_chat_template_and_a_foreign_tokenizer(folder: str, tmp_path: Path) -> None:
    model = tiny_model("llama", torch.float32)
    chat = tmp_path / "chat.json"
    chat.write_text('[{"role": "user", "content": "x"}]')
    for size, named in ((VOCAB, "no chat template"), (VOCAB + 9, "do not belong together")):
        path = tmp_path / str(size)
        model.save_pretrained(path)
        byte_level(size, template=None).save_pretrained(path)
        result = invoke("generate", "-m", str(path), "--chat", str(chat))
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1) and named in result.stderr


def test_wrong_options_are_explained(folder: str) -> None:
    for arguments in (["generate"], ["generate", "-m", folder, "--temperature", "warm"], ["conjure"]):
        result = invoke(*arguments)
        assert result.exit_code == 2 and "Error" in result.stderr and "Traceback" not in result.stderr


def test_what_nobody_can_mend_keeps_its_traceback(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Engine, prompt: str) -> list[int]:
        raise RuntimeError("inner trouble")

    monkeypatch.setattr(Engine, "encode", broken)
    with pytest.raises(RuntimeError, match="inner trouble"):
        invoke("generate", "-m", folder, "-p", "x")


def test_errors_are_graft_errors() -> None:
    with pytest.raises(GraftError, match="expected one of"):
        from longgraft.prompts import read_prompt

        read_prompt(None, None, None)


def test_stdin_is_read_once() -> None:
    refuse_stdin_twice("-", None, "a", "b")
    with pytest.raises(GraftError, match="stdin can be read once"):
        refuse_stdin_twice("-", None, None, "-")
