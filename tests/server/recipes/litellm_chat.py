"""litellm, by its openai and hosted_vllm routes. Arguments: base URL, key. Prints JSON."""

import json
import sys

import litellm

options = {"api_base": sys.argv[1], "api_key": sys.argv[2], "max_tokens": 12, "temperature": 0}
messages = [{"role": "user", "content": "The quick brown fox"}]
whole = litellm.completion(model="openai/tiny", messages=messages, **options)
other = litellm.completion(model="hosted_vllm/tiny", messages=messages, **options)
predicted = {"type": "content", "content": whole.choices[0].message.content}
guided = litellm.completion(model="openai/tiny", messages=messages, prediction=predicted, **options)
stream = litellm.completion(model="openai/tiny", messages=messages, stream=True, **options)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
text = litellm.text_completion(model="text-completion-openai/tiny", prompt="The quick brown fox", **options)
answers = [whole, other, guided]
print(
    json.dumps(
        {
            "chat": [*(one.choices[0].message.content for one in answers), streamed],
            "completion": [text.choices[0].text],
            "tokens": [whole.usage.completion_tokens],
        }
    )
)
