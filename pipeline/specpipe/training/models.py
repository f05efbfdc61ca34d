"""Draft and target as transformers computes them, and the ids that both may say.

N rows that are scored, V ids that both may say: those with a string or a role in the target. The
others, padding of the embedding and the mask of a parallel draft, are in no softmax: the target
never says them, so what a draft gives them is lost.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from specpipe.checkpoints.files import read_json
from specpipe.checkpoints.parallel_draft import LENGTH_KEY, MASK_KEY
from specpipe.errors import CheckpointError, ConfigError, show, to_sentence
from specpipe.training.losses import NO_CHANCE, RowLoss, bucketed, overlap, with_rest
from specpipe.training.parallel import RowInputs, attention_mask

if TYPE_CHECKING:
    from specpipe.build.pairing import PairContract

_ROWS_AT_A_TIME = 1 << 26  # logits of both models that are held at once: 256 MB each in float32
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_GROWN_BY = 8  # embedding rows are a multiple of it, for the kernels


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps transformers from drawing bars and from logging; what goes wrong raises."""
    import transformers

    logger: Any = transformers.utils.logging
    level = logger.get_verbosity()
    had_bars = logger.is_progress_bar_enabled()
    logger.set_verbosity(logging.ERROR)
    logger.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.set_verbosity(level)
        if had_bars:
            logger.enable_progress_bar()


def load_model(folder: Path, dtype: torch.dtype, *, role: str) -> Any:
    """Returns a checkpoint as transformers loads it, for causal language modelling."""
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, use_safetensors=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as exc:
        raise CheckpointError(
            f"{role} {folder} cannot be loaded by transformers: {to_sentence(exc)}"
        ) from exc


def random_model(shape: Path, seed: int, *, ids_of: Path) -> Any:
    """Returns a model of a config.json with random weights, the same for the same seed.

    ids_of  a checkpoint whose special ids it has: those of a shape may be another tokenizer's
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    models: Any = AutoModelForCausalLM
    values, other = read_json(shape), read_json(ids_of / "config.json")
    values |= {key: other.get(key) for key in _SPECIAL_IDS}
    try:
        config = AutoConfig.for_model(**values)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return models.from_config(config, dtype=torch.float32)
    except (AttributeError, TypeError, ValueError, RuntimeError) as exc:
        raise CheckpointError(
            f"{shape}: transformers makes no model of it: {to_sentence(exc)}"
        ) from exc


@dataclass(frozen=True)
class SharedIds:
    """The ids that both models may say, in order.

    Where none is left out between them they are a slice, so that no weight is copied.
    """

    ids: tuple[int, ...]

    @classmethod
    def of(cls, contract: PairContract, *, mask: int | None = None) -> SharedIds:
        """Returns the ids that a pair uses, but the mask, which may be a special token."""
        num_rows = min(contract.draft_vocab_size, contract.target_vocab_size)
        unused = {i for start, stop in contract.unused_token_ids for i in range(start, stop)}
        return cls(tuple(i for i in range(num_rows) if i not in unused and i != mask))

    @property
    def is_slice(self) -> bool:
        return self.ids[-1] == len(self.ids) - 1

    @cached_property
    def _tensor(self) -> Tensor:
        return torch.tensor(self.ids)

    def rows_of(self, weight: Tensor) -> Tensor:
        """Returns the rows of these ids, [V, ...]."""
        if self.is_slice:
            return weight[: len(self.ids)]
        return weight.index_select(0, moved(self._tensor, weight.device))

    def places(self, token_ids: Tensor) -> Tensor:
        """Returns where ids stand among these; -1 for one that does not."""
        ids = self._tensor.to(token_ids.device)
        places = torch.searchsorted(ids, token_ids).clamp_max(len(self.ids) - 1)
        return torch.where(ids[places] == token_ids, places, -1)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on a device; one of the CPU without waiting for what a GPU has yet to do."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def hidden_states(model: Any, **inputs: Any) -> Tensor:
    """Returns what the head of a causal language model reads, [B, R, hidden].

    attention_mask  where given, is True where a row sees another, [B, 1, R, R]
    """
    sees = inputs.get("attention_mask")
    if sees is not None and model.config._attn_implementation == "eager":
        # Which adds the mask to the scores (Gemma 2, whose caps sdpa does not know).
        scores = torch.zeros_like(sees, dtype=model.dtype)
        inputs["attention_mask"] = scores.masked_fill(~sees, torch.finfo(model.dtype).min)
    hidden: Tensor = model.get_decoder()(**inputs, use_cache=False).last_hidden_state
    return hidden


class Head:
    """The head of a causal language model, for the shared ids alone."""

    def __init__(self, model: Any, shared: SharedIds) -> None:
        head = model.get_output_embeddings()
        self._weight = shared.rows_of(head.weight)
        bias = getattr(head, "bias", None)
        self._bias = None if bias is None else shared.rows_of(bias)
        self._cap = getattr(model.config, "final_logit_softcapping", None)  # Gemma 2's

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Returns log-probabilities [N, V] in float32, of what the head reads."""
        logits = functional.linear(hidden, self._weight, self._bias)
        if self._cap is not None:
            logits = self._cap * torch.tanh(logits / self._cap)
        return functional.log_softmax(logits.float(), dim=-1)


class Target:
    """The target's distributions at rows of a text, computed when they are asked for."""

    def __init__(self, model: Any, shared: SharedIds) -> None:
        self._model = model.eval().requires_grad_(False)
        self._head = Head(model, shared)

    @torch.no_grad()
    def read(self, token_ids: Tensor, rows: Tensor) -> Scores:
        """Reads texts [B, T]; `rows` [N] are those asked for, of all B × T laid end to end."""
        # A text is filled up behind its end, where causal attention does not look.
        hidden = hidden_states(self._model, input_ids=moved(token_ids, self._model.device))
        return Scores(self._head, hidden.flatten(0, 1), rows)


class Scores:
    """What the target's head reads at N rows; `log_probs` computes a part of them."""

    def __init__(self, head: Head, hidden: Tensor, rows: Tensor) -> None:
        """`rows` [N] are of `hidden`; those that several masks are to match stand side by side."""
        self._head, self._hidden, self._rows = head, hidden, rows

    @torch.no_grad()
    def log_probs(self, rows: slice) -> Tensor:
        """Returns log p of the shared ids at some of the rows."""
        wanted, device = self._rows[rows], self._hidden.device
        once, places = wanted.unique_consecutive(return_inverse=True)
        found = self._head.log_probs(self._hidden[moved(once, device)])
        return found if len(once) == len(wanted) else found[moved(places, device)]

    def most_likely(self, log_probs: Tensor, rows: slice) -> Tensor:
        """Returns which of the shared ids is the target's most likely one."""
        return log_probs.argmax(-1)

    def of_draft(self, draft: Tensor, rows: slice) -> Tensor:
        """Returns the draft's log-probabilities in the form in which these are."""
        return draft


class ListedScores:
    """The target's likeliest ids at N rows as a collection lists them, and all others in one."""

    def __init__(self, shared: SharedIds, token_ids: Tensor, log_probs: Tensor) -> None:
        """token_ids [N, k] and log_probs [N, k]; ids below 0 fill up a row, or are not shared."""
        self._ids = shared.places(token_ids)
        self._log_probs = with_rest(log_probs.masked_fill(self._ids < 0, NO_CHANCE))

    def log_probs(self, rows: slice) -> Tensor:
        return self._log_probs[rows]

    def most_likely(self, log_probs: Tensor, rows: slice) -> Tensor:
        best = log_probs[:, :-1].argmax(-1, keepdim=True)
        return self._ids[rows].gather(-1, best)[:, 0]

    def of_draft(self, draft: Tensor, rows: slice) -> Tensor:
        return bucketed(draft, self._ids[rows])


class Student(nn.Module):
    """The draft that is trained, and its loss, so that all that needs a gradient is one forward."""

    def __init__(self, draft: Any, shared: SharedIds, loss: RowLoss) -> None:
        super().__init__()
        self.draft = draft
        self._shared, self._loss = shared, loss

    def forward(
        self,
        inputs: dict[str, Tensor],
        rows: Tensor,
        scores: Scores | ListedScores,
        *,
        with_overlap: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the loss of each of N rows, and Σ min(p, q) of each, detached, where asked for.

        inputs  of the draft's forward, [B, R]; rows [N] are of all B × R laid end to end
        """
        hidden = hidden_states(self.draft, **inputs).flatten(0, 1)
        hidden = hidden[moved(rows, hidden.device)]
        head = Head(self.draft, self._shared)
        parts = row_parts(len(rows), len(self._shared.ids))
        results = []
        for part in parts:
            arguments = (head, hidden[part], scores, part, with_overlap)
            if len(parts) > 1:  # logits are computed again rather than held
                from torch.utils.checkpoint import checkpoint

                results.append(checkpoint(self._score, *arguments, use_reentrant=False))
            else:
                results.append(self._score(*arguments))
        losses, overlaps = zip(*results, strict=True)
        return torch.cat(losses), torch.cat(overlaps) if with_overlap else None

    def _score(
        self,
        head: Head,
        hidden: Tensor,
        scores: Scores | ListedScores,
        rows: slice,
        with_overlap: bool,
    ) -> tuple[Tensor, Tensor | None]:
        draft = scores.of_draft(head.log_probs(hidden), rows)
        target = scores.log_probs(rows)
        shares = overlap(draft.detach(), target) if with_overlap else None
        return self._loss(draft, target), shares


def row_parts(num_rows: int, num_ids: int) -> list[slice]:
    """Returns rows in parts whose logits are held at once."""
    size = max(_ROWS_AT_A_TIME // num_ids, 1)
    return [slice(start, start + size) for start in range(0, num_rows, size)]


def draft_inputs(rows: RowInputs, device: torch.device, *, is_parallel: bool) -> dict[str, Tensor]:
    """Returns the arguments of the draft's forward, on its device.

    Without masks the rows are the text, for which causal attention is quicker than a mask of it.
    """
    input_ids = moved(rows.input_ids, device)
    if not is_parallel:
        return {"input_ids": input_ids}
    position_ids, depths, is_real = (
        moved(values, device) for values in (rows.position_ids, rows.depths, rows.is_real)
    )
    return {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "attention_mask": attention_mask(position_ids - depths, depths, is_real),
    }


def add_mask(
    draft: Any,
    contract: PairContract,
    *,
    num_draft_tokens: int,
    mask: int | None,
    spare: Collection[int] = (),
) -> int:
    """Makes a draft a parallel one; returns the id of its mask.

    spare  ids in use that no text has, which the mask may be

    Without `mask` that is the draft's own where it is parallel already, else the first row above
    the ids in use. Where the embedding has none it grows; the new rows are the mean of those in
    use, as are a spare one's.
    """
    used = SharedIds.of(contract).ids
    num_rows = draft.get_input_embeddings().weight.shape[0]
    before = getattr(draft.config, MASK_KEY, None)
    if mask is None:
        mask = before if before is not None else used[-1] + 1
    if mask in set(used) and mask not in spare:
        raise ConfigError(
            f"--mask-token {mask} is an id that texts have: give a special token that neither "
            f"begins nor ends one, as padding, an id above {used[-1]}, or none"
        )
    most_rows = -(-max(num_rows, used[-1] + 2) // _GROWN_BY) * _GROWN_BY
    if mask >= most_rows:
        raise ConfigError(
            f"--mask-token {show(mask)} would leave rows without use below it: give an id up to "
            f"{most_rows - 1}, or none"
        )
    if mask >= num_rows:
        num_rows = -(-(mask + 1) // _GROWN_BY) * _GROWN_BY
        draft.resize_token_embeddings(num_rows, mean_resizing=False)
    if mask != before:
        for weight in {draft.get_input_embeddings().weight, draft.get_output_embeddings().weight}:
            with torch.no_grad():
                weight[mask] = weight[: used[-1] + 1].mean(0)
                if mask > used[-1]:
                    weight[used[-1] + 1 :] = weight[mask]
    setattr(draft.config, MASK_KEY, mask)
    setattr(draft.config, LENGTH_KEY, num_draft_tokens)
    return mask


def remove_mask(draft: Any) -> None:
    """Makes the config of a parallel draft that of one which proposes a token at a time."""
    for key in (MASK_KEY, LENGTH_KEY):
        if hasattr(draft.config, key):
            delattr(draft.config, key)


@torch.no_grad()
def round_weights(model: Any, dtype: torch.dtype) -> None:
    """Rounds the weights of a model to a dtype; it computes in its own as before.

    Its buffers stay: the frequencies of rotary embeddings are stored nowhere, so in no dtype.
    """
    for weight in model.parameters():
        weight.copy_(weight.to(dtype))


def save_draft(draft: Any, folder: Path, dtype: torch.dtype) -> None:
    """Writes config.json, generation_config.json and the weights of a draft, in a dtype."""
    with quiet():
        draft.to(dtype).save_pretrained(folder)


def stored_dtype(folder: Path) -> torch.dtype:
    """Returns the dtype in which a checkpoint says that its weights are stored."""
    config = read_json(folder / "config.json")
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{folder / 'config.json'}: dtype is {json.dumps(name)}")
    return dtype
