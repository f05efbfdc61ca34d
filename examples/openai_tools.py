"""Tools with OpenAI's client: the model calls a function, is told what came of it, and answers.

python examples/openai_tools.py [http://127.0.0.1:8080/v1]
"""

from __future__ import annotations

import json
import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1"


def weather(city: str, days: int) -> str:
    """Stands for what a function of yours would do."""
    return f"{city} in {days} days: 21 °C"


tools: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather of the next days.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 20},
                    "days": {"type": "integer", "minimum": 0, "maximum": 14},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
]

client = OpenAI(base_url=url, api_key="none")
model = client.models.list().data[0].id
messages: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "How warm will it be in Köln tomorrow?"}
]

answer = client.chat.completions.create(
    model=model,
    messages=messages,
    tools=tools,
    tool_choice="required",  # or "auto": the model decides, and nothing holds its arguments
    parallel_tool_calls=False,
    max_tokens=128,
)
message = answer.choices[0].message
print("finished by:", answer.choices[0].finish_reason)

messages.append(message.model_dump(exclude_none=True))
for call in message.tool_calls or ():
    arguments = json.loads(call.function.arguments)
    print("call:", call.function.name, arguments)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": weather(**arguments)})

answer = client.chat.completions.create(
    model=model, messages=messages, tools=tools, tool_choice="none", max_tokens=32
)
print("answer:", answer.choices[0].message.content)
