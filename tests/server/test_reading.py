"""Answers as a chat client reads them: the same however their text was cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longgraft.server.bodies import ChatRequest
from longgraft.server.errors import ApiError
from longgraft.server.reading import AnswerReader
from longgraft.server.structure import Structure, chat_structure, lead_of

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "</think>"}}\n</tool_call>'
END = "</think>"
# Text, its thought, its content, its calls.
ANSWERS = {
    "a thought and text": ("<think>\nhm <i>\n</think>\n\nyes ", "hm <i>", "yes ", 0),
    "opened by the prompt": ("hm\n</think>{}", "hm", "{}", 0),
    "nothing thought": ("<think>\n\n</think>\n\nyes", "", "yes", 0),
    "closed at once": (" </think>yes", "", "yes", 0),
    "cut in the thought": ("<think> hm </thin", "hm </thin", "", 0),
    "cut at its beginning": ("<thi", "<thi", "", 0),
    "a thought and a call": (f"<think>a {CALL[:11]} b</think>\n{CALL}", "a <tool_call> b", "", 1),
    "closed twice": ("a</think>b</think>c", "a", "b</think>c", 0),
    "nothing": ("", "", "", 0),
}


@pytest.mark.parametrize("name", ANSWERS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_thoughts_content_and_calls(name: str, data: Any) -> None:
    text, thought, content, num_calls = ANSWERS[name]
    structure = Structure(style="hermes", lead=END)
    message = AnswerReader(structure).whole(text)
    assert message.get("reasoning_content", "") == thought and (message["content"] or "") == content
    assert len(message.get("tool_calls", ())) == num_calls
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    reader, deltas = AnswerReader(structure), list[dict[str, Any]]()
    for begin, end in zip([0, *cuts], [*cuts, len(text)]):
        deltas += reader.push(text[begin:end])
    deltas += reader.push("", is_end=True)
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == thought
    assert "".join(delta.get("content", "") for delta in deltas) == content
    assert all(any(delta.values()) for delta in deltas) and reader.num_calls == num_calls
    called = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert sum("id" in call for call in called) == num_calls
    arguments = "".join(call["function"]["arguments"] for call in called)
    assert arguments == ('{"a": "</think>"}' if num_calls else "")


def test_plain_answers_are_what_they_are() -> None:
    text = " <think>\nno thought</think> <tool_call>{} "
    assert AnswerReader(Structure()).whole(text)["content"] == text
    assert AnswerReader(Structure()).push(text) == [{"content": text}]
    assert AnswerReader(Structure()).whole("")["content"] == ""


def test_when_a_model_thinks_first() -> None:
    knows = "{{ x }}</think>"
    assert lead_of(knows, "assistant\n", {}) == lead_of(knows, "assistant\n<think>\n", {}) == END
    assert lead_of(knows, "<think>\n\n</think>\n\n", {}) is None and lead_of("{{ x }}", "a", {}) is None
    assert lead_of(knows, "a", {"enable_thinking": False}) is None and lead_of(None, "a", {}) is None


def test_marks_that_texts_leave_out_are_not_looked_for() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    made: Any = SimpleNamespace(chat_template="<tool_call> </think>", all_special_tokens=[END])
    asked = {"messages": [{"role": "user", "content": "x"}]}
    for more in ({"response_format": {"type": "json_object"}}, {"tools": tools}):
        structure = chat_structure(ChatRequest.model_validate(asked | more), made, END)
        assert structure.lead is None and structure.grammar is not None and structure.grammar.lead == END
    made.all_special_tokens = ["</tool_call>"]
    with pytest.raises(ApiError, match="no tool calls that can be read"):
        chat_structure(ChatRequest.model_validate(asked | {"tools": tools}), made, None)
