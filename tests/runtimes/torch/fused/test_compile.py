"""What the kernels become on GPUs that are not here, as the tiles of real models have them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specpipe.runtimes.torch.fused_sizes import CHUNK, PAGE

KERNELS = [
    "embed", "rotary_linear", "attention", "dense", "gated_linear", "mlp_out", "score",
    "score_last", "propose", "copy", "accept", "plan_round", "plan_parallel_round",
    "attention_by_blocks", "attention_of_many", "prompt_norm_rows", "prompt_qkv",
    "prompt_turn_heads", "prompt_attention", "prompt_dense", "prompt_gated", "prompt_mlp_out",
]  # fmt: skip
"""Both projections back to the hidden states are add_linear, with tiles of their own."""

READ_BEFORE_THE_WAIT = {
    "rotary_linear": {"positions_ptr", "slots_ptr", "pages_ptr", "rotations_ptr"},
    "attention": {"positions_ptr", "slots_ptr", "pages_ptr", "keys_ptr", "values_ptr"},
    "attention_by_blocks": {"positions_ptr", "slots_ptr", "pages_ptr"},
    "attention_of_many": {"blocks_ptr"},
    "dense": {"hidden_ptr", "gain_ptr"},
    "mlp_out": {"hidden_ptr", "gain_ptr"},
}
"""Weights, and what was written two kernels ago or earlier; attention masks the newest keys."""

STREAMED = {
    "rotary_linear": {"weight_ptr", "scaled_ptr"},
    "dense": {"weight_ptr", "x_ptr"},
    "gated_linear": {"weight_ptr", "scaled_ptr"},
    "mlp_out": {"weight_ptr", "x_ptr"},
    "score": {"weight_ptr", "scaled_ptr"},
    "score_last": {"weight_ptr", "scaled_ptr"},
    "attention_by_blocks": {"keys_ptr", "values_ptr"},
    "prompt_qkv": {"weight_ptr", "x_ptr"},
    "prompt_attention": {"keys_ptr", "values_ptr"},
    "prompt_dense": {"weight_ptr", "x_ptr"},
    "prompt_gated": {"weight_ptr", "x_ptr"},
    "prompt_mlp_out": {"weight_ptr", "x_ptr"},
}
"""What moves to shared memory while earlier blocks are multiplied; what is held, all at once."""

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""That one program can have: CUDA C++ Programming Guide, compute capabilities."""


def facts(
    cache: Path, model: str, capability: int, *kernels: str, dtype: str = "bfloat16"
) -> dict[str, dict[str, Any]]:
    """Compiles kernels in another process, as this one may interpret them."""
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    } | {"TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "tests.runtimes.torch.fused.compile_kernels"]
    done = subprocess.run(
        [*command, model, dtype, str(capability), *kernels],
        env=environment,
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return {kernel["name"]: kernel for kernel in json.loads(done.stdout)}


def check(found: dict[str, dict[str, Any]], capability: int) -> None:
    for name, kernel in found.items():
        assert kernel["shared_bytes"] <= SHARED_BYTES[capability], name
        accesses = {(argument, kind, size) for argument, kind, size in kernel["accesses"]}
        for argument in STREAMED.get(name, ()):
            used = {(kind, size) for a, kind, size in accesses if a == argument}
            assert used == {("load" if kernel["is_held"] else "copy", 16)}, (name, argument, used)
        if name in ("attention", "attention_of_many"):
            for argument in ("keys_ptr", "values_ptr"):
                used = {(kind, size) for a, kind, size in accesses if a == argument}
                # Triton copies those of many for some models, and loads them for others.
                kind = "load" if name == "attention" else next(kind for kind, _ in used)
                assert used == {(kind, 16)}, (argument, used)
        if capability == 90 and name in STREAMED and name.startswith("prompt_"):
            assert kernel["num_products"] > 0, name  # of Hopper's own kind
        if capability < 90:
            assert kernel["num_waits"] == kernel["num_bulk_prefetches"] == 0, name
            continue
        # Of a block the first keys and values, page by page.
        num_prefetches = 2 * CHUNK // PAGE if name == "attention_by_blocks" else 0
        assert kernel["num_bulk_prefetches"] == num_prefetches, name
        assert kernel["num_waits"] >= 1, name
        early = {(argument, kind) for argument, kind, _ in kernel["early"]}
        held = {"weight_ptr"} if kernel["is_held"] else set()
        wanted = READ_BEFORE_THE_WAIT.get(name, set()) | held
        assert early == {(argument, "load") for argument in wanted}, name


def test_memory_is_read_wide_and_nothing_too_early(tmp_path: Path) -> None:
    kernels = (
        "rotary_linear", "attention", "dense", "score_last", "attention_by_blocks",
        "attention_of_many",
    )  # fmt: skip
    found = facts(tmp_path, "7b", 90, *kernels)
    assert list(found) == list(kernels)
    check(found, 90)


@pytest.mark.parametrize(
    "model", ["small_heads", *(pytest.param(m, marks=pytest.mark.slow) for m in ("7b", "0.5b"))]
)
def test_weights_of_few_queries_and_of_many_are_added_alike(model: str, tmp_path: Path) -> None:
    """All rows of the first are of one sequence, each row of the other is of another."""
    found = facts(tmp_path, model, 90, "attention", "attention_of_many")
    (warps,) = found["attention"]["warps"]
    assert found["attention_of_many"]["warps"] == [warps]


def test_a_small_matrix_is_read_before_the_wait(tmp_path: Path) -> None:
    found = facts(tmp_path, "0.5b", 90, "dense")
    assert found["dense"]["is_held"]
    check(found, 90)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["7b", "0.5b"])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_compiles(model: str, capability: int, tmp_path: Path) -> None:
    found = facts(tmp_path, model, capability)
    assert list(found) == KERNELS
    check(found, capability)
