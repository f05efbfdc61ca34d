"""Chat templates of the kinds that public models have, written here for what each of them does.

Each is told by what it reads: roles and their order, tool calls and results, content in parts,
Jinja's macros, namespaces and filters. `CONVERSATIONS` are what clients send.
"""

from __future__ import annotations

from typing import Any

TEMPLATES: dict[str, str] = {
    # Turns between marks, whatever the role.
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') "
        "+ '<|im_end|>' + '\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    # The system message goes into the first question; roles must take turns; content is trimmed.
    "llama_2": (
        "{% if messages[0]['role'] == 'system' %}"
        "{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}"
        "{% set turns = messages[1:] %}"
        "{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
        "{% for message in turns %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}"
        "{% endif %}"
        "{% if loop.index0 == 0 %}{% set content = system + message['content'] %}"
        "{% else %}{% set content = message['content'] %}{% endif %}"
        "{% if message['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}"
        "{% endfor %}"
    ),
    # A header before each turn; BOS before the first alone; trimmed by a filter.
    "llama_3": (
        "{% for message in messages %}"
        "{% set turn = '<|start|>' + message['role'] + '<|end|>\\n\\n' "
        "+ message['content'] | trim + '<|eot|>' %}"
        "{% if loop.index0 == 0 %}{% set turn = bos_token + turn %}{% endif %}"
        "{{ turn }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\\n\\n' }}{% endif %}"
    ),
    # Dates, tools as a variable, calls as JSON, results under another role.
    "llama_3_tools": (
        "{{- bos_token }}"
        "{%- if strftime_now is defined %}{% set year = strftime_now('%Y') %}"
        "{%- else %}{% set year = '2024' %}{% endif %}"
        "{%- if not tools is defined %}{% set tools = none %}{% endif %}"
        "{{- '<|start|>system<|end|>\\n\\nYear: ' + year + '\\n' }}"
        "{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{% endif %}"
        "{%- for message in messages %}"
        "{%- if not (message.role == 'ipython' or message.role == 'tool' "
        "or 'tool_calls' in message) %}"
        "{{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim "
        "+ '<|eot|>' }}"
        "{%- elif 'tool_calls' in message %}"
        "{%- if not message.tool_calls | length == 1 %}"
        "{{- raise_exception('one tool call at a time') }}{%- endif %}"
        "{%- set call = message.tool_calls[0].function %}"
        '{{- \'<|start|>assistant<|end|>\\n\\n{"name": "\' + call.name + \'", "parameters": \' }}'
        "{{- call.arguments | tojson }}{{- '}<|eot|>' }}"
        "{%- else %}"
        "{{- '<|start|>ipython<|end|>\\n\\n' }}"
        "{%- if message.content is mapping or message.content is iterable %}"
        "{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}"
        "{{- '<|eot|>' }}"
        "{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}"
    ),
    # No system role; the assistant has another name.
    "gemma": (
        "{{ bos_token }}"
        "{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
        "{% if message['role'] == 'assistant' %}{% set role = 'model' %}"
        "{% else %}{% set role = message['role'] %}{% endif %}"
        "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
    ),
    # Content is a text or goes through its parts, images included.
    "gemma_parts": (
        "{{ bos_token }}"
        "{%- for message in messages -%}"
        "{%- set role = 'model' if message.role == 'assistant' else message.role -%}"
        "{{ '<start_of_turn>' + role + '\\n' }}"
        "{%- if message['content'] is string -%}{{ message['content'] | trim }}"
        "{%- elif message['content'] is iterable -%}"
        "{%- for item in message['content'] -%}"
        "{%- if item['type'] == 'image' -%}{{ '<image>' }}"
        "{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}"
        "{%- endfor -%}"
        "{%- else -%}{{ raise_exception('Invalid content type') }}{%- endif -%}"
        "{{ '<end_of_turn>\\n' }}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"
    ),
    # Strict turns, nothing between them; a system message before the last question.
    "mistral": (
        "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}"
        "{%- set turns = messages[1:] %}{%- else %}{%- set turns = messages %}{%- endif %}"
        "{{- bos_token }}"
        "{%- for message in turns %}"
        "{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{- raise_exception('After the optional system message, roles must alternate') }}"
        "{%- endif %}"
        "{%- if message.role == 'user' %}"
        "{%- if loop.last and system is defined %}"
        "{{- '[INST] ' + system + '\\n\\n' + message.content + '[/INST]' }}"
        "{%- else %}{{- '[INST] ' + message.content + '[/INST]' }}{%- endif %}"
        "{%- else %}{{- ' ' + message.content + eos_token }}{%- endif %}"
        "{%- endfor %}"
    ),
    # Calls with ids as a JSON list, results with the id of their call; counted by a namespace.
    "mistral_tools": (
        "{{- bos_token }}"
        "{%- set ns = namespace(index=0) %}"
        "{%- for message in messages %}"
        "{%- if not (message.role == 'tool' or (message.tool_calls is defined "
        "and message.tool_calls is not none)) %}"
        "{%- if message.role != 'system' and (message['role'] == 'user') != (ns.index % 2 == 0) %}"
        "{{- raise_exception('roles must alternate') }}{%- endif %}"
        "{%- if message.role != 'system' %}{%- set ns.index = ns.index + 1 %}{%- endif %}"
        "{%- endif %}{%- endfor %}"
        "{%- for message in messages %}"
        "{%- if message.role == 'user' %}{{- '[INST] ' + message.content + '[/INST]' }}"
        "{%- elif message.tool_calls is defined and message.tool_calls is not none %}"
        "{{- '[TOOL_CALLS] [' }}"
        "{%- for tool_call in message.tool_calls %}"
        "{%- set out = tool_call.function | tojson %}{{- out[:-1] }}"
        "{%- if not tool_call.id is defined or tool_call.id | length != 9 %}"
        "{{- raise_exception('Tool call IDs should be strings with length 9!') }}{%- endif %}"
        "{{- ', \"id\": \"' + tool_call.id + '\"}' }}"
        "{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' + eos_token }}{%- endif %}"
        "{%- endfor %}"
        "{%- elif message.role == 'assistant' %}"
        "{{- ' ' + message['content'] | trim + eos_token }}"
        "{%- elif message.role == 'tool' %}"
        "{%- if message.content is defined and message.content.content is defined %}"
        "{%- set content = message.content.content %}"
        "{%- else %}{%- set content = message.content %}{%- endif %}"
        "{{- '[TOOL_RESULTS] {\"content\": ' + content | string "
        "+ ', \"call_id\": \"' + message.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
        "{%- endif %}{%- endfor %}"
    ),
    # Marks on lines of their own; trimmed blocks matter here.
    "phi_3": (
        "{% for message in messages %}\n"
        "  {% if message['role'] in ['system', 'user'] and message['content'] %}\n"
        "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
        "  {% elif message['role'] == 'assistant' %}\n"
        "{{ '<|assistant|>\\n' + message['content'] + '<|end|>\\n' }}"
        "  {% endif %}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}"
        "{% else %}{{ eos_token }}{% endif %}"
    ),
    # A default system message; calls as XML with JSON inside; neighbouring results in one turn.
    "qwen_2_tools": (
        "{%- if messages[0]['role'] == 'system' %}"
        "{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}"
        "{%- else %}{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{%- endif %}"
        "{%- for message in messages %}"
        "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) "
        "or (message.role == 'assistant' and not message.tool_calls) %}"
        "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
        "{%- elif message.role == 'assistant' %}"
        "{{- '<|im_start|>' + message.role }}"
        "{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}"
        "{%- for tool_call in message.tool_calls %}"
        "{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}"
        "{%- endif %}"
        '{{- \'\\n<tool_call>\\n{"name": "\' }}{{- tool_call.name }}'
        "{{- '\", \"arguments\": ' }}{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}"
        "{%- endfor %}{{- '<|im_end|>\\n' }}"
        "{%- elif message.role == 'tool' %}"
        "{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}"
        "{{- '<|im_start|>user' }}{%- endif %}"
        "{{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}"
        "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
        "{{- '<|im_end|>\\n' }}{%- endif %}"
        "{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    ),
    # Thoughts of the last answers alone; arguments may be a text; a search from the end.
    "qwen_3_thoughts": (
        "{%- set ns = namespace(last=-1) %}"
        "{%- for message in messages[::-1] %}"
        "{%- set index = (messages | length - 1) - loop.index0 %}"
        "{%- if ns.last < 0 and message.role == 'user' and message.content is string %}"
        "{%- set ns.last = index %}{%- endif %}"
        "{%- endfor %}"
        "{%- for message in messages %}"
        "{%- if message.content is string %}{%- set content = message.content %}"
        "{%- else %}{%- set content = '' %}{%- endif %}"
        "{%- if message.role == 'assistant' %}"
        "{%- set thoughts = '' %}"
        "{%- if message.reasoning_content is string %}"
        "{%- set thoughts = message.reasoning_content %}"
        "{%- elif '</think>' in content %}"
        "{%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}"
        "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
        "{{- '<|im_start|>assistant\\n' }}"
        "{%- if loop.index0 > ns.last and thoughts %}"
        "{{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}"
        "{{- content }}"
        "{%- for call in message.tool_calls or [] %}"
        "{%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}"
        "{%- if call.function %}{%- set call = call.function %}{%- endif %}"
        "{{- '<tool_call>' + call.name + ': ' }}"
        "{%- if call.arguments is string %}{{- call.arguments }}"
        "{%- else %}{{- call.arguments | tojson }}{%- endif %}"
        "{{- '</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}"
        "{%- else %}"
        "{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{%- endif %}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    ),
    # A macro that writes JSON types; results named by their tool.
    "hermes_tools": (
        "{%- macro written(value) -%}"
        "{%- if value is mapping -%}{ {%- for key, item in value.items() -%}"
        "{{ key }}={{ written(item) }}{% if not loop.last %}, {% endif %}{%- endfor -%} }"
        "{%- elif value is string -%}'{{ value }}'"
        "{%- else -%}{{ value | tojson }}{%- endif -%}"
        "{%- endmacro -%}"
        "{{ bos_token }}"
        "{%- for message in messages %}"
        "{%- if message.tool_calls %}"
        "{{- '<|im_start|>assistant' }}"
        "{%- for call in message.tool_calls %}"
        "{{- '\\n<tool_call>' + call.function.name + '(' + written(call.function.arguments) "
        "+ ')</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}"
        "{%- elif message.role == 'tool' %}"
        "{{- '<|im_start|>tool\\n<tool_response>' + (message.name ~ ': ' if message.name else '') "
        "~ message.content ~ '</tool_response><|im_end|>\\n' }}"
        "{%- else %}"
        "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
        "{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    ),
    # The system message first, wherever it stands; answers lose their thoughts.
    "deepseek": (
        "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}"
        "{% endif %}"
        "{% set ns = namespace(system='', is_tool=false, is_first=true) %}"
        "{%- for message in messages %}{%- if message['role'] == 'system' %}"
        "{% set ns.system = ns.system + message['content'] %}{%- endif %}{%- endfor %}"
        "{{ bos_token }}{{ ns.system }}"
        "{%- for message in messages %}"
        "{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}"
        "{{ '<|User|>' + message['content'] }}{%- endif %}"
        "{%- if message['role'] == 'assistant' and message['content'] is not none "
        "and message['content'] is defined %}"
        "{% set content = message['content'] %}"
        "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}"
        "{% endif %}{{ '<|Assistant|>' + content + '<|end|>' }}{%- endif %}"
        "{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}"
        "{{ '<|tool|>' + message['content'] + '<|end|>' }}{%- endif %}"
        "{%- endfor -%}"
        "{% if add_generation_prompt and not ns.is_tool %}{{ '<|Assistant|>' }}{% endif %}"
    ),
    # Newlines and EOS after each turn, on lines that are trimmed.
    "zephyr": (
        "{% for message in messages %}\n"
        "{% if message['role'] == 'user' %}\n"
        "{{ '<|user|>\\n' + message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'system' %}\n"
        "{{ '<|system|>\\n' + message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'assistant' %}\n"
        "{{ '<|assistant|>\\n' + message['content'] + eos_token }}\n"
        "{% endif %}\n"
        "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n"
        "{% endfor %}"
    ),
    # Plain words, and a default preamble.
    "vicuna": (
        "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + ' ' }}"
        "{% else %}{{ 'A chat between a user and an assistant. ' }}{% endif %}"
        "{% for message in messages %}"
        "{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}"
        "{% elif message['role'] == 'assistant' %}"
        "{{ 'ASSISTANT: ' + message['content'] + eos_token }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    ),
    # Instructions; the text is written as it is, without a `+`.
    "alpaca": (
        "{% for message in messages %}"
        "{% if message.role == 'user' %}### Instruction:\n{{ message.content | trim }}\n\n"
        "{% elif message.role == 'assistant' %}### Response:\n{{ message.content }}\n\n"
        "{% else %}{{ message.content }}\n\n{% endif %}"
        "{% endfor %}### Response:\n"
    ),
    # Upper-case tokens; a result is a document.
    "command_r": (
        "{{ bos_token }}"
        "{% set loop_messages = messages %}{% set preamble = 'You are an assistant.' %}"
        "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
        "{% set preamble = messages[0]['content'] %}{% endif %}"
        "{{ '<|START|><|SYSTEM|>' + preamble + '<|END|>' }}"
        "{% for message in loop_messages %}"
        "{% if message['role'] == 'user' %}"
        "{{ '<|START|><|USER|>' + message['content'].strip() + '<|END|>' }}"
        "{% elif message['role'] == 'assistant' and message['tool_calls'] is defined %}"
        "{{ '<|START|><|BOT|>Action: ' }}"
        "{{ message['tool_calls'] | map(attribute='function') | list | tojson(indent=4) }}"
        "{{ '<|END|>' }}"
        "{% elif message['role'] == 'assistant' %}"
        "{{ '<|START|><|BOT|>' + message['content'].strip() + '<|END|>' }}"
        "{% elif message['role'] == 'tool' %}"
        "{{ '<|START|><|SYSTEM|><results>\\nDocument: ' ~ loop.index0 ~ '\\n' }}"
        "{{ message['content'] }}{{ '</results><|END|>' }}"
        "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|START|><|BOT|>' }}{% endif %}"
    ),
    # Today's month; documents and tools that are not given.
    "granite": (
        "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}"
        "{%- set rest = messages[1:] %}"
        "{%- else %}{%- set system = 'Month: ' + strftime_now('%Y-%m') + '.' %}"
        "{%- if tools and documents %}{%- set system = system + ' Both.' %}"
        "{%- elif tools %}{%- set system = system + ' Tools.' %}{%- endif %}"
        "{%- set rest = messages %}{%- endif %}"
        "{{- '<|role|>system<|/role|>' + system + '<|end|>\\n' }}"
        "{%- for message in rest %}"
        "{{- '<|role|>' + message['role'] + '<|/role|>' }}"
        "{%- if message.tool_calls %}{{- '<|tool_call|>' + message.tool_calls | tojson }}"
        "{%- else %}{{- message['content'] }}{%- endif %}{{- '<|end|>\\n' }}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|role|>assistant<|/role|>' }}{%- endif %}"
    ),
    # A default system message, inside the loop.
    "smollm_2": (
        "{% for message in messages %}"
        "{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\\nYou are a small assistant<|im_end|>\\n' }}{% endif %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    # What training learns from is marked.
    "generation_blocks": (
        "{% for message in messages %}"
        "{% if message.role == 'assistant' %}<|assistant|>"
        "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
        "{% else %}<|{{ message.role }}|>{{ message.content }}{% endif %}"
        "{% endfor %}<|assistant|>"
    ),
    # Every key of a message, whatever it is.
    "items": (
        "{% for message in messages %}"
        "{% for key, value in message.items() %}{{ key }}={{ value | tojson }};{% endfor %}\n"
        "{% if loop.index0 >= 8 %}{% break %}{% endif %}"
        "{% endfor %}"
    ),
}

_CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Köln", "days": [1, 2], "wind": None}},
}
_STRING_CALL = {**_CALL, "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
_RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": '{"c": 21}'}
_USER = {"role": "user", "content": "Wie warm ist es? <é> "}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [_USER],
    "a system message": [{"role": "system", "content": "Be brief."}, _USER],
    "two turns": [_USER, {"role": "assistant", "content": " 21 °C.\n"}, _USER],
    "two questions": [_USER, _USER],
    "a system message last": [_USER, {"role": "system", "content": "Be brief."}],
    "a call, content null": [
        _USER,
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        _RESULT,
    ],
    "a call, no content": [_USER, {"role": "assistant", "tool_calls": [_CALL]}, _RESULT],
    "a call, content empty": [
        _USER,
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        _RESULT,
        {"role": "assistant", "content": "21 °C"},
        _USER,
    ],
    "a call with words": [
        _USER,
        {"role": "assistant", "content": "One moment.", "tool_calls": [_CALL]},
        _RESULT,
    ],
    "two calls": [
        _USER,
        {"role": "assistant", "content": None, "tool_calls": [_CALL, {**_CALL, "id": "call00002"}]},
        _RESULT,
        {**_RESULT, "tool_call_id": "call00002"},
    ],
    "arguments as a text": [
        _USER,
        {"role": "assistant", "content": None, "tool_calls": [_STRING_CALL]},
        _RESULT,
    ],
    "an answer without content": [_USER, {"role": "assistant"}, _USER],
    "a question that is null": [{"role": "user", "content": None}],
    "names and unknown keys": [
        {**_USER, "name": "Ann", "metadata": {"x": [1, True, 2.5]}, "tool_calls": None},
        {"role": "assistant", "content": "Hi.", "refusal": None, "audio": None},
        {"role": "user", "content": "More", "name": None},
    ],
    "thoughts": [
        _USER,
        {"role": "assistant", "content": "21", "reasoning_content": "Look it up.\n"},
        _USER,
        {"role": "assistant", "content": "22", "reasoning": "Again."},
    ],
    "thoughts in the text": [
        _USER,
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\n21"},
        _USER,
    ],
}
