"""One tool call that comes in pieces: its name, and its arguments as they grow."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from specpipe.errors import is_utf8
from specpipe.text.tools.json_scanner import JsonScanner, State

_ESCAPED = {code: json.dumps(chr(code))[1:-1] for code in range(0x20)}
_ARGUMENTS = ("arguments", "parameters")


class CallArguments:
    """The arguments of a call whose name is known: a JSON object, from its first brace on.

    name       of the function
    has_begun  it is a call for certain, and what comes is passed on
    is_open    more of it may come
    is_whole   all of the call was there
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.has_begun = False
        self.is_open = True
        self.is_whole = False
        self._arguments: list[str] = []
        self._scanner = JsonScanner()

    def feed(self, text: str) -> int:
        """Returns how many characters belong to the call; it is not open if others follow."""
        at, scanner = 0, self._scanner
        while self.is_open and at < len(text):
            state, depth = scanner.state, scanner.depth
            end = scanner.step(text, at)
            if scanner.state is State.BROKEN:
                self._break()
                break
            self._read(text[at:end], state, depth)
            at = end
            if scanner.state is State.DONE:
                self._finish()
        return at

    def take_arguments(self) -> str:
        """Returns the arguments that came since the last time."""
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def _read(self, piece: str, state: State, depth: int) -> None:
        """Reads what the scanner went past; state and depth are those before."""
        self._pass_on(piece, state)
        self.has_begun = True

    def _break(self) -> None:
        self.is_open = False

    def _finish(self) -> None:
        self.is_open, self.is_whole = False, True

    def _pass_on(self, piece: str, state: State) -> None:
        self._arguments.append(piece.translate(_ESCAPED) if state is State.STRING else piece)


class CallObject(CallArguments):
    """A call as an object: `{"name": …, "arguments": {…}}`, in any order, with other keys or none.

    It is a call once its name is one of `names` and its arguments have begun. They may have
    the name `parameters`, and be an object written into a string; `null`, `""` and, where
    `needs_arguments` is not set, none at all are the same as `{}`.
    """

    def __init__(self, names: Collection[str], *, needs_arguments: bool) -> None:
        super().__init__()
        self._names = names
        self._needs_arguments = needs_arguments
        self._key = ""
        self._seen: set[str] = set()
        self._part: list[str] | None = None  # a key, or a value that is read when whole
        self._streams = False  # the arguments are being read

    def _read(self, piece: str, state: State, depth: int) -> None:
        if depth == 1:
            if state in (State.KEY, State.KEY_OR_END) and piece == '"':
                self._part = []
            elif state is State.VALUE and not piece.isspace():
                self._begin_value(piece)
        if self._part is not None:
            self._part.append(piece)
        elif self._streams:
            self._pass_on(piece, state)
        now = self._scanner.state
        if self.is_open and self._scanner.depth == 1:
            if now is State.COLON and state is State.STRING:
                self._key, self._part = self._parsed(), None
            elif now is State.COMMA_OR_END and (depth > 1 or state is not now):
                self._end_value()
        if self.is_open and self._seen >= {"name", "arguments"}:
            self.has_begun = True

    def _begin_value(self, first: str) -> None:
        key = "arguments" if self._key in _ARGUMENTS else self._key
        if key not in ("name", "arguments"):
            return
        if key in self._seen or (key == "name" and first != '"'):
            self._break()
        elif key == "arguments" and first == "{":
            self._seen.add(key)
            self._streams = True
        elif first in ('"', "n"):
            self._part = []
        else:
            self._break()

    def _end_value(self) -> None:
        self._streams = False
        if self._part is None:
            return
        value, self._part = self._parsed(), None
        if self._key == "name":
            self._seen.add("name")
            self.name = value
            if value not in self._names:
                self._break()
        elif arguments := _object_in(value or "{}"):
            self._seen.add("arguments")
            self._arguments.append(arguments)
        else:
            self._break()

    def _break(self) -> None:
        self.is_open = False
        self.is_whole = self.has_begun and not self._streams

    def _finish(self) -> None:
        if not self.has_begun and self.name and not self._needs_arguments:
            self._arguments.append("{}")
            self.has_begun = True
        self.is_open, self.is_whole = False, self.has_begun

    def _parsed(self) -> Any:
        return json.loads("".join(self._part or ()), strict=False)


def _object_in(text: str) -> str:
    """Returns the JSON object that a text is, "" where it is none."""
    text = text.strip()
    arguments = CallArguments()
    if not text.startswith("{") or arguments.feed(text) < len(text) or not arguments.is_whole:
        return ""
    # The string may have half a surrogate pair, as an escape.
    return arguments.take_arguments() if is_utf8(text) else ""
