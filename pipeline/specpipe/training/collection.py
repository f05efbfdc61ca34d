"""A collection: what a target answered, as token ids, in shards of JSON lines.

collection.json      what answered, how it was asked, and what came of it (`CollectionInfo`)
answers-00000.jsonl  an `Answer` a line; the next shard begins where one has `SHARD_BYTES`
left-out.jsonl       what was asked and is in no shard, and why (collection_writer.py)

A run that was killed leaves a torn last line, which is nothing. A collection is not changed once it
is complete, but by asking what was left out.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from specpipe.errors import ConfigError, show
from specpipe.machine.own_json import read_object, reason
from specpipe.speculative.request import FinishReason
from specpipe.text.tokenizer import Tokenizer

INFO_NAME = "collection.json"
SHARDS = "answers-[0-9][0-9][0-9][0-9][0-9].jsonl"
SHARD_BYTES = 64 << 20
"""After which a shard ends: a guess at what is handy to copy."""

TAIL = "left out: what the listed tokens leave of 1 is one bucket, that of all other tokens"
"""What becomes of the tokens that are not among the likeliest."""

_NUM_IDS = 2**31
_MOST_IN_ALL = 1.01  # of probabilities, as they are rounded: a guess

TokenId = Annotated[int, Field(strict=True, ge=0, lt=_NUM_IDS)]
_TokenIds = Annotated[tuple[TokenId, ...], Field(min_length=1)]
_Likeliest = tuple[tuple[TokenId, FiniteFloat], ...]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer of the target.

    id                that of the question: its prompt's digest, temperature and number
    prompt_token_ids  as they were read by the target, chat template and special tokens included
    token_ids         the answer's; the id that ended it is the last, where it was told
    finish_reason     stop or length; None where a server gives none
    sampling          how it was drawn: temperature, seed and what else was not the default
    group             what held-out sets are split by: answers of one group belong together
    top_log_probs     for each token of the answer the likeliest ones and their log-probabilities,
                      of the raw logits, likeliest first; empty where they were not asked for
    is_from_text      whether the text came alone, so that the ids are the tokenizer's
    """

    id: str
    prompt_token_ids: _TokenIds
    token_ids: _TokenIds
    finish_reason: FinishReason | None
    sampling: Mapping[str, Any]
    group: str
    top_log_probs: tuple[_Likeliest, ...] = ()
    is_from_text: bool = False

    def to_line(self) -> bytes:
        """Returns the answer as a line of a shard."""
        written = {one.name: getattr(self, one.name) for one in fields(self)}
        for name in ("top_log_probs", "is_from_text"):
            if not written[name]:
                del written[name]
        return json.dumps(written, ensure_ascii=False, allow_nan=False).encode() + b"\n"

    @property
    def digest(self) -> int:
        """64 bits of the SHA-256 over prompt and answer: the same for the same text of both."""
        ids = json.dumps([self.prompt_token_ids, self.token_ids]).encode()
        return int.from_bytes(hashlib.sha256(ids).digest()[:8], "big")


@dataclass(frozen=True, kw_only=True)
class CollectionInfo:
    """What `collection.json` says.

    answered_by       the pair, or the server and its model; the target's digest where it is known
    tokenizer_digest  of `tokenizer_digest`
    settings          all that decides what is asked, and with which sampling
    prompts           where the questions come from: source, and SHA-256 of the file
    licences          of the prompts, as it was given, and of the target, as its checkpoint says
    versions          of specpipe and Python; made_at: when it was begun
    top_log_probs     how many are listed for each token, and what became of the tail; None: none
    num_prompts       of the file that were asked, and differ
    num_from_text     answers of which the text came alone
    num_duplicates    answers that were there already, for the same prompt, and were not kept
    num_empty         answers without a token, which were not kept either
    num_failed        questions without an answer; the next run asks them again
    is_complete       whether all was asked
    """

    answered_by: Mapping[str, Any]
    tokenizer_digest: str
    settings: Mapping[str, Any]
    prompts: Mapping[str, Any]
    licences: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    made_at: str | None = None
    top_log_probs: Mapping[str, Any] | None = None
    num_prompts: int = 0
    num_answers: int = 0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_from_text: int = 0
    num_duplicates: int = 0
    num_empty: int = 0
    num_failed: int = 0
    is_complete: bool = False
    format: Literal[1] = 1
    """Of this file and the shards; a collection that is read must have it."""
    kind: Literal["collection"] = "collection"


_INFOS = TypeAdapter(CollectionInfo)
_ANSWERS = TypeAdapter(Answer)


@dataclass(frozen=True)
class Contents:
    """How many answers the shards have, and SHA-256 over their lines."""

    num_answers: int
    sha256: str


@dataclass(frozen=True)
class Collection:
    """A folder with a collection that is whole so far; its answers are read when asked for."""

    folder: Path
    info: CollectionInfo

    @classmethod
    def open(cls, folder: Path) -> Collection:
        """Reads `collection.json`; ConfigError says why the folder is no collection."""
        path = folder / INFO_NAME
        try:
            return cls(folder, _INFOS.validate_python(read_object(path)))
        except FileNotFoundError:
            raise ConfigError(
                f"{folder} is no collection, since it has no {INFO_NAME}: expected a folder that "
                "`specpipe draft collect` wrote"
            ) from None
        except (OSError, ValueError) as exc:
            raise ConfigError(
                f"{path} is not what `specpipe draft collect` writes ({reason(exc)}): collect "
                "again, into another folder"
            ) from exc

    @property
    def shards(self) -> list[Path]:
        return sorted(self.folder.glob(SHARDS))

    def contents(self) -> Contents:
        """Reads through the shards; a torn line is no answer."""
        num_answers, digest = 0, hashlib.sha256()
        for path in self.shards:
            with path.open("rb") as file:
                for line in file:
                    if line.endswith(b"\n"):
                        num_answers += 1
                        digest.update(line)
        return Contents(num_answers, digest.hexdigest())

    def answers(self) -> Iterator[Answer]:
        """Yields the answers in their order; ConfigError names file and line of what is none.

        A torn line at the end, which a killed run leaves, is left out of a collection that is not
        complete.
        """
        shards = self.shards
        num_answers = 0
        for path in shards:
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    is_torn = not line.endswith(b"\n")
                    if is_torn and path == shards[-1] and not self.info.is_complete:
                        return
                    yield _answer(line, f"{path}:{number}")
                    num_answers += 1
        if self.info.is_complete and num_answers != self.info.num_answers:
            raise ConfigError(
                f"{self.folder} has {num_answers} answers, but its {INFO_NAME} says "
                f"{self.info.num_answers}: bring the missing shards back, or collect again"
            )


def open_collections(folders: Sequence[Path]) -> list[Collection]:
    """Opens collections that are used together; ConfigError where their tokenizers differ."""
    collections = [Collection.open(folder) for folder in folders]
    for other in collections[1:]:
        first = collections[0]
        if other.info.tokenizer_digest != first.info.tokenizer_digest:
            raise ConfigError(
                f"{other.folder} and {first.folder} were collected with different tokenizers: a "
                "token id does not mean the same in both, so give collections of one target only"
            )
    return collections


def read_answers(collections: Sequence[Collection]) -> Iterator[Answer]:
    """Yields the answers of several collections, the same answer to the same prompt once."""
    seen: set[int] = set()
    for collection in collections:
        for answer in collection.answers():
            if answer.digest not in seen:
                seen.add(answer.digest)
                yield answer


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Returns SHA-256 over what each token id means: its string, or its role without one."""
    meanings = {**tokenizer.roles, **tokenizer.tokens()}
    return hashlib.sha256(json.dumps(sorted(meanings.items())).encode()).hexdigest()


def listing_fault(rows: Sequence[Sequence[tuple[int, float]]]) -> str | None:
    """Returns why the likeliest ids of an answer's tokens, with log p, are none; None: they are."""
    for number, row in enumerate(rows):
        probs = [math.exp(min(log_prob, 1.0)) for _, log_prob in row]  # of NaN: NaN
        if not row:
            return f"list nothing for token {number}"
        if len({token_id for token_id, _ in row}) < len(row):
            return f"list an id twice for token {number}"
        if not all(0 <= token_id < _NUM_IDS for token_id, _ in row):
            return f"list what is no token id for token {number}"
        if not sum(probs) <= _MOST_IN_ALL:
            return f"make {sum(probs):.4g} as probabilities of token {number}, expected at most 1"
    return None


def _answer(line: bytes, where: str) -> Answer:
    try:
        answer = _ANSWERS.validate_json(line)
    except ValidationError as exc:
        raise ConfigError(f"{where} is no answer of a collection: {reason(exc)}") from exc
    if (fault := listing_fault(answer.top_log_probs)) is not None:
        raise ConfigError(f"{where}: top_log_probs of answer {show(answer.id)} {fault}")
    num_listed = len(answer.top_log_probs)
    if num_listed not in (0, len(answer.token_ids)):
        raise ConfigError(
            f"{where}: answer {show(answer.id)} has {len(answer.token_ids)} tokens and "
            f"top_log_probs of {num_listed}: expected one entry for each token"
        )
    return answer
