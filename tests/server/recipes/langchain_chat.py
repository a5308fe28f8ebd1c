"""LangChain's ChatOpenAI: ask, stream, log-probabilities. Arguments: base URL, key. Prints JSON."""

import json
import sys

from langchain_openai import ChatOpenAI

chat = ChatOpenAI(base_url=sys.argv[1], api_key=sys.argv[2], model="tiny", temperature=0, max_completion_tokens=12)
whole = chat.invoke("The quick brown fox")
streamed = "".join(str(piece.content) for piece in chat.stream("The quick brown fox"))
scored = chat.bind(logprobs=True).invoke("The quick brown fox")
print(
    json.dumps(
        {
            "chat": [whole.content, streamed, scored.content],
            "completion": [],
            "tokens": [whole.usage_metadata["output_tokens"], len(scored.response_metadata["logprobs"]["content"])],
        }
    )
)
