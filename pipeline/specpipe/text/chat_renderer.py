"""Renders one chat template, in a process of its own that `chat_worker.py` starts and may kill.

A template is a program that came with the checkpoint, and Jinja's sandbox keeps it from files and
Python's insides, but neither from all memory nor from running for days: the process has limits of
both. It imports Jinja and nothing else, so that it is there at once.

Standard input is a socket: each line is JSON and is answered by another. The first says what is
rendered, and within which limits; each that follows is a conversation: its variables, and how many
bytes the prompt may have.

The dialect is transformers': trimmed blocks, loop controls, `raise_exception`, `strftime_now`, a
`tojson` that escapes nothing, and `{% generation %}` blocks, which only mark their contents.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

_SOCKET = 0  # standard input
_ORPHAN_S = 2.0  # how often an idle process looks whether its parent is there
_BLOCK_BYTES = 1 << 16  # most that is read at once: what a pipe holds on Linux (pipe(7))
_MAX_FAULT = 200  # characters of an error, which may repeat what a client sent


def serve() -> None:
    """Answers until the other end is closed or its process gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to a group; the parent decides
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    parent = os.getppid()
    line = _receive(parent)
    if line is None:
        return
    setup = json.loads(line)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = _address_space() + setup["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    templates: list[jinja2.Template] = []

    def compile_() -> dict[str, Any]:
        templates.append(_environment().from_string(setup["source"]))
        return {}

    _send(_within_limits(compile_, setup))
    while templates and (line := _receive(parent)) is not None:
        _send(_within_limits(partial(_render, templates[0], setup, line), setup))


def _render(template: jinja2.Template, setup: Mapping[str, Any], line: bytes) -> dict[str, Any]:
    conversation = json.loads(line)
    parts, num_bytes, most = [], 0, conversation["max_bytes"]
    for part in template.generate({**setup["special_tokens"], **conversation["variables"]}):
        num_bytes += len(part.encode(errors="surrogatepass"))
        if num_bytes > most:
            return _fault(
                f"the prompt has more than {most} bytes (serving.limits.max_prompt_bytes)"
            )
        parts.append(part)
    return {"prompt": "".join(parts)}


def _within_limits(work: Callable[[], dict[str, Any]], setup: Mapping[str, Any]) -> bytes:
    """Returns the answer of some work; SIGPROF ends the process when that takes too long.

    No handler of Python's would do, as nothing interrupts one multiplication of large numbers.
    """
    signal.setitimer(signal.ITIMER_PROF, setup["seconds"])
    try:
        return _line(work())
    except MemoryError:
        return _line(
            _fault(
                f"it needs more than {setup['memory_bytes']} bytes of memory "
                "(serving.limits.chat_template_memory_bytes)"
            )
        )
    except RecursionError:
        return _line(_fault("it is nested too deeply"))
    except jinja2.TemplateSyntaxError as exc:
        return _line(_fault(f"line {exc.lineno}: {exc.message}"))
    except Exception as exc:  # a template is a program: its data can make it raise anything
        return _line({**_fault(str(exc) or type(exc).__name__), "kind": "refusal"})
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _fault(message: str) -> dict[str, Any]:
    """Returns the answer for an error: its message on one short line."""
    message = " ".join(message[: 2 * _MAX_FAULT].split())
    return {"fault": message if len(message) <= _MAX_FAULT else f"{message[:_MAX_FAULT]}..."}


def _address_space() -> int:
    with open("/proc/self/statm") as file:  # proc(5): the first number counts pages
        return int(file.read().split()[0]) * resource.getpagesize()


def _receive(parent: int) -> bytes | None:
    """Returns the next line; None where no more will come.

    The other end may be held open by a fork of the parent, long after that is gone.
    """
    data = bytearray()
    while not data.endswith(b"\n"):
        if not select.select([_SOCKET], [], [], _ORPHAN_S)[0]:
            if os.getppid() != parent:
                return None
            continue
        block = os.read(_SOCKET, _BLOCK_BYTES)
        if not block:
            return None
        data += block
    return bytes(data)


def _line(answer: Mapping[str, Any]) -> bytes:
    text = json.dumps(answer, ensure_ascii=False)
    return f"{text}\n".encode(errors="surrogatepass")


def _send(line: bytes) -> None:
    unsent = memoryview(line)
    while unsent:
        unsent = unsent[os.write(_SOCKET, unsent) :]


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
