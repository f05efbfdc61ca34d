"""Whether a pair fits, what else would, and what runtimes say that an engine takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from specpipe.build.memory_plan import Change, MemoryPlan, lines, plan_memory
from specpipe.checkpoints.family_config import unified_config
from specpipe.config.engine import EngineConfig
from specpipe.config.sections import CheckpointConfig, PipelineConfig
from specpipe.errors import EngineBuildError
from specpipe.machine.artifacts import SideArtifacts
from specpipe.machine.gpus import Gpu, find_gpu
from specpipe.machine.memory import MemoryEstimate
from specpipe.quantization.quantized_config import quantized_config
from specpipe.roles import Role
from specpipe.runtimes.plan import PairPlan, Side
from specpipe.runtimes.runtime import load_runtime
from tests.toy import toy_config

GB = 10**9


@dataclass
class Linear:
    """A runtime whose engines take what their config says: `gigabytes` by role and format.

    A thousand tokens of all requests take a GB; the target's second rank is on GPU 1.
    """

    gigabytes: Mapping[str, float]
    name: str = "linear"

    def memory_by_gpu(
        self, pair: PairPlan, side: Side, sm: int | None
    ) -> Mapping[int, MemoryEstimate]:
        if pair.engine.device == "cpu":
            return {}
        if pair.engine.max_batch_size > 3000:
            raise EngineBuildError("too large a batch")
        scheme = side.checkpoint.quantization
        stored = "plain" if scheme is None else scheme.format
        halved = 2 if scheme is not None and scheme.kv_cache else 1
        tokens = pair.engine.max_batch_size * pair.max_seq_len_of(side)
        estimate = MemoryEstimate(
            weights_bytes=int(self.gigabytes.get(f"{side.role} {stored}", 100) * GB),
            kv_cache_bytes=tokens * GB // 1000 // halved,
            workspace_bytes=0,
        )
        return {0: estimate, 1: estimate} if side.role == "target" else {0: estimate}


def side(
    folder: Path,
    role: Role,
    quantization: dict[str, Any] | None = None,
    context: int = 4000,
    **toy: Any,
) -> Side:
    (folder / role).mkdir(exist_ok=True)
    config = toy_config(**toy)
    (folder / role / "config.json").write_text(json.dumps(config))
    checkpoint = CheckpointConfig.model_validate({"checkpoint": role, "quantization": quantization})
    unified = unified_config({**config, "dtype": "float32"})
    if checkpoint.quantization is not None:
        unified = quantized_config(unified, checkpoint.quantization)
    return Side(
        role=role,
        checkpoint=checkpoint,
        folder=folder / role,
        unified=unified,
        context_length=context,
        base_dir=folder,
        artifacts=SideArtifacts(folder),
    )


def pair(
    folder: Path,
    *,
    max_seq_len: int = 1000,
    draft: dict[str, Any] | None = None,
    target: dict[str, Any] | None = None,
    **engine: Any,
) -> tuple[PipelineConfig, PairPlan]:
    section = TypeAdapter(EngineConfig).validate_python({"max_batch_size": 2, **engine})
    sides = side(folder, "draft", draft), side(folder, "target", target)
    config = PipelineConfig(
        name="x", draft=sides[0].checkpoint, target=sides[1].checkpoint, engine=section
    )
    planned = PairPlan(
        draft=sides[0],
        target=sides[1],
        engine=section,
        max_seq_len=max_seq_len,
        num_draft_tokens=4,
    )
    return config, planned


def planned(folder: Path, gigabytes: Mapping[str, float], gpu: Gpu, **settings: Any) -> MemoryPlan:
    config, plan = pair(folder, **settings)
    found = plan_memory(config, plan, Linear(gigabytes), [gpu])  # type: ignore[arg-type]
    assert found is not None
    return found


H100 = find_gpu("H100")


def test_both_engines_share_a_gpu(tmp_path: Path) -> None:
    found = planned(tmp_path, {"draft plain": 4, "target plain": 60}, H100)
    # Two requests of 1000 tokens: 2 GB for each engine; 95 % of 80 GB are usable.
    assert [(gpu.number, gpu.needed_bytes, gpu.usable_bytes) for gpu in found.gpus] == [
        (0, 68 * GB, 76 * GB),
        (1, 62 * GB, 76 * GB),
    ]
    assert (found.fits, found.changes) == (True, ())
    # 12 GB for the KV caches of both: 6000 tokens.
    assert found.largest == ((6, 1000), (5, 1024), (2, 2048))


def test_what_does_not_fit_says_so_and_what_would(tmp_path: Path) -> None:
    sizes = {"draft plain": 4, "target plain": 90, "target fp8": 45, "target int4_awq": 68}
    found = planned(tmp_path, sizes, H100)
    assert not found.fits
    assert found.largest == ()
    assert found.changes == (
        Change(("target",), "fp8", None),
        Change(("target",), "int4_awq", None),
    )
    assert list(lines(found)) == [
        "2 × 1000 tokens (batch × length):",
        "  GPU 0, H100 (compute capability 9.0): draft 6.0 GB (4.0 GB weights, 2.0 GB KV cache, "
        "0.0 kB workspace); target 92.0 GB (90.0 GB weights, 2.0 GB KV cache, 0.0 kB workspace); "
        "together 98.0 GB of 76.0 GB usable, does not fit",
        "  GPU 1, H100 (compute capability 9.0): target 92.0 GB (90.0 GB weights, 2.0 GB KV cache,"
        " 0.0 kB workspace); together 92.0 GB of 76.0 GB usable, does not fit",
        "largest batch × length that fits: none",
        "would fit: target in fp8 or int4_awq",
    ]


def test_a_format_that_the_gpu_does_not_run_is_none(tmp_path: Path) -> None:
    sizes = {"draft plain": 4, "target plain": 90, "target fp8": 45, "target int4_awq": 45}
    found = planned(tmp_path, sizes, find_gpu("A100 80 GB"))
    assert found.changes == (Change(("target",), "int4_awq", None),)
    found = planned(tmp_path, sizes | {"target nvfp4": 30}, find_gpu("80"))
    assert list(lines(found))[-1] == (
        "would fit: target in fp8 (from 8.9), int4_awq (from 8.0) or nvfp4 (from 10.0)"
    )


def test_the_kv_cache_is_the_second_choice_and_both_models_the_last(tmp_path: Path) -> None:
    sizes = {"draft plain": 4, "target plain": 90, "target fp8": 69}
    found = planned(tmp_path, sizes, H100)
    assert found.changes == (Change(("target",), "fp8", "fp8"),)
    assert list(lines(found))[-1] == "would fit: target in fp8 with kv_cache fp8"
    sizes = {"draft plain": 4, "draft fp8": 2, "target plain": 90, "target fp8": 70.5}
    found = planned(tmp_path, sizes, H100)
    assert found.changes == (Change(("draft", "target"), "fp8", "fp8"),)
    found = planned(tmp_path, {"draft plain": 40, "draft int8_wo": 10, "target plain": 50}, H100)
    assert found.changes == (Change(("draft",), "int8_wo", None),)


def test_nothing_may_help(tmp_path: Path) -> None:
    found = planned(tmp_path, {}, H100)
    assert (found.fits, found.changes) == (False, ())
    assert list(lines(found))[-1] == "no format of the checkpoints would make it fit"


def test_another_format_of_a_quantized_checkpoint(tmp_path: Path) -> None:
    """What is excluded stays so; only format, KV cache and blocks change."""
    sizes = {"draft plain": 4, "target fp8": 90, "target w4a8_awq": 69}
    scheme = {"format": "fp8", "kv_cache": "fp8", "exclude": ["*.mlp.proj"]}
    found = planned(tmp_path, sizes, H100, target=scheme)
    assert found.changes == (Change(("target",), "w4a8_awq", "fp8"),)


def test_the_largest_batch_ends_somewhere(tmp_path: Path) -> None:
    found = planned(tmp_path, {"draft plain": 0, "target plain": 0}, Gpu("huge", 10**15, 90))
    assert found.largest[0] == (3000, 1000)  # the runtime refuses more
    found = planned(tmp_path, {"draft plain": 0, "target plain": 0}, Gpu("mid", 10**13, 90))
    assert found.largest[-1] == (2319, 2048)


def test_gpus_of_this_machine_are_counted_and_the_first_stands_for_others(tmp_path: Path) -> None:
    config, plan = pair(tmp_path)
    runtime: Any = Linear({"draft plain": 4, "target plain": 60})
    small = Gpu("small", 50 * GB, 90)
    found = plan_memory(config, plan, runtime, [H100, small])
    assert found is not None
    assert [(gpu.gpu.name, gpu.fits) for gpu in found.gpus] == [("H100", True), ("small", False)]
    assert [line.split(":")[0] for line in lines(found)][1:3] == [
        "  GPU 0, H100 (compute capability 9.0)",
        "  GPU 1, small (compute capability 9.0)",
    ]


def test_gpus_that_hold_the_same_share_a_line(tmp_path: Path) -> None:
    found = planned(tmp_path, {"draft plain": 4, "target plain": 60}, H100)
    both = replace(found, gpus=(found.gpus[1], replace(found.gpus[1], number=3)))
    assert list(lines(both))[1].startswith("  GPU 1 and 3, H100 (compute capability 9.0): target ")


def test_a_pair_on_a_cpu_has_no_plan(tmp_path: Path) -> None:
    config, plan = pair(tmp_path, device="cpu")
    assert plan_memory(config, plan, Linear({}), [H100]) is None  # type: ignore[arg-type]


def test_as_json(tmp_path: Path) -> None:
    found = planned(tmp_path, {"draft plain": 4, "target plain": 90, "target fp8": 45}, H100)
    values = json.loads(json.dumps(found.to_json()))
    assert values["fits"] is False
    assert values["gpus"][1] == {
        "number": 1,
        "name": "H100",
        "memory_bytes": 80 * GB,
        "sm": 90,
        "usable_bytes": 76 * GB,
        "needed_bytes": 92 * GB,
        "engines": {
            "target": {
                "weights_bytes": 90 * GB,
                "kv_cache_bytes": 2 * GB,
                "workspace_bytes": 0,
            }
        },
    }
    assert values["changes"] == [{"roles": ["target"], "format": "fp8", "kv_cache": None}]


@pytest.mark.parametrize("name", ["torch", "tensorrt", "tensorrt_llm"])
def test_runtimes_keep_the_checkpoint_s_dtype_on_a_gpu(name: str, tmp_path: Path) -> None:
    """A toy in bfloat16: 2 bytes for each of its weights; TensorRT-LLM's head is another matrix."""
    _, plan = pair(tmp_path, runtime=name)
    found = load_runtime(name).memory_by_gpu(plan, plan.target, 90)
    numbers = 2 * 256 * 32 + 2 * (2 * 32 + 64 * 32 + 32 * 32 + 3 * 64 * 32) + 32
    assert {gpu: estimate.weights_bytes for gpu, estimate in found.items()} == {0: 2 * numbers}


def planned_pages(folder: Path, memory: str) -> PairPlan:
    """A draft of one layer, 64 bytes a token in bfloat16, and a target of two; 15 of 1,015
    positions of a request are for rounds.
    """
    _, plan = pair(folder, runtime="torch", kv_cache_memory=memory)
    return replace(plan, draft=side(folder, "draft", num_hidden_layers=1))


def test_kv_caches_share_memory_so_that_they_hold_as_many_tokens(tmp_path: Path) -> None:
    plan, runtime = planned_pages(tmp_path, "1MB"), load_runtime("torch")
    caches = [
        runtime.memory_by_gpu(plan, side, 90)[0].kv_cache_bytes
        for side in (plan.draft, plan.target)
    ]
    num_tokens = 81 * 64  # of 192 bytes each; one page more would be too much
    assert caches == [64 * num_tokens, 128 * num_tokens]
    built = [stages.stages[-1].stage.inputs().settings for stages in runtime.engine_stages(plan)]
    assert [settings["kv_cache_tokens"] for settings in built] == [num_tokens] * 2
    assert list(runtime.plan_notes(plan)) == [
        "engine.kv_cache_memory 1MB holds 5184 tokens of both models: 5 requests of 1000 tokens at "
        "once"
    ]


@pytest.mark.parametrize(
    ("num_draft_tokens", "engine", "is_noted"),
    [
        (15, {"device": "cuda"}, False),
        (16, {"device": "cuda"}, True),
        (16, {"device": "cuda", "kernels": "plain"}, False),
        (16, {"device": "cpu"}, False),
    ],
)
def test_a_plan_says_which_draft_lengths_go_step_by_step(
    num_draft_tokens: int, engine: dict[str, Any], is_noted: bool, tmp_path: Path
) -> None:
    _, plan = pair(tmp_path, runtime="torch", **engine)
    notes = load_runtime("torch").plan_notes(replace(plan, num_draft_tokens=num_draft_tokens))
    noted = (
        "speculation.num_draft_tokens is 16, and a round of the fused kernels drafts up to 15: "
        "requests that name more, or nothing where speculation.adaptive is false, go step by step, "
        "which takes longer"
    )
    assert list(notes) == [noted] * is_noted


def test_a_kv_cache_holds_one_request_at_least(tmp_path: Path) -> None:
    plan = planned_pages(tmp_path, "0.196MB")
    with pytest.raises(EngineBuildError) as refused:
        load_runtime("torch").engine_stages(plan)
    assert str(refused.value) == (
        "engine.kv_cache_memory is 0.196MB, which holds 960 tokens of both models, but one request "
        "of engine.max_seq_len 1000 needs 1024, 196.6 kB: raise it, or lower engine.max_seq_len"
    )


@pytest.mark.parametrize("name", ["torch", "tensorrt_llm"])
def test_runtimes_count_a_quantized_checkpoint_as_it_is_held(name: str, tmp_path: Path) -> None:
    scheme = {"format": "fp8", "kv_cache": "fp8"}
    _, plain = pair(tmp_path, runtime=name)
    _, quantized = pair(tmp_path, runtime=name, target=scheme)
    runtime = load_runtime(name)
    before = runtime.memory_by_gpu(plain, plain.target, 90)[0]
    after = runtime.memory_by_gpu(quantized, quantized.target, 90)[0]
    linears = 2 * (64 * 32 + 32 * 32 + 3 * 64 * 32)
    assert before.weights_bytes - after.weights_bytes == pytest.approx(linears, abs=100)
    if name == "tensorrt_llm":  # the torch runtime only rounds what it caches
        assert after.kv_cache_bytes == before.kv_cache_bytes // 2


def test_ranks_of_tensorrt_llm_stand_on_their_gpus(tmp_path: Path) -> None:
    _, plan = pair(tmp_path, runtime="tensorrt_llm")
    gpus = {"runtime": "tensorrt_llm", "tensorrt_llm": {"target_gpu_ids": [1, 2, 3, 5]}}
    target = side(tmp_path, "target", num_hidden_layers=3)
    split = target.checkpoint.model_copy(update={"tp_size": 2, "pp_size": 2})
    target = replace(target, checkpoint=split)
    plan = replace(plan, target=target, engine=TypeAdapter(EngineConfig).validate_python(gpus))
    found = load_runtime("tensorrt_llm").memory_by_gpu(plan, target, None)
    assert sorted(found) == [1, 2, 3, 5]
    assert found[1] == found[2]  # two layers
    assert found[3] == found[5]  # one layer
    assert found[1].kv_cache_bytes == 2 * found[3].kv_cache_bytes
