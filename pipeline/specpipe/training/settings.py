"""What decides a training, and how what differs from another one is said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from specpipe.checkpoints.files import quoted

LossName = Literal["forward-kl", "mixed-kl", "total-variation"]


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How a draft is trained; all of it decides its bytes.

    loss             of `LOSSES`
    on_policy        share of the steps whose answers the present draft has written
    from_log_probs   whether the target's distributions are those that the collection lists
    on_prompts       whether places within prompts are trained on, too
    parallel         tokens that a parallel draft proposes in one pass; None: one a pass
    mask_token       its mask; None: the first row above the ids in use
    keep             share of its masks that is kept with each depth
    num_steps        of the optimizer; None: `num_epochs`
    batch_tokens     of a batch at most, what fills it up included; a step has `accumulate` of them
                     on each GPU
    max_seq_len      tokens of a text that are trained on; None: as served
    warmup           share of the steps in which the learning rate rises; after that it falls as a
                     cosine to `final_rate` of its peak
    evaluate_every   steps between two evaluations, each of which is saved to be gone on from
    patience         evaluations without a better one after which training ends; None: none
    held_out         share of the groups that is held out
    held_out_tokens  of held-out answers that are measured at most
    num_draft_tokens of a step, where acceptance is measured
    """

    loss: LossName = "forward-kl"
    on_policy: float = 0.0
    from_log_probs: bool = False
    on_prompts: bool = False
    parallel: int | None = None
    mask_token: int | None = None
    keep: float = 0.7
    num_steps: int | None = None
    num_epochs: float = 1.0
    batch_tokens: int = 8192
    accumulate: int = 1
    max_seq_len: int | None = None
    learning_rate: float = 5e-4
    weight_decay: float = 0.0
    warmup: float = 0.03
    final_rate: float = 0.1
    evaluate_every: int = 200
    patience: int | None = None
    held_out: float = 0.05
    held_out_tokens: int = 32768
    num_draft_tokens: int = 4
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    gradient_checkpointing: bool = False
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def setting_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Returns each value that two records do not have in common, as words of a message.

    A nested value is named by its path; those under `settings` as they are.
    """
    before, after = dict(_leaves(old)), dict(_leaves(new))
    return [
        f"{name.removeprefix('settings.')} was {quoted(before.get(name))}, "
        f"is now {quoted(after.get(name))}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]


def _leaves(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
            numbered = {str(number): entry for number, entry in enumerate(value, start=1)}
            yield from _leaves(numbered, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
