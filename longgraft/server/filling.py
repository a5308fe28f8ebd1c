"""What stands between two texts, as clients ask for it (`suffix`, `/infill`). Knows bodies and the engine's prompts."""

from __future__ import annotations

from collections.abc import Sequence

from longgraft.engine import Engine
from longgraft.fim import Surroundings, fim_prompt, fim_tokens
from longgraft.server.bodies import File
from longgraft.server.errors import ApiError
from longgraft.tools.frame import beginning, text_ids

# Names where clients give none.
REPOSITORY, FILE, OTHER = "project", "current", "file"


def filling(engine: Engine, prefix: str, suffix: str, files: Sequence[File] = ()) -> tuple[list[int], tuple[int, ...]]:
    """Return token ids that ask for what stands between `prefix` and `suffix`, and those that end it.

    `files`: others that the model sees before. Raises `ApiError` if the model has no tokens for that.
    """
    tokenizer = engine.tokenizer
    if (tokens := fim_tokens(tokenizer)) is None:
        raise ApiError(400, "this model has no tokens for filling in: suffix and /infill need a model that does")

    def encode(text: str) -> list[int]:
        return text_ids(tokenizer, text)

    others = [(one.filename or OTHER, one.text) for one in files]
    around = Surroundings(REPOSITORY, others, FILE if others else "", encode(prefix), encode(suffix))
    return engine.encode(fim_prompt(tokens, beginning(tokenizer), around, encode)), tokens.ends
