"""OpenAI's own client: a chat, whole and then streamed, with the numbers of its speculation.

python examples/openai_chat.py [http://127.0.0.1:8080/v1]
"""

from __future__ import annotations

import sys

from openai import BadRequestError, OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1"
client = OpenAI(base_url=url, api_key="none")
model = client.models.list().data[0].id

answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Write fibonacci(n)."}],
    max_tokens=32,
    temperature=0,
)
print(answer.choices[0].message.content)
print("finished by:", answer.choices[0].finish_reason)

with client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Write fibonacci(n)."}],
    max_tokens=32,
    temperature=0.8,
    seed=7,
    stream=True,
    stream_options={"include_usage": True},
) as stream:
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage:
            print("\ntokens:", chunk.usage.prompt_tokens, "+", chunk.usage.completion_tokens)

try:
    client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Hi."}], temperature=-1.0
    )
except BadRequestError as error:
    print("refused:", error.body)
