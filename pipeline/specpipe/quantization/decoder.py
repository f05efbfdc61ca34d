"""A checkpoint as transformers computes it, of which one layer at a time is in memory.

Everything is computed in float32, whatever the weights are stored in: bfloat16 would round the
largest activation by up to 0.4 %, and with it the scale, and weights that scales are folded into a
second time. One layer in float32 is small compared with a checkpoint.

N tokens in one forward, H query heads, D head size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from specpipe.checkpoints.checkpoint import RawArray, read_config
from specpipe.checkpoints.families import EMBEDDING, FAMILIES, HEAD
from specpipe.checkpoints.plain_weights import PlainWeights
from specpipe.errors import CheckpointError
from specpipe.quantization.tensors import as_tensor

TOKENS_AT_ONCE = 1024
"""Tokens of one forward, unless a text is longer. ModelOpt rounds all weights anew in each forward
of its AWQ search; with so many tokens to multiply by them, that is little."""

_ATTENTION = "specpipe"  # its name among the attention functions of transformers


@dataclass
class Batch:
    """Texts laid end to end in one row; attention keeps them apart.

    hidden     [1, N, hidden]: what the next layer reads
    arguments  what transformers passes to each layer besides
    """

    hidden: Tensor
    arguments: Sequence[Mapping[str, Any]]


class LayerwiseDecoder:
    """The embedded texts, and the layers that they have still to go through."""

    def __init__(
        self, weights: PlainWeights, texts: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        """Builds the layers without their weights, and embeds the texts."""
        self._weights = weights
        self._device = device
        AttentionInterface.register(_ATTENTION, _attention)
        models: Any = AutoModelForCausalLM
        config = _transformers_config(weights)
        with torch.device("meta"):
            model = models.from_config(config, attn_implementation=_ATTENTION).eval()
        base = model.model
        self._layers: list[nn.Module] = list(base.layers)
        self._norm = base.norm
        self._load(self._norm, "model.norm")
        recorders = [_Recorder(layer) for layer in self._layers]
        base.layers = nn.ModuleList(recorders)
        used = sorted({token_id for text in texts for token_id in text})
        base.embed_tokens.weight = _constant(self._embedding_rows(used))
        _compute_buffers(base, device)
        self.batches = [_embed(base, recorders, used, batch) for batch in _batches(texts)]

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def take_layer(self, n: int) -> nn.Module:
        """Returns a layer with its weights; the decoder does not keep it."""
        layer = self._layers[n]
        self._layers[n] = nn.Identity()
        self._load(layer, f"model.layers.{n}")
        return layer

    def head(self) -> nn.Linear:
        """Returns the head, which may be the embedding."""
        weight = self._tensor(HEAD)
        head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        head.weight = _constant(weight)
        return head

    def normed(self, batch: Batch) -> Tensor:
        """Returns what the head reads, once all layers are done."""
        normed: Tensor = self._norm(batch.hidden)
        return normed

    def _load(self, module: nn.Module, prefix: str) -> None:
        state = {name: self._tensor(f"{prefix}.{name}") for name, _ in module.named_parameters()}
        module.load_state_dict(state, assign=True)
        module.requires_grad_(False)

    def _tensor(self, name: str) -> Tensor:
        tensor = torch.empty(self._weights.tensors[name].shape)
        row = 0
        for block in self._weights.blocks(name, 0, len(tensor)):
            tensor[row : row + len(block)] = self._as_float32(block)
            row += len(block)
        return tensor.to(self._device)

    def _embedding_rows(self, token_ids: Sequence[int]) -> Tensor:
        """Reads the rows of some ids, given in order."""
        num_rows, size = self._weights.tensors[EMBEDDING].shape
        if token_ids[-1] >= num_rows:
            raise CheckpointError(
                f"{self._weights.folder}: the tokenizer makes the id {token_ids[-1]} of a "
                f"calibration text, but the embedding has {num_rows} rows; take both from one "
                "checkpoint"
            )
        ids = torch.tensor(token_ids)
        rows = torch.empty(len(ids), size)
        start = 0
        for block in self._weights.blocks(EMBEDDING, 0, num_rows):
            low, high = (bisect_left(token_ids, row) for row in (start, start + len(block)))
            rows[low:high] = self._as_float32(block)[ids[low:high] - start]
            start += len(block)
        return rows.to(self._device)

    def _as_float32(self, block: RawArray) -> Tensor:
        return as_tensor(block, self._weights.config.plain_dtype).float()


def kv_amax(layer: nn.Module) -> Tensor:
    """Returns the largest magnitude of the keys, after rope, and values that a layer has made."""
    attention: Any = layer.self_attn
    amax: Tensor = attention.kv_amax
    return amax


def _batches(texts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Yields the texts in their order, as many at once as there is room for."""
    batch: list[Sequence[int]] = []
    for text in texts:
        if batch and sum(map(len, batch)) + len(text) > TOKENS_AT_ONCE:
            yield batch
            batch = []
        batch.append(text)
    yield batch


def _embed(
    base: Any, recorders: list[_Recorder], used: Sequence[int], texts: list[Sequence[int]]
) -> Batch:
    """Has transformers embed some texts; `used` are the ids that the embedding has rows of."""
    device = base.embed_tokens.weight.device
    row_of = {token_id: row for row, token_id in enumerate(used)}
    rows = [row_of[token_id] for text in texts for token_id in text]
    positions = [position for text in texts for position in range(len(text))]
    base(
        input_ids=torch.tensor([rows], device=device),
        position_ids=torch.tensor([positions], device=device),
        use_cache=False,
        # Where texts begin and end; the name is flash attention's, and models pass it on.
        cu_seq_lens_q=[0, *accumulate(map(len, texts))],
    )
    return Batch(recorders[0].hidden, [recorder.arguments for recorder in recorders])


class _Recorder(nn.Module):
    """Stands for a layer, and keeps what the model passes to it."""

    hidden: Tensor
    arguments: Mapping[str, Any]

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.attention_type = getattr(layer, "attention_type", None)  # which transformers 4 reads

    def forward(self, hidden: Tensor, **arguments: Any) -> Tensor:
        # Gemma 2's layers return tuples in transformers 4, and the model takes the first element;
        # of a tensor that is its only row, which the next recorder puts back into its place.
        self.hidden = hidden.reshape(1, -1, hidden.shape[-1])
        self.arguments = arguments
        return self.hidden


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,  # of attention functions that it has no mask for, transformers makes none
    *,
    scaling: float,
    cu_seq_lens_q: Sequence[int],
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Returns causal attention within each text [1, N, H, D]; query [1, H, N, D]."""
    amax_so_far = getattr(module, "kv_amax", key.new_zeros(()))
    module.kv_amax = torch.stack([amax_so_far, key.abs().amax(), value.abs().amax()]).amax()
    num_groups = query.shape[1] // key.shape[1]
    texts = [
        _attend(
            query[:, :, start:stop],
            key[:, :, start:stop].repeat_interleave(num_groups, dim=1),
            value[:, :, start:stop].repeat_interleave(num_groups, dim=1),
            scaling,
            sliding_window,
            softcap,
        )
        for start, stop in pairwise(cu_seq_lens_q)
    ]
    return torch.cat(texts, dim=2).transpose(1, 2), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    size = query.shape[2]
    mask = torch.ones(size, size, dtype=torch.bool, device=query.device).tril()
    if window is not None:
        mask = mask.triu(1 - window)
    if softcap is None:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling
        )
    scores = softcap * torch.tanh(query @ key.transpose(-1, -2) * scaling / softcap)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value


def _constant(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _compute_buffers(base: Any, device: torch.device) -> None:
    """Computes the numbers that no checkpoint holds, and that have no device yet."""
    base.rotary_emb = type(base.rotary_emb)(config=base.config).to(device)
    if hasattr(base.embed_tokens, "scalar_embed_scale"):  # Gemma 2 in transformers 5
        scale = torch.tensor(base.embed_tokens.scalar_embed_scale, device=device)
        base.embed_tokens.embed_scale = scale
    for name, buffer in base.named_buffers():
        assert not buffer.is_meta, name


def _transformers_config(weights: PlainWeights) -> Any:
    """Returns the config in the spelling that the installed transformers reads."""
    config = {
        key: value
        for key, value in read_config(weights.folder).items()
        if key not in ("model_type", "dtype", "torch_dtype")
    }
    if config.get("rope_parameters") and transformers.__version__.startswith("4."):
        config |= _rope_of_4(config.pop("rope_parameters"))
    model_type = FAMILIES[weights.config.architecture].model_type
    return AutoConfig.for_model(model_type, **config, dtype="float32")


def _rope_of_4(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Spells `rope_parameters` as transformers 4 does, which would overlook them."""
    scaling = dict(parameters)
    kind = scaling.pop("rope_type", "default")
    beside = ["rope_theta", "partial_rotary_factor"]
    if kind == "longrope":
        beside.append("original_max_position_embeddings")
    top = {key: scaling.pop(key) for key in beside if key in scaling}
    if kind == "default":
        return {**top, "rope_scaling": None}
    if kind == "longrope":  # Phi-3, which takes just these three keys
        factors = {key: scaling[key] for key in ("short_factor", "long_factor")}
        return {**top, "rope_scaling": {"type": kind, **factors}}
    return {**top, "rope_scaling": {"rope_type": kind, **scaling}}
