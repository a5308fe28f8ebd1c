"""A real server on loopback with a tiny model, and what plain decoding says to the same requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import openai
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from longgraft.config import EngineConfig, SamplingParams
from longgraft.engine import Engine
from longgraft.server.run import Server, bound
from longgraft.server.settings import ServerSettings
from tests.engines import cost_of, model_of
from tests.small_tokenizers import byte_level

TEMPLATE = """
{%- for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif -%}
<|start|>{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}<|start|>assistant: {{ mood or '' }}{% endif %}"""
FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"]
CHAT = [{"role": "user", "content": "The quick brown fox"}]
ENDLESS: dict[str, Any] = {"messages": CHAT, "max_tokens": 1500, "temperature": 1.0, "seed": 1}
PROMPT = "def scale(values, factor):\n    return [value * factor for value in values]\n\ndef scale(values, fac"


@lru_cache(maxsize=1)
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, with a chat template and tokens for filling in; its vocabulary is the tiny model's."""
    made = byte_level(315)
    made.add_tokens([AddedToken(token, special=True) for token in FIM], special_tokens=True)
    made.chat_template = TEMPLATE
    assert len(made) == 320
    return made


def tiny_engine(**settings: Any) -> Engine:
    """A fresh engine; rows cost little, so most proposals are verified."""
    return Engine(model_of(), tokenizer(), EngineConfig(**settings), cost=cost_of(0.03))


@lru_cache(maxsize=1)
def _plain() -> Engine:
    return tiny_engine(policy="plain", prefix_cache=False)


def plain(prompt: str | Sequence[int], **params: Any) -> Any:
    """What plain decoding says: the output of an engine of its own."""
    return _plain().generate(prompt if isinstance(prompt, str) else list(prompt), SamplingParams(**params))


def chat_ids(messages: Sequence[dict[str, str]], **options: Any) -> list[int]:
    encoded = tokenizer().apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True, **options)
    return list(encoded["input_ids"])


@contextmanager
def serving(engine: Engine | None = None, **settings: Any) -> Iterator[Server]:
    """Serve until the block ends; afterwards everything was given back."""
    engine = engine or tiny_engine()
    server = Server(ServerSettings(**{"names": ("tiny", "gpt-tiny"), **settings}), bound("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=(lambda: engine,))
    thread.start()
    try:
        wait_for(lambda: server.desk.service is not None)
        yield server
    finally:
        server.stop()
        thread.join(60)
        assert not thread.is_alive()
    assert is_whole(engine)


def wait_for(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def is_whole(engine: Engine) -> bool:
    """True if no request holds a chunk and the model has its own attention again."""
    pool, own = engine.pool, engine.target.model.config.get_text_config()._attn_implementation
    return own == "sdpa" and pool.num_free == pool.num_chunks and pool.check_integrity() == ""


def idle(server: Server) -> bool:
    service = server.desk.service
    return service is not None and service.num_requests == 0 and service.num_running == 0


def settled(server: Server) -> None:
    """Wait until nothing is on its way and hold the pool against its books."""
    service = server.desk.service
    assert service is not None
    wait_for(lambda: idle(server))
    wait_for(lambda: service.engine.pool.num_free == service.engine.pool.num_chunks)
    assert service.engine.pool.check_integrity() == ""


class _Sender(openai.DefaultHttpxClient):
    """Speaks without certificates, which take 50 ms to read; closed with its client, as the client's own is."""

    def __del__(self) -> None:
        self.close()


def client(server: Server, key: str = "none", **options: Any) -> openai.OpenAI:
    options = {"max_retries": 0, "timeout": 60, "http_client": _Sender(verify=False, trust_env=False)} | options
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, **options)


def http(server: Server, **options: Any) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=60, trust_env=False, verify=False, **options)


def events(response: httpx.Response) -> list[str]:
    """The data of each event of a finished stream."""
    return [part[len("data: ") :] for part in response.text.split("\n\n") if part.startswith("data: ")]


def corpus(folder: Path, text: str) -> str:
    """Build a corpus of one document and return its folder's name."""
    from longgraft.index.corpus_build import build_corpus

    (folder / "texts").mkdir(parents=True)
    (folder / "texts" / "one.txt").write_text(text)
    build_corpus(folder / "shared", [folder / "texts"], tokenizer())
    return str(folder / "shared")
