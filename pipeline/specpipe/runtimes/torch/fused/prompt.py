"""Prompts through a decoder: many rows a launch, of any sequences, for their keys and values.

A row's keys and values follow from its own text alone, however a prompt is cut into launches and
whatever is beside it: prompt_kernels.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from specpipe.runtimes.torch.fused import kernels, prompt_kernels
from specpipe.runtimes.torch.fused.decoder import Decoder
from specpipe.runtimes.torch.fused.host import pinned
from specpipe.runtimes.torch.fused.kernels import ACTIVATIONS
from specpipe.runtimes.torch.fused.linear import UNPACKED, Linear
from specpipe.runtimes.torch.fused.products import KINDS
from specpipe.runtimes.torch.fused.prompt_attention import prompt_attention
from specpipe.runtimes.torch.fused.tiles import Tiles, prompt_tiles
from specpipe.runtimes.torch.fused.weights import Layer
from specpipe.runtimes.torch.fused_sizes import (
    PAGE,
    PROMPT_WIDTHS,
    power_of_2_above,
    power_of_2_below,
)

_QUERIES_BYTES = 256
"""Of one channel of the queries of a program of attention: 128 of them multiply a page at the speed
of the matrix units, and of float32 no more than half as many would have room.
"""

_NORMED, _TURNED = 4, 32
"""Rows that a program norms, or turns a head of."""

_UNPACKED, _FEWEST_UNPACKED = 32, 1024
"""Columns that a program unpacks, and of a head that there is room for at least."""

_ROWS_OF_A_PART = 64
"""Rows of a launch for each part of it: some 1.5 ms of 1,024 rows of 7 B on an H200, 3.5 of 128.
More parts would be no more to record, but more graphs.
"""


@dataclass(frozen=True)
class Piece:
    """Tokens of a prompt that are read together.

    position     that of the first of them
    scored_from  the position from which on they are scored: their logits go to rows logit, ...
    """

    slot: int
    position: int
    token_ids: Sequence[int]
    scored_from: int
    logit: int = 0


@dataclass
class PromptRows:
    """Rows of a launch, by place; scored are those whose logits go to rows `logits`."""

    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    logits: list[int] = field(default_factory=list)

    @classmethod
    def packed(cls, pieces: Iterable[Piece], most: int, tile_rows: int) -> Iterator[PromptRows]:
        """Puts pieces into launches of `most` rows, each in tiles of its own."""
        rows = cls()
        for piece in pieces:
            while piece.token_ids:
                if len(rows.positions) == most:
                    yield rows
                    rows = cls()
                room = most - len(rows.positions)
                rows._add(piece, piece.token_ids[:room], tile_rows)
                piece = replace(
                    piece, position=piece.position + room, token_ids=piece.token_ids[room:]
                )
        if rows.positions:
            yield rows

    def blank(self, slot: int) -> None:
        """Makes rows of a slot nobody's."""
        self.positions = [
            -1 if of == slot else position
            for of, position in zip(self.slots, self.positions, strict=True)
        ]

    def _add(self, piece: Piece, token_ids: Sequence[int], tile_rows: int) -> None:
        start, stop = piece.position, piece.position + len(token_ids)
        for position in range(max(start, piece.scored_from), stop):
            self.scored.append(len(self.positions) + position - start)
            self.logits.append(piece.logit + position - piece.scored_from)
        num_nobody = -len(token_ids) % tile_rows
        self.positions += [*range(start, stop), *[-1] * num_nobody]
        self.slots += [piece.slot] * (len(token_ids) + num_nobody)
        self.tokens += [*token_ids, *[0] * num_nobody]


class Prompts:
    """Launches of prompts, and the tensors that they touch, which are made once.

    positions, slots, tokens  int32 [most_rows], of the next launch: tiles of tile_rows rows of one
                              sequence each, positions rising, filled up with positions -1
    num_rows                  int32 [1]: how many of them there are
    """

    def __init__(self, decoder: Decoder, most_rows: int) -> None:
        """most_rows  of a launch, one of PROMPT_WIDTHS"""
        self._decoder = decoder
        self._config = config = decoder.config
        weights = decoder.weights
        self._device, self._dtype = weights.norm.device, weights.embedding.dtype
        self.most_rows = most_rows
        self.widths = tuple(width for width in PROMPT_WIDTHS if width <= most_rows)
        queries = _QUERIES_BYTES // self._dtype.itemsize
        self.tile_rows = power_of_2_below(max(queries // config.group_size, 1))
        self._queries = power_of_2_above(self.tile_rows * config.group_size)
        self.inputs = torch.zeros(3 * most_rows + 1, dtype=torch.int32, device=self._device)
        self.positions, self.slots, self.tokens, self.num_rows = self._parts_of(self.inputs)
        self.positions.fill_(-1)

        def empty(*shape: int, dtype: torch.dtype = self._dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self._device)

        self._hidden = empty(most_rows, config.hidden_size)
        self._normed = empty(most_rows, config.hidden_size)
        self._qkv = empty(most_rows, config.query_size + 2 * config.key_size)
        self._query = empty(most_rows, config.query_size)
        self._attended = empty(most_rows, config.query_size)
        self._mlp = empty(most_rows, config.intermediate_size)
        linears, head = self._linears(), weights.head
        rounded = [n.num_channels for n in (*linears, head) if n.kind == "fp8_per_token"]
        self._rounded = empty(most_rows * max(rounded, default=0), dtype=decoder.fp8_dtype)
        self._row_scales = empty(most_rows, dtype=torch.float32)
        unpacked = [n.num_columns * n.num_channels for n in linears if n.kind in UNPACKED]
        if head.kind in UNPACKED:
            unpacked.append(_FEWEST_UNPACKED * head.num_channels)
        self._unpacked = empty(max(unpacked, default=0))

    def _linears(self) -> list[Linear]:
        return [
            linear
            for layer in self._decoder.weights.layers
            for linear in (layer.qkv, layer.dense, layer.mlp_in, layer.mlp_out)
        ]

    def fill(self, rows: PromptRows) -> int:
        """Puts rows in place for the next launch, all parts of it, and returns its width."""
        num_rows = len(rows.positions)
        inputs = torch.zeros(len(self.inputs), dtype=torch.int32)
        positions, slots, tokens, count = self._parts_of(inputs)
        positions.fill_(-1)
        for part, numbers in zip(
            (positions, slots, tokens), (rows.positions, rows.slots, rows.tokens), strict=True
        ):
            part[:num_rows] = torch.tensor(numbers, dtype=torch.int32)
        count.fill_(num_rows)
        self.inputs.copy_(pinned(inputs, self._device), non_blocking=True)
        return self.width(rows)

    def width(self, rows: PromptRows) -> int:
        """Returns the width of a launch of rows."""
        return next(width for width in self.widths if width >= len(rows.positions))

    def _parts_of(self, inputs: Tensor) -> list[Tensor]:
        return list(inputs.split([*[self.most_rows] * 3, 1]))

    @torch.inference_mode()
    def blank(self, slot: int) -> None:
        """Makes rows of a slot nobody's, behind what was launched of them."""
        self.positions.masked_fill_(self.slots == slot, -1)

    def parts(self, width: int) -> list[range]:
        """Returns the layers of each part of a launch, which are as many where they can be."""
        num_layers = self._config.num_layers
        num_parts = min(max(width // _ROWS_OF_A_PART, 1), num_layers)
        ends = [num_layers * part // num_parts for part in range(num_parts + 1)]
        return [range(*layers) for layers in pairwise(ends)]

    @torch.inference_mode()
    def launch(self, width: int, layers: range | None = None, *, is_whole: bool = False) -> None:
        """Caches the keys and values of the rows there are, `width` or fewer, one of widths.

        layers    behind those of the parts before; rounds may run in between. None: all
        is_whole  goes through all of the last layer too, for `score`; else nobody reads more of it
                  than its keys and values
        """
        config, weights = self._config, self._decoder.weights
        layers = range(config.num_layers) if layers is None else layers
        if layers.start == 0:
            hidden = self._hidden[:width]
            torch.index_select(weights.embedding, 0, self.tokens[:width], out=hidden)
            if config.embedding_scale is not None:
                hidden.mul_(config.embedding_scale)
        for index in layers:
            layer = weights.layers[index]
            self._norm(layer.attention_norm, layer.qkv, width)
            self._multiply(self._normed, layer.qkv, self._qkv, width)
            positions = self.positions[:width]
            self._decoder.turn(
                index, layer, self._qkv, self._query, positions, self.slots, rows=_TURNED
            )
            if index == config.num_layers - 1 and not is_whole:
                return
            self._look_back(index, layer.dense, width)
            self._multiply(self._attended, layer.dense, self._hidden, width, adds=True)
            self._norm(layer.mlp_norm, layer.mlp_in, width)
            self._gate(layer, width)
            self._multiply(self._mlp, layer.mlp_out, self._hidden, width, adds=True)

    @torch.inference_mode()
    def score(self, rows: Tensor) -> Tensor:
        """Returns float32 logits [rows, V] of some rows, int64, of the whole launch before."""
        head, width = self._decoder.weights.head, self.widths[0]
        hidden = self._hidden.index_select(0, rows)
        logits = []
        for some in hidden.split(width):
            self._hidden[: len(some)] = some
            self.num_rows.fill_(len(some))
            self._norm(self._decoder.weights.norm, head, width)
            parts = []
            for part in _parts_of_head(head, len(self._unpacked)):
                out = torch.empty(
                    len(some), part.num_columns, dtype=torch.float32, device=self._device
                )
                columns = power_of_2_below(part.num_columns)  # any number of tokens will do
                self._multiply(self._normed, part, out, width, num_columns=columns)
                parts.append(out)
            logits.append(torch.cat(parts, dim=1))
        return torch.cat(logits)

    def score_first(self, widths: Sequence[int]) -> None:
        """Scores the first row for nobody, so that all kernels for it are compiled.

        widths  of launches whose rows may be scored: they go through all of the last layer, whose
                kernels no other may need, as where it is the only one
        """
        num_layers = self._config.num_layers
        for width in widths:
            self.launch(width, range(num_layers - 1, num_layers), is_whole=True)
        self.score(torch.zeros(1, dtype=torch.int64, device=self._device))

    def _norm(self, norm: Tensor, linear: Linear, width: int) -> None:
        num_channels = self._config.hidden_size
        block = power_of_2_above(num_channels)
        self._decoder.launch(
            prompt_kernels.norm_rows, (width // _NORMED,),
            self._hidden, norm, linear.room(self._normed, self._decoder.fp8_dtype), self.num_rows,
            self._config.norm_epsilon, linear.input_scale,
            C=num_channels, BLOCK_C=block, ROWS=_NORMED, NEXT=KINDS[linear.kind], num_warps=8,
        )  # fmt: skip

    def _multiply(
        self, x: Tensor, linear: Linear, out: Tensor, width: int, *, adds: bool = False,
        num_columns: int | None = None,
    ) -> None:  # fmt: skip
        """Writes a product with the inputs of a linear, or adds it to what is there.

        num_columns  by which it is divided, if not by its own: then blocks may overlap
        """
        x, weight, kind = self._operands(x, linear, width)
        tiles = self._tiles(linear, width, num_columns or linear.num_columns)
        self._decoder.launch(
            prompt_kernels.linear, self._grid(linear.num_columns, width, tiles),
            x, self._row_scales, weight, weight if linear.scale is None else linear.scale,
            weight if linear.bias is None else linear.bias, out, self.num_rows,
            N=linear.num_columns, C=linear.num_channels, BLOCK_N=tiles.block_n,
            BLOCK_C=tiles.block_c, ROWS=tiles.rows, HAS_BIAS=linear.bias is not None, ADDS=adds,
            KIND=kind, tiles=tiles,
        )  # fmt: skip

    def _gate(self, layer: Layer, width: int) -> None:
        linear, out = layer.mlp_in, layer.mlp_out
        x, weight, kind = self._operands(self._normed, linear, width)
        num_columns = self._config.intermediate_size
        tiles = self._tiles(linear, width, num_columns, num_matrices=2)
        self._decoder.launch(
            prompt_kernels.gated, self._grid(num_columns, width, tiles),
            x, self._row_scales, weight, weight if linear.scale is None else linear.scale,
            weight if linear.bias is None else linear.bias,
            self._mlp if out.gain is None else out.gain,
            out.room(self._mlp, self._decoder.fp8_dtype), self.num_rows, out.input_scale,
            N=num_columns, C=linear.num_channels, BLOCK_N=tiles.block_n, BLOCK_C=tiles.block_c,
            ROWS=tiles.rows, HAS_BIAS=linear.bias is not None,
            ACTIVATION=ACTIVATIONS[self._config.activation], HAS_GAIN=out.gain is not None,
            KIND=kind, NEXT=KINDS[out.kind], tiles=tiles,
        )  # fmt: skip

    @staticmethod
    def _grid(num_columns: int, width: int, tiles: Tiles) -> tuple[int, int]:
        return -(-width // tiles.rows), -(-num_columns // tiles.block_n)

    def _tiles(
        self, linear: Linear, width: int, num_columns: int, *, num_matrices: int = 1
    ) -> Tiles:
        decoder = self._decoder
        tiles = prompt_tiles(
            num_columns, linear.num_channels, width,
            num_matrices=num_matrices, rounds=linear.rounds, is_known=decoder.widens,
            element_bytes=self._dtype.itemsize,
        )  # fmt: skip
        return decoder.fitted(tiles, linear, num_matrices=num_matrices)

    def _operands(self, x: Tensor, linear: Linear, width: int) -> tuple[Tensor, Tensor, int]:
        """Returns what is multiplied, inputs and weights, and of which kind the product is."""
        kind = linear.kind
        if kind == "fp8_per_token":
            x = self._round(x, linear, width)
        if kind not in UNPACKED:
            return linear.room(x, self._decoder.fp8_dtype), linear.weight, KINDS[kind]
        num_columns, num_channels = linear.num_columns, linear.num_channels
        weight = self._unpacked[: num_columns * num_channels]
        block = linear.block or min(256, power_of_2_above(num_channels))
        self._decoder.launch(
            prompt_kernels.unpack, (-(-num_columns // _UNPACKED), -(-num_channels // block)),
            linear.weight, linear.scale, weight,
            N=num_columns, C=num_channels, BLOCK_N=_UNPACKED, BLOCK=block, GROUP=linear.group,
            KIND=KINDS[kind],
        )  # fmt: skip
        # What is left of it is a scale for each column, or nothing.
        return x, weight, KINDS["plain" if linear.group else "int8"]

    def _round(self, x: Tensor, linear: Linear, width: int) -> Tensor:
        num_channels = linear.num_channels
        rounded = self._rounded[: width * num_channels]
        block = power_of_2_above(num_channels)
        self._decoder.launch(
            kernels.round_input, (width,),
            x, self._row_scales, rounded, self._row_scales, 0, 0.0, 1.0,
            C=num_channels, BLOCK_C=block, PARTS=1, WIDTH=width, HAS_NORM=False,
            KIND=KINDS[linear.kind], num_warps=min(16, max(4, block // 512)),
        )  # fmt: skip
        return rounded

    def _look_back(self, index: int, dense: Linear, width: int) -> None:
        """Attends to what is cached."""
        config, cache, decoder = self._config, self._decoder.cache, self._decoder
        window = config.windows[index]
        self._decoder.launch(
            prompt_attention, (width // self.tile_rows, config.num_kv_heads),
            self._query, cache.keys[index], cache.values[index], cache.table, self.positions,
            self.slots, self._query if dense.gain is None else dense.gain,
            dense.room(self._attended, decoder.fp8_dtype), cache.table.stride(0), window or 0,
            config.score_scale, dense.input_scale,
            H=config.num_heads, H_KV=config.num_kv_heads, D=config.head_size, PAGE=PAGE,
            ROWS=self.tile_rows, QUERIES=self._queries, HAS_WINDOW=window is not None,
            HEADS_BY_KV=dense.heads_by_kv, HAS_GAIN=dense.gain is not None,
            NEXT=KINDS[dense.kind], **self._attention_options,
        )  # fmt: skip

    @property
    def _attention_options(self) -> dict[str, Any]:
        """Pages under way in the loop of attention, and warps."""
        page_bytes = 2 * PAGE * self._config.head_size * self._dtype.itemsize
        query_bytes = self._queries * self._config.head_size * self._dtype.itemsize
        room = self._decoder.shared_bytes or 232_448
        stages = max(1, min(2, (room - query_bytes) // page_bytes))
        options = {"STAGES": stages, "num_warps": 8 if self._queries >= 128 else 4}
        if self._dtype != torch.float32 and self._decoder.is_hopper:
            # Then two programs share a processor: one multiplies while the other takes exponents.
            options["maxnreg"] = 128
        return options


def _parts_of_head(head: Linear, room: int) -> Iterator[Linear]:
    """Divides a head into what there is room to unpack, if it has to be."""
    if head.kind not in UNPACKED:
        yield head
        return
    assert head.scale is not None
    most = room // head.num_channels
    for weight, scale in zip(head.weight.split(most), head.scale.split(most, dim=-1), strict=True):
        yield replace(head, weight=weight, scale=scale.contiguous())
