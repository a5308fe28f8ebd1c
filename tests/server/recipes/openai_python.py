"""The openai package, 2.x or 3.x: chat, stream, prediction, completion. Arguments: base URL, key. Prints JSON."""

import json
import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1], api_key=sys.argv[2])
messages = [{"role": "user", "content": "The quick brown fox"}]
whole = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=12)
stream = client.chat.completions.create(
    model="tiny", messages=messages, max_tokens=12, stream=True, stream_options={"include_usage": True}
)
pieces, usage = [], None
for chunk in stream:
    pieces += [choice.delta.content or "" for choice in chunk.choices]
    usage = chunk.usage or usage
guided = client.chat.completions.create(
    model="tiny",
    messages=messages,
    max_tokens=12,
    prediction={"type": "content", "content": whole.choices[0].message.content or ""},
    extra_body={"longgraft": {"documents": {"note.md": "The lazy dog sleeps."}, "policy": "retrieval"}},
)
text = client.completions.create(model="tiny", prompt="The quick brown fox", max_tokens=12)
print(
    json.dumps(
        {
            "chat": [whole.choices[0].message.content, "".join(pieces), guided.choices[0].message.content],
            "completion": [text.choices[0].text],
            "tokens": [whole.usage.completion_tokens, usage.completion_tokens],
        }
    )
)
