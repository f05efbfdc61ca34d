"""A decoder made of the fused kernels: up to 256 rows a launch. Prompts are in prompt.py.

Letters as in kernels.py. All tensors that a launch touches are made once, so that a CUDA graph of
it stays valid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

from specpipe.runtimes.torch.fused import attention, compilation, kernels, lookup, scoring
from specpipe.runtimes.torch.fused.kernels import ACTIVATIONS
from specpipe.runtimes.torch.fused.linear import Linear
from specpipe.runtimes.torch.fused.pages import PagedKVCache
from specpipe.runtimes.torch.fused.products import KINDS
from specpipe.runtimes.torch.fused.streams import Members, Streams
from specpipe.runtimes.torch.fused.tiles import (
    Tiles,
    add_tiles,
    gated_tiles,
    linear_tiles,
    qkv_tiles,
    wide_tiles,
)
from specpipe.runtimes.torch.fused.weights import Layer, Weights
from specpipe.runtimes.torch.fused_sizes import (
    BLOCK,
    CHUNK,
    MOST_CHUNKS,
    PAGE,
    ROWS,
    WIDTHS,
    max_parts,
    power_of_2_above,
    power_of_2_below,
    width_of,
)
from specpipe.runtimes.torch.model_shape import ModelConfig

_EMBED_BLOCK = 1024
_BESTS = 1024
"""What is looked at together of the best of each block of the vocabulary, of one row or more."""

_MOST_WARPS = 256
"""Of attention, a part of all texts, where each part that there may be has a program."""

_WARPS_OF_FEW, _WARPS_OF_MANY = 12, 16
"""Of a processor, where attention takes blocks from a list; and if there are more of them."""

_REGISTERS = 1 << 16
"""Of a processor: CUDA C++ Programming Guide, compute capabilities 8.0 to 12.0."""

_LOOKUP_BLOCK = 4096
"""Places of a text that are looked at together, by one program: then nothing is to be joined."""


@dataclass(frozen=True)
class Rows:
    """The rows of a launch.

    positions    int32 [num_rows]; a row below 0 is computed and kept nowhere
    slots        int32 [num_rows]: whose pages each row reads and writes
    tokens       int32 [num_rows]: token ids; or of many texts [texts, capacity], by position
    group        neighbouring rows that are of one sequence, positions rising; of each such group
                 some rows, or all, may be below 0
    is_long      whether one of them may see more than MOST_CHUNKS chunks: FusedEngine.is_long
    texts        int32 [num_rows]: in which of the texts a row's token stands; None: there are none
    has_reading  groups may be neighbours in a text that is read, which is lost with a row of it
    """

    positions: Tensor
    slots: Tensor
    tokens: Tensor
    num_rows: int
    group: int
    is_long: bool
    texts: Tensor | None = None
    has_reading: bool = False

    @property
    def width(self) -> int:
        return width_of(self.num_rows)


@dataclass(frozen=True)
class _LayerTiles:
    qkv: Tiles
    dense: Tiles
    mlp_in: Tiles
    mlp_out: Tiles


class Decoder:
    """Runs rows through all layers; keys and values go to the pages of a PagedKVCache."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        cache: PagedKVCache,
        *,
        capacity: int,
        most_rows: int = ROWS,
    ) -> None:
        """capacity   positions that a sequence can have
        most_rows  of a launch, one of WIDTHS
        """
        self.config = config
        self.weights = weights
        self.cache = cache
        self.capacity = capacity
        self.most_rows = most_rows
        self._device = weights.norm.device
        self._dtype = weights.embedding.dtype
        is_cuda = self._device.type == "cuda"
        capability = torch.cuda.get_device_capability(self._device) if is_cuda else (9, 0)
        self._pdl = is_cuda and capability >= (9, 0)
        self.is_hopper = is_cuda and capability[0] == 9
        # What inputs of FP8 are multiplied as: products.py. Only Hopper's sums of e4m3 were
        # compared with exact ones.
        self.fp8_dtype = torch.float8_e4m3fn if capability[0] == 9 else torch.float16
        # The sums of Blackwell's own matrix instruction were compared with nothing yet; and nobody
        # waits for float32.
        self.widens = not is_cuda or (capability[0] != 10 and self._dtype != torch.float32)
        self.shared_bytes: int | None = None
        self._num_processors = 1
        if is_cuda:
            index = self._device.index or torch.cuda.current_device()
            properties = driver.active.utils.get_device_properties(index)
            self.shared_bytes = properties["max_shared_mem"]
            self._num_processors = properties["multiprocessor_count"]
        table = config.rotary.table(capacity).squeeze(1)
        self._rotations = torch.view_as_real(table).contiguous().to(self._device)
        self._make_buffers()

    def _make_buffers(self) -> None:
        config = self.config

        def empty(*shape: int, dtype: torch.dtype = self._dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self._device)

        rows = self.most_rows
        columns = config.query_size + 2 * config.key_size
        self._hidden = empty(rows, config.hidden_size)
        self._scaled = empty(rows, config.hidden_size)
        self._qkv = empty(rows, columns)
        self._query = empty(rows, config.query_size)
        self._attended = empty(rows, config.query_size)
        self._mlp = empty(rows, config.intermediate_size)
        self.logits = empty(rows, config.vocab_size, dtype=torch.float32)
        self._max_parts = max_parts(self.capacity)
        num_parts = rows * config.num_heads * self._max_parts
        self._sums = empty(num_parts, config.head_size, dtype=torch.float32)
        self._states = empty(num_parts, 2, dtype=torch.float32)

        def zeros(num: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(num, dtype=dtype, device=self._device)

        self._arrivals = zeros(rows * config.num_heads)
        self._listed = zeros(4 + 4 * rows * -(-self.capacity // (BLOCK * CHUNK)))
        layers = self.weights.layers
        widths = [width for width in WIDTHS if width <= rows]
        self._tiles = {w: [self._layer_tiles(layer, w) for layer in layers] for w in widths}
        adding = [t for layer in self._tiles[ROWS] for t in (layer.dense, layer.mlp_out)]
        self._parts_block = power_of_2_above(max(map(self._num_parts, adding)))
        self._squares = zeros(self._parts_block * rows, torch.float32)
        widest = max(config.hidden_size, config.query_size, config.intermediate_size)
        self._rounded = empty(rows * widest, dtype=self.fp8_dtype)
        self._row_scales = empty(rows, dtype=torch.float32)
        self._norms = [*(layer.attention_norm for layer in layers), self.weights.norm]
        splits = max(tiles.splits for tiles in adding)
        self._parts = empty(splits, rows, config.hidden_size, dtype=torch.float32)
        self._part_arrivals = zeros(rows // ROWS * config.hidden_size // 16)
        self._head_tiles = {width: self._tiles_of_head(width) for width in widths}
        num_bests = max(self._num_blocks(width) * width for width in widths)
        self._best = empty(num_bests, dtype=torch.float32)
        self._best_ids = empty(num_bests, dtype=torch.int32)
        self.is_unused = zeros(config.vocab_size, torch.uint8)
        self._num_usable, self._has_unused = config.vocab_size, False

    def _layer_tiles(self, layer: Layer, width: int) -> _LayerTiles:
        qkv, dense, mlp_in, mlp_out = layer.qkv, layer.dense, layer.mlp_in, layer.mlp_out
        turned = min(self.config.head_size, 64)
        half = mlp_in.num_columns // 2, mlp_in.num_channels
        tiles = qkv_tiles(*_shape(qkv), most=turned, **_packing(qkv))
        gated = gated_tiles(*half, **_packing(mlp_in))
        return _LayerTiles(
            self._fitting(tiles, qkv, width, most=turned),
            self._fitting(add_tiles(*_shape(dense), **_packing(dense)), dense, width),
            self._fitting(gated, mlp_in, width, num_matrices=2),
            self._fitting(add_tiles(*_shape(mlp_out), **_packing(mlp_out)), mlp_out, width),
        )

    def _tiles_of_head(self, width: int) -> Tiles:
        # Any number of tokens will do: the last block overlaps the one before it.
        head, vocab_size = self.weights.head, self.config.vocab_size
        num_columns, most = 1 << vocab_size.bit_length(), min(128, power_of_2_below(vocab_size))
        tiles = linear_tiles(num_columns, head.num_channels, most=min(64, most), **_packing(head))
        return self._fitting(tiles, head, width, num_columns=num_columns, most=most)

    def _num_blocks(self, width: int) -> int:
        """How many blocks of the vocabulary are scored."""
        return -(-self.config.vocab_size // self._head_tiles[width].block_n)

    def _fitting(
        self,
        tiles: Tiles,
        linear: Linear,
        width: int,
        *,
        num_columns: int | None = None,
        num_matrices: int = 1,
        most: int = 64,
    ) -> Tiles:
        """Fits narrow tiles to the chip, and makes those of a launch of some width of them."""
        narrow = self.fitted(tiles, linear, num_matrices=num_matrices)
        if width == ROWS or not self.widens:
            return narrow
        num_columns = num_columns or linear.num_columns // num_matrices
        wide = wide_tiles(narrow, width, num_columns, most=most, kind=linear.kind)
        return self.fitted(wide, linear, num_matrices=num_matrices)

    def fitted(self, tiles: Tiles, linear: Linear, *, num_matrices: int = 1) -> Tiles:
        """Makes tiles of a linear fit into the chip's memory: Tiles.fitting."""
        if self.shared_bytes is None:
            return tiles
        weights = linear.weight.dtype if linear.rounds else self._dtype
        inputs = self.fp8_dtype if linear.rounds else self._dtype
        return tiles.fitting(
            self.shared_bytes, element_bytes=weights.itemsize, input_bytes=inputs.itemsize,
            num_matrices=num_matrices,
        )  # fmt: skip

    @torch.inference_mode()
    def use_tokens(self, vocab_size: int, unused: list[tuple[int, int]]) -> None:
        """Limits the best tokens to the first vocab_size ids, less those of half-open ranges."""
        self._num_usable = vocab_size
        self.is_unused.zero_()
        self._has_unused = bool(unused)
        for start, stop in unused:
            self.is_unused[start:stop] = 1

    def layers(self, rows: Rows) -> None:
        """Runs the rows through all layers; their hidden states stay in a buffer."""
        table = self.weights.embedding
        scale = self.config.embedding_scale or 1.0
        self.launch(
            kernels.embed, (rows.num_rows + self.lists_blocks(rows.num_rows, rows.group),),
            rows.tokens, rows.positions, rows.positions if rows.texts is None else rows.texts,
            rows.slots, table, self._norms[0], self._hidden, self._scaled, self._squares,
            self._listed, rows.tokens.stride(0), scale, rows.num_rows, self._together(rows),
            C=self.config.hidden_size, BLOCK_C=_EMBED_BLOCK, HAS_TEXTS=rows.texts is not None,
            WIDTH=rows.width, CHUNK=CHUNK, BLOCK=BLOCK,
        )  # fmt: skip
        num_parts = 1
        for index, layer in enumerate(self.weights.layers):
            tiles = self._tiles[rows.width][index]
            self._attend(index, layer, rows, num_parts)
            self._add(self._attended, layer.dense, layer.mlp_norm, tiles.dense, rows)
            self._gate(layer, tiles.mlp_in, rows, self._num_parts(tiles.dense))
            self._add(self._mlp, layer.mlp_out, self._norms[index + 1], tiles.mlp_out, rows)
            num_parts = self._num_parts(tiles.mlp_out)

    def _num_parts(self, tiles: Tiles) -> int:
        """How many sums of squares a product with the hidden states as its columns leaves."""
        return self.config.hidden_size // (tiles.summed or tiles.block_n)

    def score(
        self,
        num_rows: int,
        *,
        writes_logits: bool,
        width: int = ROWS,
        group: int = 1,
        last: int = 1,
        first_out: int = 0,
    ) -> None:
        """Scores the vocabulary for so many rows of the last launch: bests, and logits.

        width        of that launch
        group, last  of each such group of its rows, the last ones are scored: at 1 all are
        first_out    the row of logits that the first of them gets
        """
        out_width = width_of(num_rows)
        tiles, head = self._head_tiles[out_width], self.weights.head
        num_parts = self._num_parts(self._tiles[width][-1].mlp_out)
        x = self._normed(head, num_rows // last * group, num_parts, width)
        self.launch(
            scoring.score, (self._num_blocks(out_width), 1, out_width // tiles.rows),
            x, self._squares, self._row_scales, head.weight, _scale_of(head),
            self.is_unused, self.logits, self._best, self._best_ids, first_out, num_rows, group,
            last, num_parts, self._num_usable, self.config.norm_epsilon,
            V=self.config.vocab_size, C=head.num_channels, BLOCK_N=tiles.block_n,
            BLOCK_C=tiles.block_c, PARTS=self._parts_block, ROWS=tiles.rows, WIDTH=width,
            OUT_WIDTH=out_width, PICKS=last < group, PREFETCH=tiles.prefetch,
            HAS_UNUSED=self._has_unused, WRITES_LOGITS=writes_logits, GROUP=head.group,
            KIND=KINDS[head.kind], tiles=tiles,
        )  # fmt: skip

    def bests(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Returns what `score` finds of so many rows: best and best_ids, [blocks, their width].

        They are the highest logit of each block of the vocabulary, and its id.
        """
        width = width_of(num_rows)
        size = self._num_blocks(width) * width
        best, best_ids = (x[:size].view(-1, width) for x in (self._best, self._best_ids))
        return best, best_ids

    def propose(self, rows: Rows, history: Tensor, *, last: int = 1) -> None:
        """Writes the best tokens of rows behind them, into their texts: scoring.propose.

        last  of each group of them; those were scored
        """
        num_places = rows.num_rows // rows.group
        best, best_ids = self.bests(num_places * last)
        self.launch(
            scoring.propose, (num_places, last),
            best, best_ids, rows.positions, rows.texts, history, rows.group, len(best),
            history.stride(0),
            WIDTH=best.shape[1], BLOCKS=_BESTS,
        )  # fmt: skip

    def copy(self, streams: Streams, members: Members) -> None:
        """Writes draft tokens that are copied from texts behind them: lookup.copy_draft."""
        history = streams.history
        self.launch(
            lookup.copy_draft, (members.num_places,),
            members.streams, members.num_draft, members.is_copied, history, streams.last,
            history.stride(0),
            BLOCK=_LOOKUP_BLOCK, ROWS=ROWS, num_warps=16,
        )  # fmt: skip

    def accept(self, rows: Rows, streams: Streams, members: Members, result: Tensor) -> None:
        """Judges draft tokens by the rows scored: scoring.accept."""
        best, best_ids = self.bests(rows.num_rows)
        history = streams.history
        of_place = ROWS if members.is_packed else power_of_2_above(members.most + 1)
        self.launch(
            scoring.accept, (members.num_places,),
            best, best_ids, members.streams, members.num_draft, history, streams.last, result,
            members.most, len(best), history.stride(0),
            ROWS=of_place, WIDTH=rows.width, BLOCKS=_BESTS // of_place,
        )  # fmt: skip

    def _attend(self, index: int, layer: Layer, rows: Rows, num_parts: int) -> None:
        config, tiles, cache = self.config, self._tiles[rows.width][index].qkv, self.cache
        heads: dict[str, Any] = {
            "H": config.num_heads, "H_KV": config.num_kv_heads, "D": config.head_size
        }  # fmt: skip
        linear = layer.qkv
        bias = linear.bias
        turns = layer.query_norm is None
        keys, values = cache.keys[index], cache.values[index]
        self.launch(
            kernels.rotary_linear,
            (linear.num_columns // tiles.block_n, 1, rows.width // tiles.rows),
            self._normed(linear, rows.num_rows, num_parts, rows.width), self._squares,
            self._row_scales, linear.weight, _scale_of(linear),
            layer.attention_norm if bias is None else bias, self._rotations,
            self._query if turns else self._qkv, keys, values, cache.table, rows.positions,
            rows.slots, rows.num_rows, num_parts, cache.table.stride(0), config.norm_epsilon,
            C=linear.num_channels, PAGE=PAGE, BLOCK_N=tiles.block_n, BLOCK_C=tiles.block_c,
            PARTS=self._parts_block, ROWS=tiles.rows, WIDTH=rows.width, PREFETCH=tiles.prefetch,
            HAS_BIAS=bias is not None, TURNS=turns, GROUP=linear.group, KIND=KINDS[linear.kind],
            WAYS=tiles.ways, HELD=tiles.held, tiles=tiles, **heads,
        )  # fmt: skip
        if not turns:
            self.turn(
                index, layer, self._qkv, self._query, rows.positions[: rows.num_rows], rows.slots
            )
        self._look_back(index, layer, rows)

    def _look_back(self, index: int, layer: Layer, rows: Rows) -> None:
        """Attends to what is cached."""
        config, cache, dense = self.config, self.cache, layer.dense
        queries = self._queries(rows.group)
        is_listed = self.lists_blocks(rows.num_rows, rows.group)
        together = self._together(rows) if is_listed else rows.group
        query_blocks = -(-together * config.group_size // queries)
        groups = rows.num_rows // rows.group * -(-rows.group // together) * query_blocks
        inputs = self._query, cache.keys[index], cache.values[index], cache.table
        outputs = (
            self._query if dense.gain is None else dense.gain, self._room(self._attended, dense),
            self._sums, self._states, self._arrivals, cache.table.stride(0), self._max_parts,
            config.windows[index] or 0, config.score_scale,
        )  # fmt: skip
        constants: dict[str, Any] = {
            "H": config.num_heads, "H_KV": config.num_kv_heads, "D": config.head_size,
            "PAGE": PAGE, "CHUNK": CHUNK, "BLOCK": BLOCK, "QUERIES": queries,
            "QUERY_BLOCKS": query_blocks, "UNROLL": 128 // queries,
            "HEADS_BY_KV": dense.heads_by_kv, "HAS_GAIN": dense.gain is not None,
            "NEXT": KINDS[dense.kind], "num_warps": self._warps_of_attention,
        }  # fmt: skip
        if is_listed:
            most = _WARPS_OF_FEW // self._warps_of_attention * self._num_processors
            is_few = groups * config.num_kv_heads <= most
            warps = _WARPS_OF_FEW if is_few else _WARPS_OF_MANY
            programs = warps // self._warps_of_attention * self._num_processors
            self.launch(
                attention.attention_of_many, (programs,),
                *inputs, self._listed, *outputs, dense.input_scale,
                STAGES=self._attention_stages if is_few else 3,
                maxnreg=_REGISTERS // (32 * warps) // 8 * 8, **constants,
            )  # fmt: skip
            return
        most_chunks = -(-self.capacity // CHUNK)
        num_parts = -(-most_chunks // BLOCK) if rows.is_long else min(most_chunks, MOST_CHUNKS)
        self.launch(
            attention.attention, (groups, config.num_kv_heads, num_parts),
            *inputs, rows.positions, rows.slots, *outputs, rows.group, rows.num_rows,
            dense.input_scale, ROWS=rows.width, TAKES_BLOCKS=rows.is_long,
            STAGES=self._attention_stages, **constants,
        )  # fmt: skip

    @property
    def _warps_of_attention(self) -> int:
        """Of one program. How weights are added up follows from it: it is always the same."""
        return 4 if self.config.head_size * self._dtype.itemsize <= 128 else 8

    def lists_blocks(self, num_rows: int, group: int) -> bool:
        """Says whether attention takes blocks from a list, so that is_long changes nothing."""
        query_blocks = -(-group * self.config.group_size // self._queries(group))
        groups = num_rows // group
        warps = groups * query_blocks * self.config.num_kv_heads * self._warps_of_attention
        return groups > 1 and warps > _MOST_WARPS

    def _together(self, rows: Rows) -> int:
        """Rows of a sequence that attention takes together where it takes blocks from a list.

        No more than a group: a row that is NaN spoils those that it is taken together with. That is
        nothing to a text that is read.
        """
        most = max(self._queries(rows.group) // self.config.group_size, 1)
        return most if rows.has_reading else min(most, rows.group)

    def _queries(self, group: int) -> int:
        """Of one program of attention."""
        config = self.config
        num_queries = group * config.group_size
        return attention.queries_of(num_queries, config.head_size, self._dtype.itemsize)

    @property
    def _attention_stages(self) -> int:
        """Of the loop over chunks: two are under way, or one, and their places before them."""
        chunk_bytes = 2 * CHUNK * self.config.head_size * self._dtype.itemsize
        # Queries and weights take a fifth of what two chunks do; float32 would want more registers.
        has_room = self.shared_bytes is None or 2.4 * chunk_bytes <= self.shared_bytes
        return 5 if has_room and self._dtype != torch.float32 else 3

    def turn(
        self, index: int, layer: Layer, qkv: Tensor, query: Tensor, positions: Tensor,
        slots: Tensor, rows: int = 1,
    ) -> None:  # fmt: skip
        """Norms and rotary embedding of heads, from qkv to query and the KV cache.

        rows  that a program takes, of which all are there
        """
        config, norm = self.config, layer.query_norm
        num_heads = config.num_heads + 2 * config.num_kv_heads
        self.launch(
            kernels.turn_heads, (len(positions) // rows, num_heads),
            qkv, layer.attention_norm if norm is None else norm,
            layer.attention_norm if layer.key_norm is None else layer.key_norm, self._rotations,
            query, self.cache.keys[index], self.cache.values[index], self.cache.table, positions,
            slots, self.cache.table.stride(0), config.norm_epsilon,
            H=config.num_heads, H_KV=config.num_kv_heads, D=config.head_size, PAGE=PAGE, ROWS=rows,
            HAS_NORM=norm is not None,
        )  # fmt: skip

    def _add(self, x: Tensor, linear: Linear, norm: Tensor, tiles: Tiles, rows: Rows) -> None:
        """Adds a product to the hidden states, and readies the norm that follows."""
        x = self._room(x, linear)
        if linear.kind == "fp8_per_token":
            x = self._round(x, linear, rows.num_rows, rows.width)
        self.launch(
            kernels.add_linear,
            (linear.num_columns // tiles.block_n, tiles.splits, rows.width // tiles.rows),
            x, self._row_scales, linear.weight, _scale_of(linear),
            linear.weight if linear.bias is None else linear.bias, norm,
            self._hidden, self._scaled, self._squares, self._parts, self._part_arrivals,
            rows.num_rows,
            N=linear.num_columns, C=linear.num_channels, BLOCK_N=tiles.block_n,
            BLOCK_C=tiles.block_c, SPLITS=tiles.splits, SUMMED=tiles.summed or tiles.block_n,
            ROWS=tiles.rows, WIDTH=rows.width, PREFETCH=tiles.prefetch,
            HAS_BIAS=linear.bias is not None, GROUP=linear.group, KIND=KINDS[linear.kind],
            WAYS=tiles.ways, HELD=tiles.held, tiles=tiles,
        )  # fmt: skip

    def _gate(self, layer: Layer, tiles: Tiles, rows: Rows, num_parts: int) -> None:
        linear, out = layer.mlp_in, layer.mlp_out
        bias = linear.bias
        self.launch(
            kernels.gated_linear,
            (self.config.intermediate_size // tiles.block_n, 1, rows.width // tiles.rows),
            self._normed(linear, rows.num_rows, num_parts, rows.width), self._squares,
            self._row_scales, linear.weight, _scale_of(linear),
            layer.mlp_norm if bias is None else bias,
            self._mlp if out.gain is None else out.gain, self._room(self._mlp, out),
            rows.num_rows, num_parts, self.config.norm_epsilon, out.input_scale,
            N=self.config.intermediate_size, C=linear.num_channels, BLOCK_N=tiles.block_n,
            BLOCK_C=tiles.block_c, PARTS=self._parts_block, ROWS=tiles.rows, WIDTH=rows.width,
            PREFETCH=tiles.prefetch, HAS_BIAS=bias is not None,
            ACTIVATION=ACTIVATIONS[self.config.activation],
            HAS_GAIN=out.gain is not None, GROUP=linear.group, KIND=KINDS[linear.kind],
            NEXT=KINDS[out.kind], WAYS=tiles.ways, HELD=tiles.held, tiles=tiles,
        )  # fmt: skip

    def _normed(self, linear: Linear, num_rows: int, num_parts: int, width: int) -> Tensor:
        """Returns the hidden states as a linear behind a norm takes them."""
        if linear.rounds:
            return self._round(self._scaled, linear, num_rows, width, num_parts)
        if width > ROWS:
            self.launch(
                kernels.measure_rows, (1, 1, width // ROWS),
                self._squares, self._row_scales, num_rows, num_parts, self.config.norm_epsilon,
                C=linear.num_channels, PARTS=self._parts_block, ROWS=ROWS, WIDTH=width,
                num_warps=1,
            )  # fmt: skip
        return self._scaled

    def _round(
        self, x: Tensor, linear: Linear, num_rows: int, width: int, num_parts: int = 0
    ) -> Tensor:
        """Rounds rows for a linear in FP8.

        num_parts  sums of their squares, if their RMSNorm is still to be done; else 0
        """
        num_channels = linear.num_channels
        rounded = self._rounded[: width * num_channels].view(width, num_channels)
        block = power_of_2_above(num_channels)
        self.launch(
            kernels.round_input, (num_rows,),
            x, self._squares, rounded, self._row_scales, num_parts, self.config.norm_epsilon,
            linear.input_scale,
            C=num_channels, BLOCK_C=block, PARTS=self._parts_block, WIDTH=width,
            HAS_NORM=num_parts > 0, KIND=KINDS[linear.kind],
            num_warps=min(16, max(4, block // 512)),
        )  # fmt: skip
        return rounded

    def _room(self, x: Tensor, linear: Linear) -> Tensor:
        """Returns the room for the inputs of a linear: that of rounded ones, if they come so."""
        return linear.room(x, self.fp8_dtype)

    def launch(
        self, kernel: Any, grid: tuple[int, ...], *arguments: Any, tiles: Tiles | None = None,
        **constants: Any,
    ) -> None:  # fmt: skip
        """Launches a kernel behind the one before it."""
        options: dict[str, Any] = {"PDL": self._pdl}
        if self._pdl:
            options["launch_pdl"] = True
        if tiles is not None:
            options.update(num_warps=tiles.num_warps, num_stages=tiles.num_stages)
        compilation.launch(kernel, grid, arguments, {**constants, **options})


def _shape(linear: Linear) -> tuple[int, int]:
    return linear.num_columns, linear.num_channels


def _packing(linear: Linear) -> dict[str, Any]:
    return {"kind": linear.kind, "block": linear.block}


def _scale_of(linear: Linear) -> Tensor:
    """Returns the scale of a linear, or what a kernel is given that reads none."""
    return linear.weight if linear.scale is None else linear.scale
