"""Renders one chat template, in a process of its own that `worker.py` starts and may kill.

A template is a program that came with the checkpoint, and Jinja's sandbox keeps it from files and
Python's insides, but neither from all memory nor from running for days: the process has limits of
both. It imports Jinja and nothing else, so that it is there at once.

What it is asked for is a conversation: its variables, and how many bytes the prompt may have.

The dialect is transformers': trimmed blocks, loop controls, `raise_exception`, `strftime_now`, a
`tojson` that escapes nothing, and `{% generation %}` blocks, which only mark their contents.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from specpipe.text import worker_process


def serve() -> None:
    """Renders conversations until the other end is closed or its process gone."""
    worker_process.serve(_compile)


def _compile(setup: Mapping[str, Any]) -> worker_process.Work:
    try:
        template = _environment().from_string(setup["source"])
    except jinja2.TemplateSyntaxError as exc:
        raise worker_process.Fault(f"line {exc.lineno}: {exc.message}") from exc
    return partial(_render, template, setup)


def _render(
    template: jinja2.Template, setup: Mapping[str, Any], conversation: Mapping[str, Any]
) -> str:
    parts, num_bytes, most = [], 0, conversation["max_bytes"]
    for part in template.generate({**setup["special_tokens"], **conversation["variables"]}):
        num_bytes += len(part.encode(errors="surrogatepass"))
        if num_bytes > most:
            raise worker_process.Fault(
                f"the prompt has more than {most} bytes (serving.limits.max_prompt_bytes)"
            )
        parts.append(part)
    return "".join(parts)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Leaves to rendering what compiling would do at once: `9**9**9` takes hours."""

    intercepted_binops = frozenset({"*", "**", "%"})


def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks what training learns from; here its contents count as they are."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)
