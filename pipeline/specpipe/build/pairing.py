"""Whether a draft can propose tokens for a target, decided from the small files of both.

The two must mean the same by every token id, since ids are all that passes between them. An id is
in use when the target's tokenizer has a string for it or one of its files gives it a role; both
models need an embedding row for it. Other rows are padding and may differ, and so are, for the
pair, ids that only the draft knows. The target's tokenizer, end ids and chat template are the ones
served, so where the draft's differ without changing a meaning, the contract notes it and the pair
passes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specpipe.checkpoints.checkpoint import brief
from specpipe.checkpoints.files import quoted, read_json
from specpipe.checkpoints.hf_config import context_length, positions, rope, vocab_size
from specpipe.checkpoints.limits import FILE_LIMITS, FileLimits
from specpipe.checkpoints.parallel_draft import MASK_KEY, ParallelDraft, parallel_draft
from specpipe.errors import CheckpointError, PairingError, show
from specpipe.stage import naming
from specpipe.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class PairContract:
    """What draft and target agree on; the ids are the target's.

    num_used_token_ids   ids with a string or a role
    draft_vocab_size     embedding rows of the draft; target_vocab_size likewise
    unused_token_ids     half-open ranges of the others, over the larger number of rows: never
                         proposed, never emitted
    draft_max_seq_len    positions that the model was made for; target_max_seq_len likewise
    notes                what differs without harm, a sentence each
    parallel             how the draft proposes several tokens in one pass; None: one by one
    """

    num_used_token_ids: int
    draft_vocab_size: int
    target_vocab_size: int
    unused_token_ids: tuple[tuple[int, int], ...]
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    end_token_ids: tuple[int, ...]
    draft_max_seq_len: int
    target_max_seq_len: int
    notes: tuple[str, ...] = ()
    parallel: ParallelDraft | None = None

    def to_json(self) -> str:
        """Returns the contract as `check` writes it into pair.json."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> PairContract:
        """Returns the contract that `to_json` wrote."""
        data: dict[str, Any] = json.loads(text)
        data["unused_token_ids"] = tuple((start, stop) for start, stop in data["unused_token_ids"])
        data["end_token_ids"] = tuple(data["end_token_ids"])
        data["notes"] = tuple(data["notes"])
        if data.get("parallel") is not None:
            data["parallel"] = ParallelDraft(**data["parallel"])
        return cls(**data)


def check_pair(draft: Path, target: Path, limits: FileLimits = FILE_LIMITS) -> PairContract:
    """Returns what two checkpoint folders agree on, by their configs and tokenizer files.

    Raises PairingError with every difference that makes the pair unsound, a line each, and
    CheckpointError when a folder cannot be read.
    """
    draft_side, target_side = (
        _Side.load(role, folder, limits) for role, folder in (("draft", draft), ("target", target))
    )
    differences = [
        *_token_differences(draft_side, target_side),
        *_special_differences(draft_side, target_side),
        *_role_differences(draft_side, target_side),
        *_row_faults(draft_side),
        *_row_faults(target_side),
        *_missing_rows(draft_side, target_side),
        *_mask_faults(draft_side, target_side),
    ]
    if differences:
        lines = "".join(f"\n  - {difference}" for difference in differences)
        raise PairingError(
            f"draft {draft} and target {target} cannot be paired:{lines}\n"
            "The pair needs one tokenizer: change draft.checkpoint or target.checkpoint"
        )
    tokenizer = target_side.tokenizer
    num_rows = max(draft_side.num_rows, target_side.num_rows)
    return PairContract(
        num_used_token_ids=len(target_side.used),
        draft_vocab_size=draft_side.num_rows,
        target_vocab_size=target_side.num_rows,
        unused_token_ids=_unused_ranges(target_side.used, num_rows),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        end_token_ids=tuple(sorted(tokenizer.end_token_ids)),
        draft_max_seq_len=draft_side.max_seq_len,
        target_max_seq_len=target_side.max_seq_len,
        notes=tuple(_notes(draft_side, target_side)),
        parallel=draft_side.parallel,
    )


@dataclass(frozen=True)
class _Side:
    role: str
    tokenizer: Tokenizer
    tokens: dict[int, str]
    num_rows: int
    max_seq_len: int
    parallel: ParallelDraft | None

    @classmethod
    def load(cls, role: str, folder: Path, limits: FileLimits) -> _Side:
        with naming(role):
            tokenizer = Tokenizer.load(folder, limits)
            config = read_json(folder / "config.json", limits=limits)
        with naming(f"{role}: {folder}"):
            num_rows, max_seq_len = vocab_size(config, limits), _max_seq_len(config, limits)
            parallel = parallel_draft(config, num_rows)
        return cls(role, tokenizer, tokenizer.tokens(), num_rows, max_seq_len, parallel)

    @property
    def used(self) -> set[int]:
        """Ids with a string or a role."""
        return self.tokens.keys() | self.tokenizer.roles.keys()

    def describe(self, token_id: int | None) -> str:
        """Returns a token id with its string, for messages."""
        if token_id is None:
            return "none"
        return (
            f"{token_id} {quoted(self.tokens[token_id])}"
            if token_id in self.tokens
            else str(token_id)
        )


def _max_seq_len(config: dict[str, Any], limits: FileLimits) -> int:
    length = positions(config, limits)
    # Where the config leaves the base out, its family decides; the length does not depend on it.
    rotary = rope({"rope_theta": 10000.0, **config}, length)
    return context_length(length, rotary.scaling, limits)


def _token_differences(draft: _Side, target: _Side) -> Iterator[str]:
    """Yields an id with two strings, or a string with two ids; one side's own ids are neither."""
    shared = draft.tokens.keys() & target.tokens.keys()
    differing = sorted(i for i in shared if draft.tokens[i] != target.tokens[i])
    if differing:
        first = differing[0]
        yield (
            f"token id {first} is {_spelled(draft.tokens[first])} in the draft and "
            f"{_spelled(target.tokens[first])} in the target; {len(differing)} of {len(shared)} "
            "ids differ"
        )
        return
    ids = {text: token_id for token_id, text in target.tokens.items()}
    moved = sorted(i for i, text in draft.tokens.items() if ids.get(text, i) != i)
    if moved:
        text = draft.tokens[moved[0]]
        yield (
            f"{quoted(text)} is token id {moved[0]} in the draft and {ids[text]} in the target; "
            f"{len(moved)} tokens differ in this"
        )


def _spelled(text: str) -> str:
    """Returns a token's string for a message, so that those that look alike can be told apart."""
    return quoted(text) if text.isascii() else f"{quoted(text)} ({show(ascii(text))})"


def _special_differences(draft: _Side, target: _Side) -> Iterator[str]:
    """Yields a token that one side prints and the other does not; padding is never printed."""
    special = [side.tokenizer.special_token_ids for side in (draft, target)]
    padding = {draft.tokenizer.pad_token_id, target.tokenizer.pad_token_id}
    differing = sorted((special[0] ^ special[1]) - padding)
    shared = [i for i in differing if i in draft.tokens and i in target.tokens]
    if shared:
        first = shared[0]
        has, has_not = (draft, target) if first in special[0] else (target, draft)
        yield (
            f"token id {has.describe(first)} is special in the {has.role} and plain text in the "
            f"{has_not.role}; {len(shared)} tokens differ in this"
        )


def _role_differences(draft: _Side, target: _Side) -> Iterator[str]:
    bos = (draft.tokenizer.bos_token_id, target.tokenizer.bos_token_id)
    if None not in bos and bos[0] != bos[1]:
        yield (
            f"BOS is {draft.describe(bos[0])} in the draft, {target.describe(bos[1])} in the target"
        )
    ends = (draft.tokenizer.end_token_ids, target.tokenizer.end_token_ids)
    if ends[0] and ends[1] and not ends[0] & ends[1]:
        yield (
            f"the draft ends at {_listed(draft, ends[0])}, the target at "
            f"{_listed(target, ends[1])}: no end id in common"
        )


def _row_faults(side: _Side) -> Iterator[str]:
    highest = max(side.tokens, default=0)
    if highest >= side.num_rows:
        yield (
            f"the {side.role}'s tokenizer goes up to token id {side.describe(highest)}, but its "
            f"config.json has vocab_size {side.num_rows}: {highest + 1 - side.num_rows} ids have "
            "no embedding row"
        )
    for token_id, where in sorted(side.tokenizer.roles.items()):
        if token_id >= side.num_rows and token_id not in side.tokens:
            yield (
                f"the {side.role}'s {where} is {token_id}, but its config.json has vocab_size "
                f"{side.num_rows}: the id has no embedding row"
            )
            return


def _missing_rows(draft: _Side, target: _Side) -> Iterator[str]:
    """Yields what the target uses and has a row for, and the draft has not."""
    missing = sorted(i for i in target.used if draft.num_rows <= i < target.num_rows)
    # Where the draft's own tokenizer has the id, `_row_faults` reports it.
    missing = [i for i in missing if i not in draft.used]
    if missing:
        yield (
            f"the target uses token id {target.describe(missing[0])}, but the draft's config.json "
            f"has vocab_size {draft.num_rows}: {len(missing)} ids have no embedding row there"
        )


def _mask_faults(draft: _Side, target: _Side) -> Iterator[str]:
    """Yields a mask that may stand in a text as itself, where the draft could not tell them apart.

    A special token that no role has, such as one that is reserved, does not.
    """
    if draft.parallel is None:
        return
    mask, tokenizer = draft.parallel.mask_token_id, target.tokenizer
    if mask in target.tokens and mask not in tokenizer.special_token_ids:
        meaning = "text"
    elif mask in tokenizer.end_token_ids or mask == tokenizer.bos_token_id:
        meaning = "where texts begin or end"
    else:
        return
    yield (
        f"the draft's {MASK_KEY} is {target.describe(mask)}, which is {meaning} to the target: "
        "expected an id that no text has"
    )


def _notes(draft: _Side, target: _Side) -> Iterator[str]:
    if draft.parallel is not None:
        length = draft.parallel.num_draft_tokens
        number = "several tokens" if length is None else f"up to {length} tokens"
        yield (
            f"the draft proposes {number} in one pass, with token id "
            f"{draft.parallel.mask_token_id} for those that it lacks"
        )
    more = sorted(draft.tokens.keys() - target.used), sorted(target.tokens.keys() - draft.used)
    if draft.num_rows != target.num_rows and not any(more):
        yield (
            f"vocabularies differ only by padding: {len(target.used)} used ids, "
            f"{draft.num_rows} and {target.num_rows} rows"
        )
    for side, token_ids, consequence in (
        (draft, more[0], "they are never proposed"),
        (target, more[1], "the draft has embedding rows for them"),
    ):
        if token_ids:
            yield (
                f"only the {side.role} knows {len(token_ids)} of its tokens, the first is "
                f"{side.describe(token_ids[0])}: {consequence}"
            )
    for token_id in sorted(target.used - target.tokens.keys()):
        yield (
            f"token id {token_id} has a role ({target.tokenizer.roles[token_id]}) but no string: "
            "it is in use"
        )
    for name in ("bos", "eos", "pad"):
        ids = [getattr(side.tokenizer, f"{name}_token_id") for side in (draft, target)]
        if ids[0] != ids[1]:
            yield (
                f"{name.upper()} is {draft.describe(ids[0])} in the draft, "
                f"{target.describe(ids[1])} in the target; the target's is used"
            )
    ends = (draft.tokenizer.end_token_ids, target.tokenizer.end_token_ids)
    if ends[0] != ends[1]:
        yield (
            f"the draft ends at {_listed(draft, ends[0])}, the target at "
            f"{_listed(target, ends[1])}; the target's are used"
        )
    if draft.max_seq_len < target.max_seq_len:
        yield (
            f"the draft has {draft.max_seq_len} positions, the target {target.max_seq_len}: "
            f"longer texts go on without a draft"
        )
    templates = [
        None if template is None else template.source
        for template in (draft.tokenizer.chat_template, target.tokenizer.chat_template)
    ]
    if templates[0] != templates[1]:
        if templates[1] is None:
            yield "only the draft has a chat template; requests with messages will be refused"
        elif templates[0] is None:
            yield "only the target has a chat template; it is used"
        else:
            yield "the chat templates differ; the target's is used"
    template = target.tokenizer.chat_template
    for what, checked in (("messages", template), ("tools", template and template.with_tools)):
        try:
            if checked is not None:
                checked.check(has_tools=what == "tools")
        except CheckpointError as exc:
            yield f"requests with {what} will be refused: {exc}"


def _listed(side: _Side, token_ids: Collection[int]) -> str:
    return brief([side.describe(token_id) for token_id in sorted(token_ids)]) or "no id"


def _unused_ranges(used: Collection[int], num_rows: int) -> tuple[tuple[int, int], ...]:
    """Returns the half-open ranges of range(num_rows) that hold no used id."""
    ranges = []
    start = 0
    for token_id in [*sorted(used), num_rows]:
        if start < token_id:
            ranges.append((start, token_id))
        start = token_id + 1
    return tuple(ranges)
