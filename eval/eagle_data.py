"""Text for training an EAGLE-3 head, and what the target says about it.

Knows the target and its tokenizer, nothing of the head. The one idea: a head must predict the *model*, not the text.
So part of the text is what the model itself writes, and everywhere the label is the target's own distribution,
which one teacher-forced forward gives for every position: `Text` keeps the hidden states the head reads, the last
hidden state (from which logits follow) and the log-sum-exp of the logits (which makes them probabilities).
"""

from __future__ import annotations

import json
import random
import sysconfig
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HOLD_OUT = 16  # every so many-th text is kept for checking
PROMPT_LEN = 128  # tokens of a prompt the model writes behind
WRITE_BATCH = 32
WRITTEN = 192  # tokens it writes
GIVEN_BATCH = 48  # given texts beside so many written ones
MIN_LEN = 16  # shorter texts are left out


@dataclass(frozen=True, slots=True)
class Text:
    """One teacher-forced text of T tokens.

    `token_ids [T]`, `features [T, layers * hidden]` and `last [T, hidden]` (after the final norm) in bfloat16,
    `log_sum [T]`: log-sum-exp of the target's logits, `likeliest [T]`: their argmax; `own`: written by the model;
    `held_out`: not to be trained on.
    """

    token_ids: Tensor
    features: Tensor
    last: Tensor
    log_sum: Tensor
    likeliest: Tensor
    own: bool
    held_out: bool


def feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the layers whose outputs EAGLE-3 reads: 1, n // 2 - 1, n - 4 (SafeAILab/EAGLE), counted from 0."""
    return (1, num_layers // 2 - 1, num_layers - 4)


def all_given(tokenizer: Any, files: Sequence[Path]) -> list[list[int]]:
    """Return the token ids of all answers in `files` and of a long piece of every standard library source."""
    return [answer for _, answer in chats(files, tokenizer)] + sources(tokenizer, 4096, random.Random(0))


def is_held_out(key: Sequence[int]) -> bool:
    """Tell whether a text is kept for checking: one in `HOLD_OUT`, by its prompt (or itself), not by chance."""
    return zlib.crc32(repr(list(key)).encode()) % HOLD_OUT == 0


def chats(files: Sequence[Path], tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """Return (prompt, answer) token ids of JSON-lines records with `prompt` and `output`, in chat format."""
    records = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return [
        (as_prompt(record["prompt"], tokenizer), list(tokenizer.encode(record["output"], add_special_tokens=False)))
        for record in records
    ]


def as_prompt(request: str, tokenizer: Any) -> list[int]:
    """Return the token ids of one user message, ready to be answered; plain text if there is no chat template."""
    if tokenizer.chat_template is None:
        return list(tokenizer.encode(request))
    message = [{"role": "user", "content": request}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def sources(tokenizer: Any, length: int, rng: random.Random) -> list[list[int]]:
    """Return a piece of up to `length` tokens from every source file of the Python standard library."""
    pieces = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" in path.parts or "test" in str(path):
            continue
        text = path.read_text(errors="replace")
        begin = rng.randrange(max(len(text) - 4 * length, 1))
        pieces.append(list(tokenizer.encode(text[begin : begin + 6 * length], add_special_tokens=False))[:length])
    return pieces


def questions(tokenizer: Any) -> list[list[int]]:
    """Return chat prompts about the modules of the standard library and everyday topics."""
    asks = (
        "What is {} good for? Give a short example.",
        "Write a Python function that has to do with {} and explain it.",
        "Explain {} to a beginner in a few sentences.",
        "List five things one should know about {}.",
        "Write a short story in which {} plays a role.",
        "What are the advantages and disadvantages of {}?",
        "Write an e-mail to a colleague about {}.",
    )
    everyday = "bread trains rivers taxes gardens chess sleep bees glaciers libraries bicycles music winter trade salt"
    modules = [f"the Python module {path.stem}" for path in Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")]
    topics = everyday.split() + sorted(modules)
    return [as_prompt(ask.format(topic), tokenizer) for topic in topics for ask in asks]


@torch.no_grad()
def written(model: Any, tokenizer: Any, prompts: Sequence[list[int]], new: int) -> list[list[int]]:
    """Return each prompt (its last `PROMPT_LEN` tokens) with what the model writes behind it, greedily."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    prompts = [prompt[-PROMPT_LEN:] for prompt in prompts]
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    seen = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(
        input_ids=ids, attention_mask=seen, max_new_tokens=new, do_sample=False, pad_token_id=pad
    ).tolist()
    ends = set(_as_list(model.generation_config.eos_token_id))
    texts = []
    for prompt, row in zip(prompts, out):
        answer = row[width:]
        stop = next((i + 1 for i, token in enumerate(answer) if token in ends), len(answer))
        texts.append(prompt + answer[:stop])
    return texts


@torch.no_grad()
def teacher_forced(model: Any, token_ids: Sequence[int], own: bool, held_out: bool) -> Text:
    """Run the target once over a text and keep what a head reads and what it is to predict."""
    ids = torch.tensor(token_ids)
    output = model.base_model(input_ids=ids[None], use_cache=False, output_hidden_states=True)
    layers = feature_layers(len(output.hidden_states) - 1)
    features = torch.cat([output.hidden_states[layer + 1][0] for layer in layers], dim=-1)
    last = output.last_hidden_state[0]
    logits = model.get_output_embeddings()(last).float()
    halves = features.bfloat16(), last.bfloat16()
    return Text(ids, *halves, logits.logsumexp(-1), logits.argmax(-1), own, held_out)


def portions(model: Any, tokenizer: Any, files: Sequence[Path], length: int) -> list[Callable[[], list[Text]]]:
    """Return what makes each portion of the training text: some written by the model, some given.

    The order is fixed, so that a portion is known by its number; there are as many as there are prompts for.
    """
    rng = random.Random(0)
    records = chats(files, tokenizer)
    prompts = [prompt for prompt, _ in records] + questions(tokenizer)
    given = [(prompt, (prompt[-length // 4 :] + answer)[:length]) for prompt, answer in records]
    given += [(piece, piece) for piece in sources(tokenizer, length, rng)]
    rng.shuffle(prompts)
    rng.shuffle(given)
    count = -(-len(prompts) // WRITE_BATCH)
    per_portion = min(-(-len(given) // count), GIVEN_BATCH)
    made = list[Callable[[], list[Text]]]()
    for i in range(count):
        asked = prompts[i * WRITE_BATCH : (i + 1) * WRITE_BATCH]
        pieces = given[i * per_portion : (i + 1) * per_portion]
        made.append(partial(_portion, model, tokenizer, asked, pieces))
    return made


def _portion(
    model: Any, tokenizer: Any, asked: list[list[int]], pieces: list[tuple[list[int], list[int]]]
) -> list[Text]:
    keys = [is_held_out(prompt) for prompt in asked]
    texts = list(zip(written(model, tokenizer, asked, WRITTEN), keys))
    made = [teacher_forced(model, text, True, held) for text, held in texts]
    return made + [
        teacher_forced(model, piece, False, is_held_out(key)) for key, piece in pieces if len(piece) >= MIN_LEN
    ]


def _as_list(value: int | Sequence[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
