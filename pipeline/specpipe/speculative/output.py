"""The text of one request: what may be shown of it, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from specpipe.speculative.request import Chunk, Request, TopLogProbs
from specpipe.speculative.stop_strings import StandIns, StopStrings


class Output:
    """Text, ids and log-probabilities on their way out, held back while a stop string may be under
    way.

    A token leaves together with the text that it completes, so that a cut takes both. Offsets are
    those of the whole text, so that what is held back costs nothing while it waits.
    """

    def __init__(self, request: Request, hidden_tokens: Mapping[int, str]) -> None:
        self._request_id = request.request_id
        self._with_log_probs = request.return_log_probs
        self._with_top_log_probs = request.num_top_log_probs > 0
        self._hidden_tokens = hidden_tokens
        self._stand_ins = StandIns(request.stop_strings, hidden_tokens)
        self.searched_tokens = self._stand_ins.characters
        """The special tokens that a stop string names, by id."""
        self._stop_strings = StopStrings(self._stand_ins.strings)
        self._text = ""  # decoded, not yet taken
        self._num_taken_chars = 0
        self._tokens: list[Token] = []
        self._num_held_chars = 0
        self._is_cut = self._is_finished = False
        self.num_taken_tokens = 0

    def append(
        self,
        token_id: int,
        log_prob: float | None,
        text: str,
        *,
        top: TopLogProbs = (),
        before: str,
        can_stop: bool,
    ) -> bool:
        """Adds one token; returns whether a stop string ended with it, which is then cut off.

        `before` is text of the tokens before it. Where it cannot stop, the text so far can no
        longer become part of a stop string.
        """
        if before:
            self._text += before
            self._tokens[-1] = self._tokens[-1]._replace(end=self._num_chars())
            if self._search(before, can_stop=can_stop):
                return True
        if self.searched_tokens:
            text += self.searched_tokens.get(token_id, "")
        start = self._num_taken_chars + len(self._text)
        self._text += text
        self._tokens.append(Token(token_id, log_prob, top, start, start + len(text)))
        return self._stop_strings.are_any and self._search(text, can_stop=can_stop)

    def append_end(self, token_id: int, log_prob: float | None, top: TopLogProbs) -> None:
        """Adds the id that ended the request, which has no text; to be called once it is finished.

        A stop string in the last text ended the request before it.
        """
        if not self._is_cut:
            end = self._num_chars()
            self._tokens.append(Token(token_id, log_prob, top, end, end))

    def finish(self, text: str, *, can_stop: bool) -> bool:
        """Adds the last text and holds nothing back; returns whether a stop string was cut off."""
        self._is_finished = True
        if text and not self._is_cut:
            self._text += text
            self._search(text, can_stop=can_stop)
        self._num_held_chars = 0
        return self._is_cut

    def take(self) -> Chunk:
        """Returns what may leave now: text, tokens and their log-probabilities."""
        text, self._text = self._text, ""
        if self._num_held_chars:
            num_chars = len(text) - self._num_held_chars
            text, self._text = text[:num_chars], text[num_chars:]
        self._num_taken_chars += len(text)
        num_whole = self._num_whole_tokens()
        tokens, self._tokens = self._tokens[:num_whole], self._tokens[num_whole:]
        self.num_taken_tokens += num_whole
        chunk = Chunk(
            request_id=self._request_id,
            text=self._stand_ins.remove(text),
            token_ids=tuple([token.token_id for token in tokens]),
        )
        if self._with_log_probs:
            chunk.log_probs = tuple([t.log_prob for t in tokens if t.log_prob is not None])
        if self._with_top_log_probs:
            chunk.top_log_probs = tuple([t.top for t in tokens])
        return chunk

    def _num_chars(self) -> int:
        return self._num_taken_chars + len(self._text)

    def _num_whole_tokens(self) -> int:
        """Returns how many tokens have all their text taken.

        A token without text of its own (the start of a character) waits for the one that completes
        it.
        """
        has_all = self._is_finished or not self._text
        if has_all and (self._is_finished or not self._tokens or self._tokens[-1].has_text):
            return len(self._tokens)
        num_whole = 0
        for number, token in enumerate(self._tokens, 1):
            if token.end > self._num_taken_chars:
                break
            if token.has_text:
                num_whole = number
        return num_whole

    def _search(self, text: str, *, can_stop: bool) -> bool:
        if not can_stop:
            self._stop_strings.forget()
            self._num_held_chars = 0
            return False
        end = self._num_chars()
        at = self._stop_strings.find(text)
        if at is None:
            self._num_held_chars = self._stop_strings.num_held_chars
            return False
        cut = end - len(text) + at
        self._text = self._text[: cut - self._num_taken_chars]
        while self._tokens and not self._is_before(self._tokens[-1], cut):
            self._tokens.pop()
        self._is_cut = True
        return True

    def _is_before(self, token: Token, cut: int) -> bool:
        """Returns whether a token begins before a cut; a character's start goes with its end."""
        if token.has_text:
            return token.start < cut
        return token.token_id in self._hidden_tokens and token.start <= cut


class Token(NamedTuple):
    """Its text goes from start to end."""

    token_id: int
    log_prob: float | None
    top: TopLogProbs
    start: int
    end: int

    @property
    def has_text(self) -> bool:
        return self.end > self.start
