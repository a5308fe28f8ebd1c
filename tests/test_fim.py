"""Fill-in-the-middle prompts of every family of models, token for token."""

from typing import Any

import pytest

from longgraft.fim import Surroundings, fim_prompt, fim_tokens, plain_prompt

QWEN = "<|fim_prefix|> <|fim_suffix|> <|fim_middle|> <|fim_pad|> <|repo_name|> <|file_sep|> <|endoftext|>"
STARCODER = "<fim_prefix> <fim_suffix> <fim_middle> <fim_pad> <repo_name> <file_sep>"
DEEPSEEK = "<｜fim▁begin｜> <｜fim▁hole｜> <｜fim▁end｜>"  # noqa: RUF001
CODEGEMMA = "<|fim_prefix|> <|fim_suffix|> <|fim_middle|> <|file_separator|>"
SANTACODER = "<fim-prefix> <fim-suffix> <fim-middle> <fim-pad> <|endoftext|>"
CODE_LLAMA = "▁<PRE> ▁<SUF> ▁<MID> ▁<EOT>"
CODESTRAL = "[PREFIX] [SUFFIX]"
BEFORE, BEHIND = "before", "behind"


class Vocabulary:
    """Names of special tokens are their own ids, so that prompts can be read."""

    unk_token_id = "<unk>"

    def __init__(self, names: str) -> None:
        self.names = names.split()

    def convert_tokens_to_ids(self, name: str) -> Any:
        return name if name in ["word", *self.names] else "<unk>"


def prompt(names: str, others: list[tuple[str, str]], path: str = "src/a.py") -> str:
    tokens = fim_tokens(Vocabulary(names))
    assert tokens is not None
    around: Any = Surroundings("repo", others, path, [BEFORE], [BEHIND])
    return "".join(map(str, fim_prompt(tokens, ["^"], around, lambda text: [text])))  # type: ignore[list-item]


OTHERS = [("b.py", "b = 1\n"), ("c.py", "c = 2")]
PROMPTS = [
    (
        QWEN,
        "^<|repo_name|>repo\n<|file_sep|>b.py\nb = 1\n<|file_sep|>c.py\nc = 2\n<|file_sep|>src/a.py\n"
        "<|fim_prefix|>before<|fim_suffix|>behind<|fim_middle|>",
    ),
    (
        STARCODER,
        "^<repo_name>repo\n<file_sep>b.py\nb = 1\n<file_sep>c.py\nc = 2\n<file_sep>src/a.py\n"
        "<fim_prefix>before<fim_suffix>behind<fim_middle>",
    ),
    (
        CODEGEMMA,
        "^<|file_separator|>b.py\nb = 1\n<|file_separator|>c.py\nc = 2\n<|file_separator|>src/a.py\n"
        "<|fim_prefix|>before<|fim_suffix|>behind<|fim_middle|>",
    ),
    (DEEPSEEK, "^# b.py\nb = 1\n\n# c.py\nc = 2\n\n<｜fim▁begin｜>before<｜fim▁hole｜>behind<｜fim▁end｜>"),  # noqa: RUF001
    (SANTACODER, "^# b.py\nb = 1\n\n# c.py\nc = 2\n\n<fim-prefix>before<fim-suffix>behind<fim-middle>"),
    (CODE_LLAMA, "^# b.py\nb = 1\n\n# c.py\nc = 2\n\n▁<PRE>before▁<SUF>behind▁<MID>"),
    (CODESTRAL, "^# b.py\nb = 1\n\n# c.py\nc = 2\n\n[SUFFIX]behind[PREFIX]before"),
]


@pytest.mark.parametrize(("names", "wanted"), PROMPTS, ids=[names.split()[0] for names, _ in PROMPTS])
def test_prompts(names: str, wanted: str) -> None:
    assert prompt(names, OTHERS) == wanted


def test_alone_in_its_repository() -> None:
    assert prompt(QWEN, [], "") == "^<|fim_prefix|>before<|fim_suffix|>behind<|fim_middle|>"
    assert prompt(QWEN, []).startswith("^<|repo_name|>repo\n<|file_sep|>src/a.py\n<|fim_prefix|>")
    assert prompt(CODEGEMMA, []).startswith("^<|fim_prefix|>before")
    assert prompt(DEEPSEEK, []).startswith("^<｜fim▁begin｜>before")  # noqa: RUF001


def test_everything_that_may_follow_the_middle_ends_it() -> None:
    for names in (QWEN, STARCODER, SANTACODER, CODEGEMMA, CODE_LLAMA, CODESTRAL):
        tokens = fim_tokens(Vocabulary(names))
        assert tokens is not None and set(tokens.ends) == set(names.split())


def test_a_model_without_such_tokens() -> None:
    assert fim_tokens(Vocabulary("<repo_name> <file_sep> <fim_prefix> <|endoftext|>")) is None
    around: Any = Surroundings("repo", [("b.c", "int b;\n")], "src/a.py", [BEFORE], [])
    said = plain_prompt(["^"], around, lambda text: [text])  # type: ignore[list-item]
    assert "".join(map(str, said)) == "^// b.c\nint b;\n\n# src/a.py\nbefore"
    alone: Any = Surroundings("repo", [], "src/a.py", [BEFORE], [])
    assert plain_prompt([], alone, lambda text: [text]) == [BEFORE]  # type: ignore[list-item]
