"""The bodies of all requests, field by field. Knows pydantic and the shared fields; no engine."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from longgraft.server.fields import Body, Flag, Number, Sampled, Schema, Seed, Stops, StopText, TokenId, Whole

MOST_PROMPTS, MOST_TOOLS = 128, 128
Ids = Annotated[list[TokenId], Field(min_length=1)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$")]


class TextPart(BaseModel):
    """A part of a message. Only text can be read."""

    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    """What a call named; `arguments`: JSON text, or what it says."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, StringConstraints(min_length=1)]
    arguments: str | dict[str, Any] = "{}"


class Called(BaseModel):
    """A tool call of an earlier answer."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """One message of a chat; what else it holds (name, tool_call_id ...) is the chat template's."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, StringConstraints(min_length=1)]
    content: str | list[TextPart] | None = None
    tool_calls: list[Called] | None = None


class Prediction(BaseModel):
    """What the answer will probably look like."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The predicted text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Sampled):
    """`POST /v1/chat/completions`."""

    refused: ClassVar[dict[str, Any]] = Sampled.refused | {
        "functions": None,
        "function_call": "none",
        "audio": None,
        "web_search_options": None,
        "chat_template": None,
        "documents": None,
        "echo": False,
    }

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Whole | None = Field(default=None, ge=1)
    max_tokens: Whole | None = Field(default=None, ge=1)
    logprobs: Flag | None = None
    top_logprobs: Whole | None = Field(default=None, ge=0, le=20)
    prediction: Prediction | None = None
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=MOST_TOOLS)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Flag | None = None
    modalities: list[Literal["text"]] | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _agree(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.prediction is not None and self.extras.prediction is not None:
            raise ValueError("prediction is given twice: once is enough")
        return self


class CompletionRequest(Sampled):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Ids
        | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[Ids], Field(min_length=1, max_length=MOST_PROMPTS)]
    )
    suffix: str | None = None
    max_tokens: Whole | None = Field(default=None, ge=0)
    logprobs: Whole | None = Field(default=None, ge=0, le=20)
    echo: Flag | None = None
    best_of: Whole | None = Field(default=None, ge=1)
    add_special_tokens: Flag = True

    @model_validator(mode="after")
    def _agree(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of other than n is not supported: leave it out")
        if self.suffix and self.echo:
            raise ValueError("echo and suffix exclude each other: leave one out")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class LlamaRequest(Body):
    """What llama.cpp's two endpoints share. A number of tokens below 0 means: as many as the server allows."""

    refused: ClassVar[dict[str, Any]] = {
        "logit_bias": None,
        "n_probs": 0,
        "mirostat": 0,
        "dynatemp_range": 0,
        "dry_multiplier": 0,
        "xtc_probability": 0,
        "typical_p": 1,
        "lora": None,
    }

    n_predict: Whole | None = Field(default=None, ge=-2)
    temperature: Number | None = Field(default=None, ge=0)
    top_k: Whole | None = Field(default=None, ge=-1)
    top_p: Number | None = Field(default=None, ge=0, le=1)
    min_p: Number | None = Field(default=None, ge=0, le=1)
    repeat_penalty: Number | None = Field(default=None, gt=0)
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    seed: Seed | None = None
    stop: StopText | Stops | None = None
    ignore_eos: Flag | None = None
    grammar: str | None = Field(default=None, description="In GBNF.")
    json_schema: Schema | None = None
    stream: Flag | None = None
    t_max_predict_ms: Whole | None = Field(
        default=None, description="Stop at a line's end once this much time went by."
    )


class LlamaCompletion(LlamaRequest):
    """`POST /completion`."""

    prompt: str | Ids


class File(BaseModel):
    """Another file that an editor has open."""

    text: str
    filename: str | None = None


class Infill(LlamaRequest):
    """`POST /infill`: fill in what stands between two texts."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[File] | None = None
    prompt: str | None = None


class TokenizeRequest(Body):
    """`POST /tokenize`: of a text (`prompt`, or llama.cpp's `content`) or of a chat."""

    refused: ClassVar[dict[str, Any]] = {
        "tools": None,
        "chat_template": None,
        "chat_template_kwargs": None,
        "continue_final_message": False,
        "with_pieces": False,
        "parse_special": True,
    }

    prompt: str | None = None
    content: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: Flag | None = None
    add_special: Flag | None = None
    add_generation_prompt: Flag = True
    return_token_strs: Flag = False

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if sum(one is not None for one in (self.prompt, self.content, self.messages)) != 1:
            raise ValueError("expected one of prompt, content and messages")
        return self


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    tokens: list[TokenId]


class CorpusRequest(Body):
    """`POST /v1/longgraft/corpora`: bring documents under a name; a corpus of that name is replaced."""

    name: Name
    documents: dict[str, str] | list[str] = Field(min_length=1)
