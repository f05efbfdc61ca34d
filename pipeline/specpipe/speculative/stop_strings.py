"""Finds stop strings in a text that comes in pieces, in time linear in the text.

A special token is no part of the text, but may be of a stop string. While such a text is searched,
one character stands where the token is: a surrogate, which no decoded text has.

Aho and Corasick, "Efficient string matching", CACM 18(6), 1975: one automaton for all strings,
whose state is the longest end of the text that is a beginning of one of them.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence


class StandIns:
    """The special tokens that stop strings name, and what stands for them in the text searched.

    characters  by token id
    strings     the stop strings, and those that name such tokens once more with their characters:
                a model can also write the name of a token letter by letter
    """

    def __init__(self, strings: Sequence[str], hidden_tokens: Mapping[int, str]) -> None:
        text = "\0".join(strings)
        named = {i: name for i, name in hidden_tokens.items() if name and name in text}
        # There are 2048 surrogates; no request that comes through Triton has room for more names.
        self.characters = dict(zip(named, map(chr, range(0xD800, 0xE000)), strict=False))
        self.strings = list(strings)
        if named:
            names = {name: self.characters[i] for i, name in named.items() if i in self.characters}
            longest_first = sorted(names, key=len, reverse=True)
            name = re.compile("|".join(map(re.escape, longest_first)))
            self.strings += [
                name.sub(lambda match: names[match[0]], string)
                for string in strings
                if name.search(string)
            ]
        self._none = dict.fromkeys(map(ord, self.characters.values()))

    def remove(self, text: str) -> str:
        """Returns the text as it may be shown."""
        return text.translate(self._none) if self._none else text


class StopStrings:
    """The search in one text; building takes time and memory linear in the strings."""

    def __init__(self, strings: Sequence[str]) -> None:
        """Builds the automaton; none of the strings may be empty."""
        # By state; state 0 is the empty beginning.
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._length = [0]  # of the longest string that ends here; 0: none
        for string in strings:
            self._add(string)
        self._fallback = [0] * len(self._next)
        self._link()
        self._state = 0
        self.are_any = len(self._next) > 1

    @property
    def num_held_chars(self) -> int:
        """How many characters at the end of the text may become part of a stop string."""
        return self._depth[self._state]

    def find(self, text: str) -> int | None:
        """Reads a piece; returns where the first stop string begins that ends in it, else None.

        The place is counted from the start of the piece; below 0 it is in an earlier one.
        """
        if not self.are_any:
            return None
        first: int | None = None
        state = self._state
        for end, char in enumerate(text, 1):
            while (following := self._next[state].get(char)) is None and state:
                state = self._fallback[state]
            state = following or 0
            if self._length[state]:
                start = end - self._length[state]
                first = start if first is None else min(first, start)
        self._state = state
        return first

    def forget(self) -> None:
        """Makes what was read so far no part of a stop string."""
        self._state = 0

    def _add(self, string: str) -> None:
        state = 0
        for char in string:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._length.append(0)
            state = self._next[state][char]
        self._length[state] = self._depth[state]

    def _link(self) -> None:
        """Sets where each state falls back to: the longest end of it that is a state, too."""
        unlinked = deque(self._next[0].values())
        while unlinked:
            state = unlinked.popleft()
            for char, child in self._next[state].items():
                unlinked.append(child)
                fallback = self._fallback[state]
                while char not in self._next[fallback] and fallback:
                    fallback = self._fallback[fallback]
                self._fallback[child] = self._next[fallback].get(char, 0)
                # A state falls back to a shorter one, which is linked already.
                self._length[child] = self._length[child] or self._length[self._fallback[child]]
