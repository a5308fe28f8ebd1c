"""A tiny model saved with a byte-level tokenizer, and the command line run on it."""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from longgraft.cli import app
from longgraft.cost import ROW_BUCKETS
from tests.models import VOCAB, tiny_model

TEMPLATE = """
{%- for m in messages %}{% if m.role != 'user' %}{{ raise_exception('unknown role') }}{% endif -%}
<|start|>{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
PROMPT = "the cat sat on the mat, the cat sat on the hat, the cat sat on"


@lru_cache(maxsize=4)
def _trained(vocab_size: int) -> str:
    """Trained once: on a loaded machine two trainings were seen to number tokens of equal rank differently."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|start|>"], initial_alphabet=alphabet, show_progress=False
    )
    corpus = [PROMPT, "".join(chr(c) for c in range(33, 400)), "hats and cats and mats sit on that flat bat"] * 3
    tokenizer.train_from_iterator(corpus, trainer)
    return str(tokenizer.to_str())


def byte_level(vocab_size: int = VOCAB, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer.from_str(_trained(vocab_size))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|start|>", chat_template=template)


def save(path: Path) -> str:
    """Save the model and its tokenizer, and return the folder's name."""
    tiny_model("llama", torch.float64).save_pretrained(path)
    byte_level().save_pretrained(path)
    return str(path)


def cheap_rows(path: Path) -> str:
    """Write a frozen cost table by which rows cost nothing, so that every proposal is verified on any machine."""
    table = {"longgraft_cost_table": 1, "rows_fixed_slope": [[rows, 1.0, 0.0] for rows in ROW_BUCKETS]}
    path.write_text(json.dumps(table))
    return str(path)


@contextmanager
def calm() -> Iterator[None]:
    """Give back what commands set for other libraries: the environment and the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with patch.dict(os.environ):
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def silent() -> Iterator[None]:
    """No network, no progress bars, no advice from other libraries."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):
            yield
    finally:
        logging.disable(level)


def invoke(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin, catch_exceptions=False)


def last_json(stdout: str) -> dict[str, Any]:
    return dict(json.loads(stdout.splitlines()[-1]))
