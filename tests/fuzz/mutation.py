"""One change of an input, by what it is made of: JSON wherever it stands, else lines and words."""

from __future__ import annotations

import json
from random import Random
from typing import Any

# As they stand in the text, since no value of Python's is written as 1e400 or as a key twice.
VALUES = (
    *("null", "true", "false", "0", "-0.0", "1", "-1", "2", "7", "0.5", "-3.5", "1e-320", "1e308"),
    *("1e400", "-1e400", "NaN", "Infinity", "9" * 31, "9" * 5000, "-" + "9" * 400),
    *(str(sign * 2**bits + by) for bits in (7, 31, 63, 64) for sign in (1, -1) for by in (0, -1)),
    *('""', '" "', '"a"', r'"\u0000"', r'"\ud800"', r'"\udc80x"', r'"\u0661"', r'"\u202e"'),
    *(r'"a\nb\u001b[31m"', '"../.."', '"/etc/passwd"', '"~nobody/x"', '"-1"', '"1"', '"0x1"'),
    *('"{{ 7 }}"', '"%s%n"', '"__class__"', '"' + "x" * 300 + '"', r'"' + r"\u00e9" * 9000 + '"'),
    *("[]", "{}", "[[]]", '{"": null}', "[null]", '["a", "a"]', '{"a": 1, "a": 2}', "[1e400]"),
    *("[" + "0," * 3000 + "0]", "[" * 150 + "]" * 150, "[" * 9000 + "]" * 9000),
    *('{"a":' * 150 + "1" + "}" * 150, '{"a":' * 9000, '{"type": "text", "text": "a"}'),
)
_SIGNS = """
: , ' " \\ # ~ & * ? ! | > % = << &a *a !!int !!set !!omap !!binary !!timestamp .inf 0x_ 1:60:1.5
2001-13-45 <<:*a !!python/object/apply:os.system -1 0 {} [] {{ }} {% %} {# #} messages [0] (1)
.__class__ |tojson |trim + *10**9 **9**9 namespace( raise_exception( {%endfor%} {%endif%}
"""
WORDS = (
    *_SIGNS.split(),
    *("{% for x in range(9**9) %}", "{% if x %}", "{% macro f(x) %}", "<<: [*a, *a]\n", "---\n"),
    *("- ", ": ", "? ", "\0", "\n", "\n\n", "\r\n", "\r", "\t", " ", "\x85", "\ufeff", "\u2028"),
    *("\u202e", "\u0661", "\x1b[31m", "x" * 300, "9" * 5000, "(" * 900, "[" * 9000),
    *("data:", "data: [DONE]\n\n", "data: {}\n\n", "event: x\n", ": c\n", "HTTP/1.1 200 OK\r\n"),
    *("Content-Length: 5\r\n", "Transfer-Encoding: chunked\r\n", "5\r\n", "0\r\n\r\n"),
)


def mutate(data: bytes, random: Random) -> bytes:
    """Returns the input after a few changes."""
    for _ in range(random.choice((1, 1, 1, 2, 3, 5))):
        change = random.choice(
            (_change_json, _change_json, _change_json, _change_text, _change_bytes)
        )
        data = change(data, random)
    return data


def _change_json(data: bytes, random: Random) -> bytes:
    text = data.decode(errors="surrogateescape")
    for _ in range(3):
        start = text.find(
            random.choice("{{["), random.choice((0, 0, random.randrange(len(text) + 1)))
        )
        if start < 0:
            continue
        try:
            tree, end = json.JSONDecoder().raw_decode(text, start)
            changed = _changed(tree, random)
        except (ValueError, RecursionError):
            continue
        return (text[:start] + changed + text[end:]).encode(errors="surrogatepass")
    return _change_text(data, random)


def _changed(tree: Any, random: Random) -> str:
    """Writes a tree of JSON in which one place is another value, gone, twice, or another's copy."""
    root = {"": tree}
    container, key = _place(root, random)
    kind = random.choice(("value", "value", "value", "value", "remove", "copy", "add", "twice"))
    mark, put = "\ue000", random.choice(VALUES)
    if kind == "remove" and container is not root:
        del container[key]
    elif kind == "copy":
        other, from_ = _place(root, random)
        put, container[key] = json.dumps(other[from_]), mark
    elif kind in ("add", "twice") and isinstance(container[key], dict):
        name = random.choice((*container[key], "", "a", "x" * 300, "\ud800", "__class__"))
        put = f'"", {json.dumps(name)}: {put}'
        container[key] = {**container[key], name + (mark if kind == "twice" else ""): mark}
    else:
        container[key] = mark
    text = json.dumps(root[""], ensure_ascii=random.random() < 0.5)
    return text.replace(r'"\ue000"', put).replace('"\ue000"', put).replace(mark, "")


def _place(root: dict[str, Any], random: Random) -> tuple[Any, Any]:
    """Walks down from the root, further at each value with a chance of three quarters."""
    container: Any = root
    key: Any = ""
    while isinstance(container[key], (dict, list)) and container[key] and random.random() < 0.75:
        container = container[key]
        keys = list(container) if isinstance(container, dict) else range(len(container))
        key = random.choice(keys)
    return container, key


def _change_text(data: bytes, random: Random) -> bytes:
    """Removes, doubles, moves or puts in a few characters, lines or words."""
    places = (*(_place_in(data, random) for _ in range(3)),)
    (first, last), other = sorted(places[:2]), places[2]
    last = min(last, first + 2000)
    part = data[first:last]
    word = random.choice(WORDS).encode()
    return random.choice(
        (
            data[:first] + data[last:],
            data[:last] + part * random.choice((1, 1, 2, 100)) + data[last:],
            data[:other] + part + data[other:],
            data[:other] + word + data[other:],
            data[:first] + word + data[last:],
        )
    )


def _place_in(data: bytes, random: Random) -> int:
    """Returns any place, or the end of the word there, or that of the line, or the end of all."""
    start = random.randrange(len(data) + 1)
    mark = random.choice((b"", b"", b" ", b"\n", b"\n", b"\0"))
    found = data.find(mark, start)
    return len(data) if found < 0 else found + len(mark)


def _change_bytes(data: bytes, random: Random) -> bytes:
    changed = bytearray(data or b"\0")
    for _ in range(random.choice((1, 1, 2, 8))):
        changed[random.randrange(min(len(changed), random.choice((9, 200, 10**9))))] = (
            random.choice((0, 1, 0x7F, 0x80, 0xC3, 0xFF, random.randrange(256)))
        )
    return bytes(changed)
