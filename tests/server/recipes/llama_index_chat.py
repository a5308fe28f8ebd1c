"""LlamaIndex's OpenAILike, as a chat and as a completion model. Arguments: base URL, key. Prints JSON."""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

options = {"model": "tiny", "api_base": sys.argv[1], "api_key": sys.argv[2], "temperature": 0, "max_tokens": 12}
chat = OpenAILike(is_chat_model=True, **options)
messages = [ChatMessage(role="user", content="The quick brown fox")]
whole = chat.chat(messages).message.content
streamed = "".join(piece.delta or "" for piece in chat.stream_chat(messages))
text = OpenAILike(is_chat_model=False, **options).complete("The quick brown fox").text
print(json.dumps({"chat": [whole, streamed], "completion": [text], "tokens": []}))
