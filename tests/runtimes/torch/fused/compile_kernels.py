"""Compiles the kernels that a decoder launches, for GPUs that are not here; prints JSON.

Run by test_compile.py in a process of its own: one that interprets kernels cannot compile them.
The decoder is of a real size and on torch's `meta` device, so it has tiles and no memory.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specpipe.runtimes.torch.fused import round_rows
from specpipe.runtimes.torch.fused.decoder import Decoder, Rows
from specpipe.runtimes.torch.fused.pages import PagedKVCache
from specpipe.runtimes.torch.fused.prompt import Prompts
from specpipe.runtimes.torch.fused.streams import Members, Streams
from specpipe.runtimes.torch.fused.tiles import Tiles
from specpipe.runtimes.torch.fused.weights import Weights, load_weights
from specpipe.runtimes.torch.fused_sizes import PROMPT_WIDTHS, ROWS
from tests.runtimes.torch.fused.toy import MISTRAL_7B, QWEN_05B, toy_config, toy_shapes

SMALL_HEADS: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_heads": 8,
    "num_kv_heads": 2, "head_size": 32,
}  # fmt: skip
MODELS = {"7b": MISTRAL_7B, "0.5b": QWEN_05B, "small_heads": SMALL_HEADS}
_TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.uint8: "*u8"}

MANY_ROWS = 64


class Launch(NamedTuple):
    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    tiles: Tiles | None


class RecordingDecoder(Decoder):
    """Keeps what it would launch."""

    launches: list[Launch]

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        *arguments: Any,
        tiles: Tiles | None = None,
        **constants: Any,
    ) -> None:
        self.launches.append(Launch(kernel, arguments, constants, tiles))


def recording_decoder(
    model: str,
    dtype: torch.dtype = torch.bfloat16,
    change: Callable[[Weights], Weights] = lambda weights: weights,
) -> RecordingDecoder:
    """A decoder of one layer, without memory."""
    config = toy_config(**MODELS[model], num_layers=1)
    weights = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, shape in toy_shapes(config).items()
    }
    cache = PagedKVCache(
        num_layers=1,
        num_slots=1,
        capacity=1024,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        dtype=dtype,
        device=torch.device("meta"),
    )
    loaded = change(load_weights(config, weights.get))
    decoder = RecordingDecoder(config, loaded, cache, capacity=1024, most_rows=MANY_ROWS)
    decoder.launches = []
    return decoder


def launches_of(model: str, dtype: torch.dtype) -> dict[str, Launch]:
    """What a draft-verify round launches and a launch of prompts, one of each kernel."""
    decoder = recording_decoder(model, dtype)
    integers = torch.empty(128, dtype=torch.int32, device="meta")
    texts = integers.view(2, 64)
    streams = Streams(texts, integers, integers)
    members = Members(integers[:1], integers[:1], integers[:1], most=4)
    rows = Rows(integers[:5], integers, texts, 5, 5, is_long=False, texts=integers[:5])
    decoder.layers(rows)
    decoder.score(5, writes_logits=True)
    decoder.score(3, writes_logits=True, group=5, last=3)
    decoder.propose(rows, texts)
    decoder.copy(streams, members)
    decoder.accept(rows, streams, members, integers)
    for is_parallel in (False, True):
        decoder.launch(
            round_rows.plan_round, (1,), *[integers] * 11, 4, 64, 0,
            ROWS=ROWS, IS_PARALLEL=is_parallel, num_warps=1,
        )  # fmt: skip
    names = ["embed", "rotary_linear", "attention", "dense", "gated_linear", "mlp_out", "score"]
    names += ["score_last", "propose", "copy", "accept", "plan_round", "plan_parallel_round"]
    launches = dict(zip(names, decoder.launches, strict=True))
    decoder.layers(replace(rows, is_long=True))
    launches["attention_by_blocks"] = decoder.launches[len(names) + names.index("attention")]
    # So many that every model has its attention take blocks from a list.
    decoder.layers(replace(rows, positions=integers, num_rows=MANY_ROWS, group=1))
    launches["attention_of_many"] = next(
        launch for launch in decoder.launches if launch.kernel.__name__ == "attention_of_many"
    )
    decoder.launches = []
    Prompts(decoder, PROMPT_WIDTHS[-1]).launch(PROMPT_WIDTHS[-1], is_whole=True)
    names = [
        "norm_rows",
        "qkv",
        "turn_heads",
        "attention",
        "dense",
        "norm_rows",
        "gated",
        "mlp_out",
    ]
    for name, launch in zip(names, decoder.launches, strict=True):
        launches[f"prompt_{name}"] = launch
    return launches


def compiled(launch: Launch, capability: int) -> Any:
    has_pdl = capability >= 90
    constants = {**launch.constants, "PDL": has_pdl}
    options: dict[str, Any] = {"launch_pdl": True} if has_pdl else {}
    for name in "num_warps", "maxnreg":
        if name in constants:
            options[name] = constants.pop(name)
    signature: dict[str, str] = dict.fromkeys(constants, "constexpr")
    names = [name for name in launch.kernel.arg_names if name not in constants]
    for name, value in zip(names, launch.arguments, strict=True):
        if isinstance(value, Tensor):
            signature[name] = _TYPES[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    arg_names = launch.kernel.arg_names
    aligned = {
        (arg_names.index(name),): [["tt.divisibility", 16]]
        for name in names
        if signature[name].startswith("*")
    }
    if launch.tiles is not None:
        options |= {"num_warps": launch.tiles.num_warps, "num_stages": launch.tiles.num_stages}
    source = ASTSource(launch.kernel, {n: signature[n] for n in arg_names}, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


class Access(NamedTuple):
    """Of global memory: the pointer, "load", "copy" to shared memory or "store", and its bytes."""

    argument: str
    kind: str
    num_bytes: int


def accesses(ptx: str, names: list[str]) -> tuple[list[Access], list[Access]]:
    """All accesses to what the arguments point to, and those that may come before the wait."""
    lines = [line.split("//")[0].strip() for line in ptx.splitlines()]
    lines = [line for line in lines if line and not line.startswith(".")]
    arguments = _arguments(lines, names)
    found: dict[int, Access] = {}
    for number, line in enumerate(lines):
        access = _access(line, arguments)
        if access is not None:
            found[number] = access
    early = _reached_without_wait(lines)
    return list(found.values()), [found[n] for n in sorted(early & found.keys())]


def _arguments(lines: list[str], names: list[str]) -> dict[str, str]:
    """Which argument each register of an address comes from."""
    arguments: dict[str, str] = {}
    for _ in range(3):  # registers of loops are set behind where they are used
        for line in lines:
            parameter = re.match(r"ld\.param\.b64\s+(%rd\d+), \[\w+_param_(\d+)\]", line)
            if parameter and int(parameter[2]) < len(names):
                arguments[parameter[1]] = names[int(parameter[2])]
                continue
            moved = re.match(r"(?:@\S+ )?[a-z]\S*\s+(%rd\d+), (.*);", line)
            if moved and ".global" not in line and "ld." not in line:
                sources = [arguments[r] for r in re.findall(r"%rd\d+", moved[2]) if r in arguments]
                if sources:
                    arguments[moved[1]] = sources[0]
    return arguments


def _access(line: str, arguments: dict[str, str]) -> Access | None:
    operation = re.sub(r"^@!?\S+\s+", "", line).split(None, 1)
    if len(operation) < 2 or "prefetch" in operation[0]:
        return None
    name, operands = operation
    address = [r for r in re.findall(r"\[\s*(%rd\d+)", operands) if r in arguments]
    if not address:
        return None
    argument = arguments[address[-1]]
    if name.startswith("cp.async"):
        return Access(argument, "copy", int(operands.split(",")[2].strip().rstrip(";"), 0))
    if not name.startswith(("ld.", "st.", "atom.")):
        return None
    width = re.search(r"\.[bfsu](\d+)$", name)
    count = re.search(r"\.v(\d)", name)
    num_bytes = int(width[1]) // 8 * (int(count[1]) if count else 1) if width else 0
    return Access(argument, "load" if name.startswith("ld.") else "store", num_bytes)


def _reached_without_wait(lines: list[str]) -> set[int]:
    """Numbers of the lines that a thread may come to before griddepcontrol.wait."""
    labels = {line.rstrip(":"): n for n, line in enumerate(lines) if line.endswith(":")}
    reached: set[int] = set()
    todo = [0]
    while todo:
        number = todo.pop()
        while number < len(lines) and number not in reached:
            line = lines[number]
            if line.startswith("griddepcontrol.wait"):
                break
            reached.add(number)
            branch = re.search(r"\bbra\S*\s+(\$\w+);", line)
            if branch:
                todo.append(labels[branch[1]])
            if line.startswith(("bra", "ret")):
                break
            number += 1
    return reached


def facts(name: str, launch: Launch, capability: int) -> dict[str, Any]:
    kernel = compiled(launch, capability)
    names = [n for n in launch.kernel.arg_names if n not in {*launch.constants, "PDL"}]
    every, early = accesses(kernel.asm["ptx"], names)
    return {
        "name": name,
        "shared_bytes": kernel.metadata.shared,
        "is_held": launch.tiles is not None and launch.tiles.held > 0,
        "accesses": sorted(set(every)),
        "early": sorted(set(early)),
        # How many share the rows of a product, and its columns.
        "warps": sorted(set(re.findall(r"_mma<.*?warpsPerCTA = (\[.*?\])", kernel.asm["ttgir"]))),
        "num_products": kernel.asm["ptx"].count("wgmma.mma_async"),
        "num_waits": kernel.asm["ptx"].count("griddepcontrol.wait"),
        "num_bulk_prefetches": kernel.asm["ptx"].count("cp.async.bulk.prefetch.L2"),
    }


if __name__ == "__main__":
    model, dtype, capability, *wanted = sys.argv[1:]
    found = launches_of(model, getattr(torch, dtype))
    print(
        json.dumps(
            [
                facts(name, launch, int(capability))
                for name, launch in found.items()
                if not wanted or name in wanted
            ]
        )
    )
