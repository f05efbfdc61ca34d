"""One engine: a decoder with its KV cache, run on batches of sequences of different lengths."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specpipe.checkpoints.unified_config import UnifiedConfig
from specpipe.errors import EngineMismatch, RuntimeUnavailable
from specpipe.machine.memory import MemoryEstimate, available_bytes, check_room
from specpipe.runtimes.engine_description import ENGINE_CONFIG, reading_config
from specpipe.runtimes.pair.engine import Pages, SequenceId
from specpipe.runtimes.torch.build import ENGINE_KIND, WEIGHTS_NAME
from specpipe.runtimes.torch.kernels import usable_kernel
from specpipe.runtimes.torch.kv_cache import KVCache, Span
from specpipe.runtimes.torch.memory import estimate_memory, max_logits
from specpipe.runtimes.torch.model import Model
from specpipe.runtimes.torch.model_shape import ModelConfig
from specpipe.version import __version__


@dataclass(frozen=True)
class TorchEngineSpec:
    """What an engine folder's `config.json` says."""

    model: ModelConfig
    dtype: torch.dtype
    device: torch.device
    max_batch_size: int
    max_seq_len: int
    max_draft_len: int
    memory: MemoryEstimate
    has_fp8_kv_cache: bool = False
    kv_cache_tokens: int | None = None
    """Positions of all sequences together; None: all can have their full length at once."""

    @classmethod
    def read(cls, folder: Path) -> TorchEngineSpec:
        path = folder / ENGINE_CONFIG
        try:
            config = json.loads(path.read_bytes())
            runtime = config["runtime"]
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise EngineMismatch(f"{folder} is not an engine of runtime 'torch'") from exc
        if runtime != ENGINE_KIND:
            raise EngineMismatch(
                f"{folder} was built for {runtime}, specpipe {__version__} runs {ENGINE_KIND}; "
                "build it again"
            )
        build = config["build_config"]
        with reading_config(folder):
            model = UnifiedConfig.from_json(config["pretrained_config"])
        if build["device"] == "cuda" and not torch.cuda.is_available():
            raise RuntimeUnavailable(
                f"{folder} was built for a GPU and torch sees none here; "
                "build it again with engine.device: cpu"
            )
        kernel = build.get("kernel")
        if kernel is not None and kernel != usable_kernel(model.quantization):
            raise EngineMismatch(
                f"{folder} multiplies with torch's {kernel} kernel, which this GPU or this torch "
                "does not have; build it again here"
            )
        limits = {name: build[name] for name in ("max_batch_size", "max_seq_len", "max_draft_len")}
        kv_cache_tokens = build.get("kv_cache_tokens")
        return cls(
            model=ModelConfig.from_unified(model),
            dtype=getattr(torch, build["dtype"]),
            device=torch.device(build["device"]),
            has_fp8_kv_cache=model.quantization.kv_cache_quant_algo is not None,
            memory=estimate_memory(
                model,
                dtype=build["dtype"],
                max_num_tokens=build["max_num_tokens"],
                on_gpu=build["device"] == "cuda",
                kernel=kernel,
                kv_cache_tokens=kv_cache_tokens,
                **limits,
            ),
            kv_cache_tokens=kv_cache_tokens,
            **limits,
        )

    @property
    def capacity(self) -> int:
        """Positions of a sequence: its text, and draft tokens that a step may have to take back."""
        return self.max_seq_len + self.max_draft_len + 1

    @property
    def max_logits(self) -> int:
        """Rows of logits that one forward gives."""
        return max_logits(self.max_batch_size, self.max_draft_len)


@dataclass
class _Sequence:
    slot: int
    length: int
    rotations: Tensor  # [capacity, 1, D / 2]


class TorchEngine:
    """A decoder and the KV cache of the sequences that run on it. One thread uses it at a time."""

    def __init__(self, spec: TorchEngineSpec, model: Model) -> None:
        self._spec = spec
        self._model = model
        self.vocab_size = spec.model.vocab_size
        self.max_seq_len = spec.max_seq_len
        self.max_batch_size = spec.max_batch_size
        self.max_draft_len = spec.max_draft_len
        self.pages: Pages | None = None
        self.max_logits = self.max_logits_of_sequence = spec.max_logits
        self.memory = spec.memory
        self._cache = KVCache(
            windows=spec.model.windows,
            num_slots=spec.max_batch_size,
            capacity=spec.capacity,
            num_kv_heads=spec.model.num_kv_heads,
            group_size=spec.model.group_size,
            head_size=spec.model.head_size,
            dtype=spec.dtype,
            device=spec.device,
            fp8_scales=model.kv_cache_scales,
        )
        self._rotations = self._rotation_table(0)
        self._other_rotations: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._sequences: dict[SequenceId, _Sequence] = {}
        self._next_id = 0

    @classmethod
    def load(cls, folder: Path, *, num_threads: int | None = None) -> TorchEngine:
        """Loads a built engine; `num_threads` sets torch's threads for the whole process."""
        spec = TorchEngineSpec.read(folder)
        check_memory([folder])
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        avoid_cudnn_attention(spec.device)
        with torch.inference_mode():
            return cls(spec, Model(spec.model, load_weights(folder / WEIGHTS_NAME, spec.device)))

    def can_admit(self, max_tokens: int) -> bool:
        """Returns whether a sequence of `max_tokens` tokens, prompt included, has room now."""
        return self._cache.num_free_slots > 0 and max_tokens <= self.max_seq_len

    @torch.inference_mode()
    def allocate(self, *, prompt_length: int, max_tokens: int) -> SequenceId:
        """Makes an empty sequence; `can_admit(max_tokens)` must hold."""
        assert self.can_admit(max_tokens)
        rotations = self._rotations_of(prompt_length, max_tokens)
        sequence = self._next_id
        self._next_id += 1
        self._sequences[sequence] = _Sequence(self._cache.allocate(), 0, rotations)
        return sequence

    def length(self, sequence: SequenceId) -> int:
        """Returns how many tokens of a sequence have their keys and values cached."""
        return self._sequences[sequence].length

    @torch.inference_mode()
    def forward(
        self, batch: Sequence[tuple[SequenceId, Sequence[int]]], num_logits: Sequence[int]
    ) -> Tensor:
        """Appends one or more tokens to each sequence and scores what follows them.

        Returns float32 logits [sum(num_logits), V]: those after the last num_logits[i] tokens of
        sequence i, in the order of the batch. It is an inference tensor.
        """
        sequences = [self._sequences[sequence] for sequence, _ in batch]
        order = sorted(range(len(batch)), key=lambda i: sequences[i].slot)
        token_ids: list[int] = []
        spans: list[Span] = []
        last_rows = [0] * len(batch)
        for i in order:
            tokens, sequence = batch[i][1], sequences[i]
            spans.append(Span(sequence.slot, sequence.length, len(tokens)))
            if not tokens or spans[-1].stop > self._cache.capacity:
                raise ValueError(
                    f"{len(tokens)} tokens after {sequence.length}: expected 1 to "
                    f"{self._cache.capacity - sequence.length}"
                )
            token_ids.extend(tokens)
            last_rows[i] = len(token_ids)
        ids = torch.tensor(token_ids, device=self._spec.device)
        rotations = self._gather_rotations(spans, [sequences[i] for i in order])
        hidden = self._model.forward(ids, rotations, self._cache.step(spans))
        for sequence, (_, tokens) in zip(sequences, batch, strict=True):
            sequence.length += len(tokens)
        rows = [
            row
            for stop, count in zip(last_rows, num_logits, strict=True)
            for row in range(stop - count, stop)
        ]
        return self._score(hidden, rows)

    def skip(self, sequence: SequenceId, num_tokens: int) -> None:
        """Takes tokens as cached that never were: their keys and values are zero."""
        self._sequences[sequence].length += num_tokens

    @torch.inference_mode()
    def truncate(self, sequence: SequenceId, length: int) -> None:
        """Forgets all tokens of a sequence after the first `length`."""
        state = self._sequences[sequence]
        if length < state.length:
            self._cache.clear(state.slot, length, state.length)
            state.length = length

    @torch.inference_mode()
    def free(self, sequence: SequenceId) -> None:
        """Ends a sequence and gives its room to others."""
        state = self._sequences.pop(sequence)
        self._cache.free(state.slot, state.length)

    def _rotations_of(self, prompt_length: int, max_tokens: int) -> Tensor:
        """Returns the table of a sequence, which those that are alike share while they run."""
        text_length = self._spec.model.rotary.text_length(
            prompt_length=prompt_length, max_tokens=max_tokens
        )
        if not text_length:
            return self._rotations
        rotations = self._other_rotations.get(text_length)
        if rotations is None:
            rotations = self._other_rotations[text_length] = self._rotation_table(text_length)
        return rotations

    def _rotation_table(self, text_length: int) -> Tensor:
        table = self._spec.model.rotary.table(self._spec.capacity, text_length=text_length)
        return table.to(self._spec.device)

    def _gather_rotations(self, spans: list[Span], sequences: list[_Sequence]) -> Tensor:
        parts = [
            sequence.rotations[span.start : span.stop]
            for span, sequence in zip(spans, sequences, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _score(self, hidden: Tensor, rows: list[int]) -> Tensor:
        if not rows:
            return torch.empty(0, self.vocab_size, device=self._spec.device)
        if rows == list(range(rows[0], rows[0] + len(rows))):
            return self._model.logits(hidden[rows[0] : rows[0] + len(rows)])
        return self._model.logits(hidden[torch.tensor(rows, device=hidden.device)])


def avoid_cudnn_attention(device: torch.device) -> None:
    """Leaves attention to torch's own kernels, for the whole process.

    cuDNN's fail on some of our shapes in half precision ("mha_graph.execute ... is_good()", torch
    2.11 on an H200).
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def check_memory(folders: Sequence[Path]) -> None:
    """Refuses engines that together do not fit into what memory is left."""
    specs = [TorchEngineSpec.read(folder) for folder in folders]
    on_gpu = specs[0].device.type == "cuda"
    available = torch.cuda.mem_get_info()[0] if on_gpu else available_bytes()
    needs = [(folder, spec.memory) for folder, spec in zip(folders, specs, strict=True)]
    if any(spec.kv_cache_tokens is not None for spec in specs):
        check_room(needs, available, on_gpu=on_gpu, to_lower="engine.kv_cache_memory")
    else:
        check_room(needs, available, on_gpu=on_gpu)


def load_weights(path: Path, device: torch.device) -> dict[str, Tensor]:
    """Maps the weights into memory; on a CPU they are used where they lie in the file."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            names = file.keys()  # not an iterable itself
            return {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as exc:
        raise EngineMismatch(f"{path} cannot be read ({exc}); build it again") from exc
