"""What editors send to llama.cpp's endpoints, replayed."""

from __future__ import annotations

import json
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest

from longgraft.server.follow import Clock
from longgraft.server.llama import _watch
from longgraft.server.run import Server
from tests.server import live
from tests.server.live import PROMPT, http, plain

# As llama.vscode asks while somebody types.
EDITOR: dict[str, Any] = {
    "input_prefix": "def scale(values, factor):\n    return [",
    "input_suffix": "]\n",
    "input_extra": [{"text": "def double(values):\n    return scale(values, 2)\n", "filename": "double.py"}],
    "prompt": "value",
    "n_predict": 16,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "n_indent": 4,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "grammar": "",
    "mirostat": 0,
    "typical_p": 1.0,
}
TIMINGS = {"prompt_n", "prompt_ms", "prompt_per_second", "predicted_n", "predicted_ms", "predicted_per_second"}


def special(token: str) -> int:
    return int(live.tokenizer().convert_tokens_to_ids(token))


def editor_ids() -> list[int]:
    tokenizer = live.tokenizer()

    def ids(text: str) -> list[int]:
        return list(tokenizer(text)["input_ids"])

    pre, suf, mid, repo, file = (special(token) for token in live.FIM)
    other = EDITOR["input_extra"][0]
    head = [repo, *ids("project\n"), file, *ids(f"double.py\n{other['text']}"), file, *ids("current\n")]
    return [*head, pre, *ids(EDITOR["input_prefix"] + "value"), suf, *ids(EDITOR["input_suffix"]), mid]


def test_an_editor_asks(server: Server) -> None:
    """First the warm-up with nothing to write, then the question, as the editor does."""
    ends = tuple(special(token) for token in live.FIM)
    expected = plain(editor_ids(), max_new_tokens=16, top_k=40, top_p=0.99, eos_token_ids=ends)
    with http(server) as editor:
        warm = editor.post("/infill", json={**EDITOR, "n_predict": 0}).json()
        answer = editor.post("/infill", json=EDITOR).json()
    assert warm["content"] == "" and warm["tokens_predicted"] == 0 and warm["stop"] is True
    assert answer["content"] == expected.text and answer["tokens_predicted"] == len(expected.token_ids)
    assert answer["tokens_evaluated"] == expected.prompt_len and answer["truncated"] is False
    assert answer["timings"].keys() >= TIMINGS and answer["timings"]["cache_n"] > 0
    assert answer["timings"]["cache_n"] + answer["timings"]["prompt_n"] == expected.prompt_len
    assert answer["generation_settings"]["top_k"] == 40 and answer["tokens_cached"] > 0


def test_what_is_filled_in_may_have_a_form(server: Server) -> None:
    pytest.importorskip("llguidance")
    with http(server) as editor:
        answer = editor.post("/infill", json={**EDITOR, "grammar": 'root ::= "s" " " [a-z]+ " * factor"'}).json()
    assert re.fullmatch(r"s [a-z]+( \* factor)?", answer["content"]), answer["content"]


def test_a_completion_and_its_stream(server: Server) -> None:
    sent = {"prompt": PROMPT, "n_predict": 16, "stop": ["<END>"], "seed": -1, "cache_prompt": True}
    expected = plain(PROMPT, max_new_tokens=16)
    with http(server) as sender:
        whole = sender.post("/completion", json=sent).json()
        stream = sender.post("/completion", json={**sent, "stream": True})
    chunks = [json.loads(one) for one in live.events(stream)]
    assert whole["content"] == "".join(chunk["content"] for chunk in chunks) == expected.text
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert whole["stop_type"] == "limit" and whole["timings"]["predicted_n"] == 16
    assert whole["timings"]["draft_n"] >= whole["timings"]["draft_n_accepted"]


def test_a_stop_word_is_named(server: Server) -> None:
    text = plain(PROMPT, max_new_tokens=16).text
    with http(server) as sender:
        answer = sender.post("/completion", json={"prompt": PROMPT, "n_predict": 16, "stop": text[5:8]}).json()
    assert answer["stop_type"] == "word" and answer["stopping_word"] == text[5:8] and text[5:8] not in answer["content"]


def test_time_is_up_at_the_end_of_a_line() -> None:
    clock = Clock(asked=0.0, first=time.perf_counter() - 5)
    watch = _watch(SimpleNamespace(clock=clock), 2.0)
    assert watch("a whole line\n") and not watch("half a line")
    assert not _watch(SimpleNamespace(clock=clock), 60.0)("a whole line\n")
    assert not _watch(SimpleNamespace(clock=Clock()), 0.0)("\n")


@pytest.mark.parametrize(
    "sent",
    [
        {},
        {"prompt": None},
        {"prompt": "x", "n_predict": -7},
        {"prompt": "x", "top_k": "y"},
        {"prompt": "x", "grammar": 3},
        {"prompt": "x", "n_probs": 3},
        {"prompt": "x", "mirostat": 2},
    ],
)
def test_mistakes(server: Server, sent: dict[str, Any]) -> None:
    with http(server) as sender:
        assert sender.post("/completion", json=sent).status_code == 400
