"""Answers of collections as texts to train on, and those that are held out of it.

T tokens of a text, A of its answer, k listed for each of those. Held out are whole groups, the
source files of prompts, chosen by the digest of their name: the same ones whatever else is
collected. A text that is nearly one of theirs is not trained on.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from specpipe.errors import ConfigError, plural
from specpipe.training.collection import Answer
from specpipe.training.losses import NO_CHANCE

TokenIds = npt.NDArray[np.int64]

SHARED_TOKENS = 50
"""Tokens in a row that two texts share only where one was copied: a guess. Lee et al. 2022,
arXiv:2107.06499, take 50 of a subword vocabulary for natural text."""

_FEWEST_HELD_OUT = 2  # groups: one alone has no interval
_FACTOR = np.uint64(
    0x9E3779B97F4A7C15
)  # odd: 2⁶⁴ over the golden ratio, as Fibonacci hashing has it


@dataclass(frozen=True)
class Listed:
    """The target's likeliest ids for each token of an answer, and log p of them, [A, k].

    Ids below 0 fill up a list that is shorter than another.
    """

    token_ids: TokenIds
    log_probs: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Text:
    """A prompt and its answer, [T], cut to the length that is trained on.

    num_prompt_tokens  of `token_ids`, one at least
    is_greedy          whether each token of the answer is the target's most likely one
    listed             None where the collection lists no log-probabilities
    """

    token_ids: TokenIds
    num_prompt_tokens: int
    group: str
    is_greedy: bool
    listed: Listed | None = None

    @property
    def prompt(self) -> bytes:
        return self.token_ids[: self.num_prompt_tokens].tobytes()


@dataclass
class Parts:
    """The texts of collections, by what they are for.

    num_too_long  texts whose prompt alone fills the length; num_near: nearly held out
    num_texts     that were read
    """

    training: list[Text] = field(default_factory=list)
    held_out: list[Text] = field(default_factory=list)
    num_texts: int = 0
    num_too_long: int = 0
    num_near: int = 0


def divide(
    answers: Iterable[Answer],
    *,
    max_seq_len: int,
    share: float,
    most_held_out: int,
    never: Sequence[Sequence[int]] = (),
    needs_log_probs: bool = False,
) -> Parts:
    """Divides answers into those that are trained on and those that are held out.

    share          of the groups that is held out, above 0
    most_held_out  tokens of the answers that are measured; what is more is not trained on either
    never          prompts that are not trained on, nor what is nearly one of them

    Raises ConfigError where too few groups are there, or nothing is left to train on.
    """
    parts = Parts()
    texts = []
    for answer in answers:
        parts.num_texts += 1
        if needs_log_probs and not answer.top_log_probs:
            raise ConfigError(
                f"answer {answer.id} has no log-probabilities of the target: leave out "
                "--from-log-probs, or collect with --top-log-probs"
            )
        text = _text(answer, max_seq_len)
        if text is None:
            parts.num_too_long += 1
        else:
            texts.append(text)
    if parts.num_texts and not texts:
        raise ConfigError(
            f"the prompts of all {parts.num_texts} answers fill {max_seq_len} tokens: raise "
            "--max-seq-len, or collect answers to shorter prompts"
        )
    chosen = _held_out_groups({text.group for text in texts}, share)
    held_out = [text for text in texts if text.group in chosen]
    known = _Known([text.token_ids for text in held_out], never)
    for text in texts:
        if text.group in chosen:
            continue
        if known.has(text):
            parts.num_near += 1
        else:
            parts.training.append(text)
    parts.held_out = list(_some(held_out, most_held_out))
    if not parts.training:
        raise ConfigError(
            f"of {parts.num_texts} answers none is left to train on: {len(held_out)} are held out, "
            f"{parts.num_near} are nearly one of those, and the prompt of {parts.num_too_long} "
            f"fills {max_seq_len} tokens; collect answers to other prompts"
        )
    return parts


def _text(answer: Answer, max_seq_len: int) -> Text | None:
    num_prompt_tokens = len(answer.prompt_token_ids)
    if num_prompt_tokens >= max_seq_len:
        return None
    token_ids = np.array((*answer.prompt_token_ids, *answer.token_ids)[:max_seq_len], np.int64)
    num_tokens = len(token_ids) - num_prompt_tokens
    return Text(
        token_ids,
        num_prompt_tokens,
        answer.group,
        is_greedy=answer.sampling.get("temperature") == 0,
        listed=_listed(answer, num_tokens) if answer.top_log_probs else None,
    )


def _listed(answer: Answer, num_tokens: int) -> Listed:
    rows = answer.top_log_probs[:num_tokens]
    most = max(map(len, rows))
    ids = np.full((len(rows), most), -1, np.int64)
    log_probs = np.zeros((len(rows), most), np.float32)
    for row, entries in enumerate(rows):
        for column, (token_id, log_prob) in enumerate(entries):
            ids[row, column], log_probs[row, column] = token_id, max(log_prob, NO_CHANCE)
    return Listed(ids, log_probs)


def _held_out_groups(groups: set[str], share: float) -> set[str]:
    """Returns the groups whose digests come first."""
    count = max(_FEWEST_HELD_OUT, math.ceil(share * len(groups)))
    if count >= len(groups):
        raise ConfigError(
            f"the answers have {plural(len(groups), 'group')}, of which "
            f"{count} would be held out, so nothing would be trained on: collect answers to "
            "prompts of more groups"
        )
    return set(sorted(groups, key=lambda name: hashlib.sha256(name.encode()).digest())[:count])


class _Known:
    """Texts that must not be trained on, as digests of their prompts and of all their windows."""

    def __init__(self, texts: Sequence[TokenIds], never: Sequence[Sequence[int]]) -> None:
        arrays = [np.array(prompt, np.int64) for prompt in never]
        windows = [_windows(token_ids) for token_ids in (*texts, *arrays)]
        self._windows = np.unique(np.concatenate(windows)) if windows else _windows(np.zeros(0))
        self._prompts = {array.tobytes() for array in arrays}

    def has(self, text: Text) -> bool:
        if text.prompt in self._prompts:
            return True
        found = _windows(text.token_ids)
        if not len(found) or not len(self._windows):
            return False
        places = np.searchsorted(self._windows, found).clip(max=len(self._windows) - 1)
        return bool((self._windows[places] == found).any())


def _windows(token_ids: npt.NDArray[np.generic]) -> npt.NDArray[np.uint64]:
    """Returns a digest of each `SHARED_TOKENS` tokens in a row: a polynomial, modulo 2⁶⁴."""
    if len(token_ids) < SHARED_TOKENS:
        return np.zeros(0, np.uint64)
    # Odd multiples, so that ids that differ in their high bits only stay apart in the low ones too.
    mixed = (token_ids.astype(np.uint64) + np.uint64(1)) * _FACTOR
    mixed ^= mixed >> np.uint64(29)
    powers = np.cumprod(np.full(SHARED_TOKENS, _FACTOR), dtype=np.uint64)
    return np.lib.stride_tricks.sliding_window_view(mixed, SHARED_TOKENS) @ powers


def _some(texts: Sequence[Text], most_tokens: int) -> Iterator[Text]:
    """Yields texts up to a number of their answers' tokens, one of each group and kind in turn."""
    by_group: dict[tuple[str, bool], list[Text]] = {}
    for text in texts:
        by_group.setdefault((text.group, text.is_greedy), []).append(text)
    num_tokens = 0
    for turn in range(max(map(len, by_group.values()), default=0)):
        for _, of_group in sorted(by_group.items()):
            if turn < len(of_group):
                text = of_group[turn]
                num_answered = len(text.token_ids) - text.num_prompt_tokens
                if num_tokens and num_tokens + num_answered > most_tokens:
                    return
                num_tokens += num_answered
                yield text
