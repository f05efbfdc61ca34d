"""Where JSON ends that comes in pieces, and where it breaks."""

from __future__ import annotations

import re
from enum import Enum, auto

_SPACE = " \t\n\r"
_STRING_RUN = re.compile(r'[^"\\]+')
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_CLOSED_BY = {"{": "}", "[": "]"}

# RFC 8259, section 6: from what was read of a number, by the kind of the next character.
_NUMBER: dict[str, dict[str, str]] = {
    "": {"-": "-", "0": "0", "1": "1"},
    "-": {"0": "0", "1": "1"},
    "0": {".": ".", "e": "e"},
    "1": {"0": "1", "1": "1", ".": ".", "e": "e"},
    ".": {"0": ".0", "1": ".0"},
    ".0": {"0": ".0", "1": ".0", "e": "e"},
    "e": {"+": "e+", "-": "e+", "0": "e0", "1": "e0"},
    "e+": {"0": "e0", "1": "e0"},
    "e0": {"0": "e0", "1": "e0"},
}
_WHOLE_NUMBERS = ("0", "1", ".0", "e0")


class State(Enum):
    """What a scanner is at."""

    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    ESCAPE = auto()
    NUMBER = auto()
    LITERAL = auto()
    DONE = auto()
    BROKEN = auto()


class JsonScanner:
    """Follows one JSON object or array (RFC 8259) through a text that comes in pieces.

    It lets one thing through that JSON forbids: control characters inside strings, since models
    write line feeds there.

    state  what it is at
    depth  how many objects and arrays are open
    """

    def __init__(self) -> None:
        self.state = State.VALUE
        self._open: list[str] = []
        self._is_key = False
        self._number = ""
        self._rest = ""  # of a literal, or the hexadecimal digits that a \\u still needs

    @property
    def depth(self) -> int:
        return len(self._open)

    def step(self, text: str, at: int) -> int:
        """Reads a character, or what is there of a string; returns where it stopped.

        A character that JSON does not have there is not read: the state is then BROKEN.
        """
        if self.state is State.STRING:
            run = _STRING_RUN.match(text, at)
            if run:
                return run.end()
        if self.state is State.NUMBER and not self._step_number(text[at]):
            if self._number not in _WHOLE_NUMBERS:
                self.state = State.BROKEN
                return at
            self._end_value()
        if not self._step(text[at]):
            self.state = State.BROKEN
            return at
        return at + 1

    def _step(self, character: str) -> bool:
        """Returns whether a character may stand here, and goes past it."""
        state = self.state
        if state is State.NUMBER:
            return True  # `_step_number` has read it
        if state is State.STRING:
            return self._step_string(character)
        if state is State.ESCAPE:
            return self._step_escape(character)
        if state is State.LITERAL:
            return self._step_literal(character)
        if character in _SPACE:
            return True
        if state in (State.VALUE, State.VALUE_OR_END):
            return self._step_value(character)
        if state is State.COLON:
            self.state = State.VALUE
            return character == ":"
        if state in (State.KEY, State.KEY_OR_END) and character == '"':
            self.state, self._is_key = State.STRING, True
            return True
        if state is State.COMMA_OR_END and character == ",":
            self.state = State.KEY if self._open[-1] == "{" else State.VALUE
            return True
        return self._step_end(character)

    def _step_value(self, character: str) -> bool:
        if character in _CLOSED_BY:
            self._open.append(character)
            self.state = State.KEY_OR_END if character == "{" else State.VALUE_OR_END
        elif not self._open:
            return False
        elif character == '"':
            self.state, self._is_key = State.STRING, False
        elif character in _LITERALS:
            self.state, self._rest = State.LITERAL, _LITERALS[character][1:]
        else:
            self._number = ""
            if not self._step_number(character):
                return self._step_end(character)
            self.state = State.NUMBER
        return True

    def _step_end(self, character: str) -> bool:
        is_end = self.state in (State.KEY_OR_END, State.VALUE_OR_END, State.COMMA_OR_END)
        if not is_end or character != _CLOSED_BY[self._open[-1]]:
            return False
        self._open.pop()
        self._end_value()
        return True

    def _step_string(self, character: str) -> bool:
        if character == "\\":
            self.state, self._rest = State.ESCAPE, ""
        elif self._is_key:
            self.state = State.COLON
        else:
            self._end_value()
        return True

    def _step_escape(self, character: str) -> bool:
        if self._rest:
            self._rest = self._rest[1:]
            if not self._rest:
                self.state = State.STRING
            return character in "0123456789abcdefABCDEF"
        if character == "u":
            self._rest = "0000"
        else:
            self.state = State.STRING
        return character in '"\\/bfnrtu'

    def _step_literal(self, character: str) -> bool:
        is_right, self._rest = self._rest[0] == character, self._rest[1:]
        if not self._rest:
            self._end_value()
        return is_right

    def _step_number(self, character: str) -> bool:
        kind = "1" if character in "123456789" else character.lower()
        following = _NUMBER[self._number].get(kind)
        if following is None:
            return False
        self._number = following
        return True

    def _end_value(self) -> None:
        self.state = State.COMMA_OR_END if self._open else State.DONE
