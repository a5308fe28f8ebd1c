"""What requests of every kind hold: how tokens are chosen, where to stop, and our own extra fields.

Knows pydantic; no engine. Fields nobody knows are ignored, as clients send many; those that are known, would change the
answer and cannot be followed are refused by name.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from longgraft.config import POLICIES

HALF = re.compile("[\ud800-\udfff]")
MOST_STOPS, MOST_CHOICES, MOST_BIASES = 64, 128, 1024


def _no_text(value: Any) -> Any:
    """Refuse what pydantic would turn into a number although JSON has numbers."""
    if isinstance(value, str | bool):
        raise ValueError("expected a number")
    return value


def _is_flag(value: Any) -> Any:
    if value is not None and not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


Whole = Annotated[int, BeforeValidator(_no_text)]
Number = Annotated[float, BeforeValidator(_no_text), Field(allow_inf_nan=False)]
Flag = Annotated[bool, BeforeValidator(_is_flag)]
StopText = Annotated[str, StringConstraints(min_length=1)]
Stops = Annotated[list[StopText], Field(max_length=MOST_STOPS)]
Seed = Annotated[Whole, Field(ge=-(2**63), lt=2**64)]
TokenId = Annotated[Whole, Field(ge=0, lt=2**31)]


def _is_policy(name: str) -> str:
    if name not in POLICIES:
        raise ValueError(f"expected one of {', '.join(POLICIES)}")
    return name


PolicyName = Annotated[str, AfterValidator(_is_policy), Field(json_schema_extra={"enum": list(POLICIES)})]


def _half_character(value: Any) -> bool:
    """Tell whether any text in a JSON value holds a lone surrogate, which is no character and breaks tokenizers."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            if not one.isascii() and HALF.search(one):
                return True
        elif isinstance(one, dict):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list) and not (one and isinstance(one[0], int)):
            left += one
    return False


class Body(BaseModel):
    """Any body: text in it is text. `refused`: fields that cannot be followed, each with the value that asks nothing.

    Empty values ask nothing either.
    """

    refused: ClassVar[dict[str, Any]] = {}

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, values: Any) -> Any:
        if _half_character(values):
            raise ValueError("a text holds half a character (a lone surrogate): expected Unicode")
        return values

    @model_validator(mode="before")
    @classmethod
    def _can_be_followed(cls, values: Any) -> Any:
        for name, neutral in cls.refused.items() if isinstance(values, dict) else ():
            if (value := values.get(name)) is not None and value not in (neutral, "", [], {}):
                raise ValueError(f"{name} is not supported: leave it out")
        return values


def stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return stop strings, however they were given."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def titled(documents: dict[str, str] | list[str] | None) -> dict[str, str]:
    """Return documents by name; those of a list are numbered."""
    if isinstance(documents, list):
        return {f"document {number}": text for number, text in enumerate(documents, 1)}
    return documents or {}


class Extras(BaseModel):
    """Our own fields: what else the answer may copy from, how it is drafted, and what is told of it."""

    model_config = ConfigDict(extra="forbid")

    corpora: list[str] | None = Field(
        default=None, max_length=16, description="Names of corpora; null: the server's own."
    )
    documents: dict[str, str] | list[str] | None = Field(default=None, description="Texts, by name or in a list.")
    prediction: str | None = Field(default=None, description="What the answer will probably look like.")
    policy: PolicyName | None = Field(
        default=None, description="How tokens are proposed; no policy changes the answer."
    )
    metrics: Literal["none", "summary", "detailed"] = "summary"
    spans: Flag = Field(default=False, description="Tell where each part of the answer was copied from.")
    deadline: Number | None = Field(default=None, gt=0, description="End with what there is after so many seconds.")


class StreamOptions(BaseModel):
    """What a stream tells besides text."""

    include_usage: Flag | None = None


Schema = dict[str, Any] | str | bool
Choices = Annotated[list[StopText], Field(min_length=1, max_length=MOST_CHOICES)]


class Guided(BaseModel):
    """vLLM's `structured_outputs`: one of several forms that an answer is held to."""

    model_config = ConfigDict(extra="forbid")

    json_: Schema | None = Field(default=None, alias="json", description="A JSON schema.")
    regex: StopText | None = Field(default=None, description="In the syntax of Rust's regex crate.")
    choice: Choices | None = None
    grammar: StopText | None = Field(default=None, description="Lark in llguidance's dialect, or GBNF.")
    json_object: Flag | None = None
    disable_any_whitespace: Flag = False


class Sampled(Body):
    """Fields that all OpenAI requests share. `guided_...` are older names of what `structured_outputs` holds."""

    model_config = ConfigDict(extra="allow")
    refused: ClassVar[dict[str, Any]] = {
        "use_beam_search": False,
        "length_penalty": 1.0,
        "guided_decoding_backend": None,
        "guided_whitespace_pattern": None,
        "structural_tag": None,
        "prompt_embeds": None,
        "bad_words": None,
        "allowed_token_ids": None,
        "logits_processors": None,
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "truncate_prompt_tokens": None,
        "prompt_logprobs": None,
    }

    model: str | None = None
    n: Whole | None = Field(default=None, ge=1, le=MOST_CHOICES)
    temperature: Number | None = Field(default=None, ge=0)
    top_p: Number | None = Field(default=None, gt=0, le=1)
    top_k: Whole | None = Field(default=None, ge=-1)
    min_p: Number | None = Field(default=None, ge=0, le=1)
    presence_penalty: Number | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: Number | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: Number | None = Field(default=None, gt=0)
    logit_bias: dict[str, Number] | None = Field(default=None, max_length=MOST_BIASES)
    seed: Seed | None = None
    stop: StopText | Stops | None = None
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=MOST_STOPS)
    ignore_eos: Flag | None = None
    min_tokens: Whole | None = Field(default=None, ge=0)
    response_format: dict[str, Any] | None = None
    structured_outputs: Guided | None = None
    guided_json: Schema | None = None
    guided_regex: StopText | None = None
    guided_choice: Choices | None = None
    guided_grammar: StopText | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    longgraft: Extras | None = None

    @model_validator(mode="after")
    def _streams(self) -> Any:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams: set stream, or leave it out")
        return self

    @property
    def extras(self) -> Extras:
        """Our own fields, with defaults."""
        return self.longgraft or Extras()

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with usage."""
        return bool(self.stream_options and self.stream_options.include_usage)
