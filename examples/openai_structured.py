"""Structured output with OpenAI's client: a schema, a choice, a regular expression.

python examples/openai_structured.py [http://127.0.0.1:8080/v1]
"""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from openai import OpenAI
from pydantic import BaseModel, Field

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1"


class Review(BaseModel):
    """What an answer must be. Its bounds keep a model from writing on until max_tokens."""

    verdict: Literal["good", "bad"]
    stars: Annotated[int, Field(ge=1, le=5)]
    why: Annotated[str, Field(max_length=40)]


client = OpenAI(base_url=url, api_key="none")
model = client.models.list().data[0].id

parsed = client.chat.completions.parse(
    model=model,
    messages=[{"role": "user", "content": "Review this function: def f(x): return x"}],
    response_format=Review,
    max_tokens=128,
)
print("parsed:", parsed.choices[0].message.parsed)

# What OpenAI's API has no words for goes by vLLM's.
chosen = client.completions.create(
    model=model,
    prompt="def is_prime(n):",
    extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
)
print("chosen:", chosen.choices[0].text)

matched = client.completions.create(
    model=model,
    prompt="# Written on ",
    extra_body={"structured_outputs": {"regex": "20[0-9]{2}-[01][0-9]-[0-3][0-9]"}},
)
print("matched:", matched.choices[0].text)
