"""What a verification asks: the prompts as token ids, and the ways to ask all of them."""

from __future__ import annotations

from collections.abc import Sequence

from specpipe.errors import ConfigError
from specpipe.evaluate.endpoints.base import Endpoint, Question, record
from specpipe.evaluate.prompts import Prompt, PromptSet
from specpipe.evaluate.verification.asking import Case, VerifySide
from specpipe.text.tokenizer import Tokenizer


def draft_lengths(wanted: Sequence[int], most: int) -> tuple[int, ...]:
    """Returns every K to try: those that are wanted, else 1, half of the most, and the most."""
    lengths = tuple(sorted(set(wanted) or ({1, (most + 1) // 2, most} if most else ())))
    if not lengths:
        raise ConfigError("speculation.num_draft_tokens is 0: there is no speculation to verify")
    for length in lengths:
        if not 1 <= length <= most:
            raise ConfigError(
                f"--num-draft-tokens {length}: this pair drafts between 1 and {most} tokens "
                "(speculation.num_draft_tokens)"
            )
    return lengths


def fixed_lengths(wanted: Sequence[int], most: int) -> tuple[int, ...]:
    """Returns the one K of a pair that drafts as many tokens in every step."""
    if wanted and tuple(wanted) != (most,):
        raise ConfigError(
            f"--num-draft-tokens {','.join(map(str, wanted))}: this pair drafts {most} tokens in "
            "every step; leave it out"
        )
    return (most,)


def make_cases(
    prompts: PromptSet, tokenizer: Tokenizer, *, max_tokens: int, max_seq_len: int
) -> list[Case]:
    """Encodes the prompts; max_tokens is for those that do not say themselves."""
    cases = []
    for prompt in prompts.prompts:
        token_ids = encode(prompt, tokenizer)
        if len(token_ids) >= max_seq_len:
            raise ConfigError(
                f"{prompts.source}: prompt {prompt.name} has {len(token_ids)} tokens; prompt and "
                f"answer together may have {max_seq_len} (engine.max_seq_len)"
            )
        cases.append(
            Case(
                name=prompt.name,
                token_ids=token_ids,
                max_tokens=min(prompt.max_tokens or max_tokens, max_seq_len),
            )
        )
    if all(case.max_tokens < 2 for case in cases):
        raise ConfigError(
            f"{prompts.source}: answers of one token are never drafted; let them have 2 at least "
            "(--max-tokens)"
        )
    return cases


def encode(prompt: Prompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the ids of a prompt, as preprocessing makes them."""
    if prompt.messages is not None:
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"prompt {prompt.name} is a conversation, and the target has no chat template: ask "
                "it as a text, without --chat"
            )
        return tuple(tokenizer.encode_messages([dict(message) for message in prompt.messages]))
    assert prompt.text is not None
    return tuple(tokenizer.encode(prompt.text))


def takes_draft_lengths(endpoint: Endpoint, case: Case) -> bool:
    """Returns False where the server cannot leave the draft out: its library always drafts."""
    question = Question(token_ids=case.token_ids, max_tokens=1, num_draft_tokens=0)
    error = record(endpoint, question).error
    return error is None or not error.startswith("num_draft_tokens is 0")


def sides_of_target_alone(at_once: int) -> list[VerifySide]:
    """Returns the side that all others are compared with, and the same in another shape."""
    return [
        VerifySide(name="target alone", kind="reference", num_draft_tokens=0, at_once=1),
        VerifySide(
            name=f"target alone, {at_once} at once",
            kind="control",
            num_draft_tokens=0,
            at_once=at_once,
        ),
    ]


def sides_of_speculation(lengths: Sequence[int], at_once: int) -> list[VerifySide]:
    """Returns one request at a time with the largest K; then every K, many at once."""
    return [
        VerifySide(
            name=f"K = {length}, {num} at once",
            kind="speculation",
            num_draft_tokens=length,
            at_once=num,
        )
        for length, num in [(max(lengths), 1), *((length, at_once) for length in lengths)]
    ]


def side_as_served(at_once: int) -> VerifySide:
    """Returns the pair with K, and the source of draft tokens, as it chooses them step by step."""
    return VerifySide(
        name=f"as served, {at_once} at once",
        kind="speculation",
        num_draft_tokens=None,
        at_once=at_once,
    )


def side_of_own_draft(length: int, at_once: int) -> VerifySide:
    """Returns the side on which the target drafts for itself."""
    return VerifySide(
        name="the target as its own draft",
        kind="control",
        num_draft_tokens=length,
        at_once=at_once,
        is_own_draft=True,
    )


def side_of_wrong_draft(length: int, at_once: int) -> VerifySide:
    """Returns the side on which no draft token is the target's."""
    return VerifySide(
        name="a draft that is always wrong",
        kind="control",
        num_draft_tokens=length,
        at_once=at_once,
        is_wrong_draft=True,
    )
