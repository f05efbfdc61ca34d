"""A checkpoint's chat template: messages to one prompt, in Jinja's sandbox.

The dialect is transformers': trimmed blocks, loop controls, `raise_exception`, `strftime_now`, a
`tojson` that escapes nothing, and `{% generation %}` blocks, which only mark their contents.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from specpipe.chat_messages import (
    check_messages,
    for_template,
    has_parts,
    shows_parts,
    with_joined_parts,
)
from specpipe.errors import CheckpointError, RequestError


class ChatTemplate:
    """One template; compiled when first used."""

    def __init__(self, source: str, *, file: str, special_tokens: Mapping[str, str]) -> None:
        """special_tokens are the variables `bos_token`, `eos_token`, … that templates read."""
        self.source = source
        self._file = file
        self._special_tokens = dict(special_tokens)

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Returns the conversation as a prompt that asks for the assistant's turn.

        A template that does not go through the parts of a content gets them joined to one text.
        """
        messages = for_template(check_messages(messages))
        if has_parts(messages):
            try:
                prompt = self._render(messages)
            except RequestError:  # most often of adding a list to a text
                prompt = ""
            if shows_parts(messages, prompt):
                return prompt
            messages = with_joined_parts(messages)
        return self._render(messages)

    def _render(self, messages: list[dict[str, Any]]) -> str:
        template = self._template
        try:
            return template.render(
                **self._special_tokens,
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
            )
        except Exception as exc:  # a template is a program: its data can make it raise anything
            raise RequestError(f"messages: the chat template refuses them: {exc}") from exc

    def check(self) -> None:
        """Raises CheckpointError when the template does not compile."""
        _ = self._template

    @cached_property
    def _template(self) -> jinja2.Template:
        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as exc:
            raise CheckpointError(
                f"{self._file}: the chat template does not compile: line {exc.lineno}: {exc}"
            ) from exc
        except Exception as exc:  # nested too deeply; a number that Python does not read
            raise CheckpointError(
                f"{self._file}: the chat template does not compile: {exc}"
            ) from exc


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
