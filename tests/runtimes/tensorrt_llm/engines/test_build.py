from __future__ import annotations

import csv
import json
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specpipe.build import cache
from specpipe.errors import EngineBuildError, RuntimeUnavailable
from specpipe.machine.signals import raised
from specpipe.roles import Role
from specpipe.runtimes.tensorrt_llm import TensorRTLLMRuntime
from specpipe.runtimes.tensorrt_llm.engines.engine_config import check_engines, read_engine
from tests.fake_nvml import be
from tests.runtimes.tensorrt_llm.engines.tools import (
    Tools,
    build_stage,
    install,
    make,
    stages,
    toy_pair,
)
from tests.waiting import wait_until

ROLES: tuple[Role, Role] = ("draft", "target")
IMAGE = "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch)


@pytest.fixture
def native(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    return install(tmp_path, monkeypatch, "trtllm-build", "docker")


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    return install(tmp_path, monkeypatch, "docker", FAKE_IMAGE=IMAGE)


@pytest.fixture(params=["native", "docker"])
def tools(request: pytest.FixtureRequest) -> Tools:
    found: Tools = request.getfixturevalue(request.param)
    return found


def failure(folder: Path, role: Role = "target", **pair: Any) -> str:
    """What building one engine of a toy pair is refused with; nothing may be left behind."""
    stage = build_stage(toy_pair(folder, **pair), role)
    with pytest.raises(EngineBuildError) as caught:
        cache.build(stage, folder / "engine")
    assert not (folder / "engine").exists()
    assert not (folder / ".engine.staging").exists()
    return str(caught.value)


def test_a_pair_of_engines(tmp_path: Path, tools: Tools) -> None:
    pair = toy_pair(tmp_path, tensorrt_llm={"compute_capability": "9.0"}, num_draft_tokens=5)
    engines = {role: make(pair, role) for role in ROLES}
    for role, folder in engines.items():
        assert sorted(path.name for path in folder.iterdir()) == [
            "config.json",
            "model.cache",
            "rank0.engine",
            "specpipe.json",
        ]
        built = read_engine(folder)
        assert built.speculative_decoding_mode == (
            "draft_tokens_external" if role == "target" else "none"
        )
        assert built.max_seq_len == (261 if role == "target" else 256)
        assert built.max_draft_len == (5 if role == "target" else 0)
        assert built.logits_dtype == "float32"
        assert json.loads((folder / "specpipe.json").read_text()) == {
            "tensorrt_llm": "1.2.1",
            "tensorrt": "10.14.1.48",
            "cuda": "13.1.0.036",
            "compute_capability": "9.0",
            "world_size": 1,
            "max_batch_size": 8,
        }
    check_engines(engines["draft"], engines["target"], num_draft_tokens=5, acceptance="exact")


SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
"""What weight-only formats can be built of: multiples of 64."""


@pytest.mark.parametrize(
    ("scheme", "algo"),
    [({"format": "fp8_pc_pt"}, "FP8_PER_CHANNEL_PER_TOKEN"), ({"format": "int8_wo"}, "W8A16")],
)
def test_an_engine_of_quantized_weights(
    tmp_path: Path, tools: Tools, scheme: dict[str, str], algo: str
) -> None:
    pair = toy_pair(tmp_path, sizes=SIZES, target={"quantization": scheme})
    planned_stages = (*stages(pair, "draft"), *stages(pair, "target"))
    assert [planned.name for planned in planned_stages] == [
        "draft/convert",
        "draft/build_engine",
        "target/quantize",
        "target/build_engine",
    ]
    built = read_engine(make(pair, "target"))
    assert (built.quant_algo, built.kv_cache_quant_algo) == (algo, None)
    assert (built.logits_dtype, built.vocab_size) == ("float32", 256)
    assert built.use_paged_context_fmha


def test_weights_that_the_builder_does_not_find(tmp_path: Path, native: Tools) -> None:
    """The stand-in looks for scales as TensorRT-LLM's network does."""
    pair = toy_pair(tmp_path, sizes=SIZES, target={"quantization": {"format": "fp8_pc_pt"}})
    stage = build_stage(pair, "target")
    path = stage.checkpoint / "config.json"
    config = json.loads(path.read_text())
    config["quantization"] |= {"quant_algo": "FP8"}
    path.write_text(json.dumps(config))
    with pytest.raises(EngineBuildError, match="the checkpoint lacks tensors that this TensorRT"):
        cache.build(stage, tmp_path / "engine")


def test_two_ranks_of_target_and_one_of_draft(tmp_path: Path, docker: Tools) -> None:
    pair = toy_pair(
        tmp_path,
        target={"tp_size": 2},
        tensorrt_llm={"draft_gpu_ids": [2], "target_gpu_ids": [3, 1], "acceptance": "logits"},
    )
    target = make(pair, "target")
    assert read_engine(target).world_size == 2
    assert (target / "rank1.engine").is_file()
    assert json.loads((target / "specpipe.json").read_text())["world_size"] == 2
    assert read_engine(make(pair, "draft")).gather_generation_logits
    gpus = [call[call.index("--gpus") + 1] for call in docker.docker_calls()]
    assert gpus == ['"device=3,1"'] * 2 + ['"device=2"'] * 2


def test_container_gets_its_inputs_read_only_and_runs_as_the_caller(
    tmp_path: Path, docker: Tools
) -> None:
    folder = tmp_path / 'a, "b" c'
    folder.mkdir()
    pair = toy_pair(folder)
    engine = make(pair, "draft")
    asked, built = docker.docker_calls()
    assert asked[:2] == built[:2] == ["run", "--rm"]
    assert built[built.index("--user") + 1] == f"{os.getuid()}:{os.getgid()}"
    name = built[built.index("--name") + 1]
    assert name.startswith("specpipe-draft-build_engine-")
    mounts = [next(csv.reader([built[n + 1]])) for n, word in enumerate(built) if word == "--mount"]
    assert mounts == [
        [
            "type=bind",
            f"source={engine.with_name('checkpoint')}",
            "target=/specpipe/checkpoint",
            "readonly",
        ],
        ["type=bind", f"source={engine}", "target=/specpipe/engine"],
    ]
    program = built[built.index(IMAGE) + 1 :]
    assert program[:5] == [
        "trtllm-build",
        "--checkpoint_dir",
        "/specpipe/checkpoint",
        "--output_dir",
        "/specpipe/engine",
    ]
    assert program[program.index("--output_timing_cache") + 1] == "/specpipe/engine/model.cache"


def test_commands_of_a_dry_run_are_those_of_the_run(tmp_path: Path, docker: Tools) -> None:
    pair = toy_pair(tmp_path)
    _, planned = stages(pair, "target")
    assert planned.commands is not None
    (line,) = planned.commands(planned.artifact)
    make(pair, "target")
    ran = ["docker", *docker.docker_calls()[-1]]
    at = line.index("--name") + 1
    assert line[at] == "specpipe-target-build_engine"
    assert ran[at].startswith(f"{line[at]}-")
    assert [*line[:at], *line[at + 1 :]] == [*ran[:at], *ran[at + 1 :]]


def test_commands_name_the_gpus_where_the_builder_is_at_hand(tmp_path: Path, native: Tools) -> None:
    pair = toy_pair(tmp_path, tensorrt_llm={"target_gpu_ids": [3]})
    _, planned = stages(pair, "target")
    assert planned.commands is not None
    (line,) = planned.commands(planned.artifact)
    assert line[:6] == [
        "env",
        "CUDA_DEVICE_ORDER=PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES=3",
        "trtllm-build",
        "--checkpoint_dir",
        str(tmp_path / "engines/target/checkpoint"),
    ]


def test_commands_of_a_machine_without_either_are_those_of_docker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    pair = toy_pair(tmp_path)
    _, planned = stages(pair, "target")
    assert planned.commands is not None
    assert planned.commands(planned.artifact)[0][:2] == ["docker", "run"]
    assert planned.require is not None
    with pytest.raises(RuntimeUnavailable) as caught:
        planned.require()
    assert str(caught.value) == (
        "runtime 'tensorrt_llm' needs trtllm-build or docker, and neither is on the PATH: run"
        " specpipe inside NVIDIA's image, or install docker with NVIDIA's container toolkit"
    )
    with pytest.raises(RuntimeUnavailable):
        TensorRTLLMRuntime().require()


def test_image_of_the_config_wins_and_its_versions_are_not_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = "registry.example/mine@sha256:" + "0" * 64
    install(tmp_path, monkeypatch, "docker", FAKE_IMAGE=image)
    engine = make(toy_pair(tmp_path, tensorrt_llm={"image": image}), "draft")
    facts = json.loads((engine / "specpipe.json").read_text())
    assert (facts["tensorrt_llm"], facts["tensorrt"], facts["cuda"]) == ("1.2.1", None, None)
    assert facts["compute_capability"] is None


def pretend_installed(folder: Path, monkeypatch: pytest.MonkeyPatch, **distributions: str) -> None:
    for name, version in distributions.items():
        info = folder / "site" / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.setenv("PYTHONPATH", str(folder / "site"))


def test_versions_are_those_of_the_builders_python(
    tmp_path: Path, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_installed(tmp_path, monkeypatch, tensorrt_llm="1.2.1", tensorrt="10.14.1.49")
    monkeypatch.setenv("CUDA_VERSION", "13.1.1")
    facts = json.loads((make(toy_pair(tmp_path), "draft") / "specpipe.json").read_text())
    assert (facts["tensorrt"], facts["cuda"]) == ("10.14.1.49", "13.1.1")


def test_another_release_is_noticed_before_hours_of_work(
    tmp_path: Path, docker: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_installed(tmp_path, monkeypatch, tensorrt_llm="1.1.0")
    assert failure(tmp_path) == (
        f"target: trtllm-build in {IMAGE} is of TensorRT-LLM 1.1.0, but"
        " engine.tensorrt_llm.version is 1.2.1: set that to 1.1.0, or engine.tensorrt_llm.image to"
        " an image that has it"
    )
    assert len(docker.docker_calls()) == 1


def test_another_release_without_metadata_is_noticed_afterwards(
    tmp_path: Path, native: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VERSION", "1.1.0")
    assert failure(tmp_path) == (
        "target: trtllm-build ended well, but its engine cannot be used:\n"
        "  - it was built by TensorRT-LLM 1.1.0, not 1.2.1: change engine.tensorrt_llm.version or"
        " engine.tensorrt_llm.image"
    )


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("gpu_memory", "the GPU ran out of memory: free it, or lower engine.max_num_tokens"),
        ("host_memory", "the kernel killed it, which is how want of host memory looks"),
        ("kv_type", "the KV cache's type does not go with paged context FMHA"),
        ("format", "this GPU has no kernels for the format or for a flag"),
        ("no_kernel", "this GPU has no kernels for the format or for a flag"),
        ("driver", "the NVIDIA driver of this machine is too old"),
        ("no_gpu", "the builder sees no such GPU: check engine.tensorrt_llm.target_gpu_ids"),
        ("disk", "the disk is full"),
        ("architecture", "this TensorRT-LLM does not know the architecture Qwen9ForCausalLM"),
        ("tensors", "the checkpoint lacks tensors"),
        ("config", "this TensorRT-LLM reads the checkpoint's config.json otherwise (x_y)"),
        ("other", "it ended with exit code 3\n"),
    ],
)
def test_failures_end_in_their_cause_and_the_last_lines(
    tmp_path: Path, native: Tools, monkeypatch: pytest.MonkeyPatch, name: str, cause: str
) -> None:
    monkeypatch.setenv("FAKE_FAIL", name)
    message = failure(tmp_path)
    assert message.startswith(f"target: trtllm-build failed: {cause}")
    assert "\n  [TensorRT-LLM] TensorRT-LLM version: 1.2.1\n" in message


def test_failures_inside_a_container_are_told_the_same(
    tmp_path: Path, docker: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAIL", "host_memory")
    assert failure(tmp_path).startswith("target: trtllm-build failed: the kernel killed it")


@pytest.mark.parametrize(
    ("environment", "cause"),
    [
        ({"FAKE_DOCKER": "down"}, "docker does not answer: start it, or give the calling user"),
        ({"FAKE_DOCKER": "no_gpus"}, "docker cannot hand GPUs to containers: install NVIDIA's"),
        ({"FAKE_IMAGE": "another"}, "the image cannot be had: check engine.tensorrt_llm.image"),
    ],
)
def test_docker_that_cannot_is_told_apart(
    tmp_path: Path,
    docker: Tools,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    cause: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    message = failure(tmp_path)
    assert message.startswith(f"target: TensorRT-LLM cannot be asked its version: {cause}")


def test_extra_arguments_that_the_builder_does_not_know(tmp_path: Path, native: Tools) -> None:
    message = failure(tmp_path, tensorrt_llm={"extra_build_args": ["--no_such_flag", "3"]})
    assert message.startswith(
        "target: trtllm-build failed: this TensorRT-LLM has another command line (unrecognized"
        " arguments: --no_such_flag 3): check engine.tensorrt_llm.version against the image, and"
        " engine.tensorrt_llm.extra_build_args\n"
    )


def test_extra_arguments_that_make_an_engine_without_verification(
    tmp_path: Path, native: Tools
) -> None:
    message = failure(
        tmp_path, tensorrt_llm={"extra_build_args": ["--use_paged_context_fmha", "disable"]}
    )
    assert message == (
        "target: trtllm-build ended well, but its engine cannot be used:\n"
        "  - use_paged_context_fmha is off, which drafting needs: remove what switches it off from"
        " engine.tensorrt_llm.extra_build_args"
    )


def test_what_the_builder_switched_off_on_its_own_never_lands(
    tmp_path: Path, native: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "FAKE_EDIT", "config['build_config']['plugin_config']['use_paged_context_fmha'] = False"
    )
    assert "use_paged_context_fmha is off" in failure(tmp_path, "draft")


def test_missing_rank_never_lands(
    tmp_path: Path, native: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_EDIT", "(out / 'rank1.engine').unlink()")
    assert failure(tmp_path, target={"tp_size": 2}).endswith(
        "  - rank0.engine to rank1.engine should be there, but the first 1 of 2 are: build it again"
    )


def test_damaged_checkpoint_is_refused_before_the_builder_runs(
    tmp_path: Path, docker: Tools
) -> None:
    stage = build_stage(toy_pair(tmp_path), "target")
    path = stage.checkpoint / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "hidden_act": "relu"}))
    with pytest.raises(EngineBuildError, match="hidden_act: Input should be 'silu'"):
        stage.run(tmp_path)
    assert not (docker.state / "calls.jsonl").exists()


def test_every_line_of_the_builder_is_logged_as_it_comes(
    tmp_path: Path, native: Tools, caplog: pytest.LogCaptureFixture
) -> None:
    stage = build_stage(toy_pair(tmp_path), "target")
    with caplog.at_level(logging.INFO, "specpipe"):
        cache.build(stage, tmp_path / "engine")
    assert caplog.messages[-2:] == [
        "target/build_engine: [TensorRT-LLM] TensorRT-LLM version: 1.2.1",
        "target/build_engine: [TRT-LLM] [I] Total time of building all engines: 00:00:00",
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_builder_too(
    tmp_path: Path, tools: Tools, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setenv("FAKE_SLEEP", "600")
    stage = build_stage(toy_pair(tmp_path), "target")
    before = signal.getsignal(signal.SIGTERM)
    pid_file = tools.state / "builder.pid"

    def interrupt() -> None:
        assert wait_until(lambda: pid_file.is_file() and bool(pid_file.read_text()))
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises((KeyboardInterrupt, SystemExit)) as caught, raised():
        cache.build(stage, tmp_path / "engine")
    thread.join()
    if number == signal.SIGTERM:
        assert caught.value.args == (143,)
    assert signal.getsignal(signal.SIGTERM) is before
    assert wait_until(lambda: not is_running(int(pid_file.read_text())))
    assert not (tmp_path / "engine").exists()
    assert not (tmp_path / ".engine.staging").exists()


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_built_once_and_again_only_for_a_reason(
    tmp_path: Path, native: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = toy_pair(tmp_path)
    stage = build_stage(pair, "target")
    assert cache.build(stage, tmp_path / "engine").reasons == ("not built yet",)
    assert cache.stale_reasons(stage, tmp_path / "engine") == []
    reasons = {}
    for name, changes in changed(tmp_path):
        _, planned = stages(toy_pair(tmp_path, **changes), "target")
        reasons[name] = cache.stale_reasons(planned.stage, tmp_path / "engine")
    assert reasons == {
        "batch": [
            "flags.max_batch_size was 8, is now 4",
            "flags.opt_num_tokens was 40, is now 20",
        ],
        "image": [f"image was {IMAGE}, is now mine"],
        "gpu": ["compute_capability was null, is now 9.0"],
        "plugin": ["flags.gemm_plugin was auto, is now disable"],
        "workers": [],
        "gpu ids": [],
        "triton": [],
    }


def changed(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "batch", {"max_batch_size": 4}
    yield "image", {"tensorrt_llm": {"image": "mine"}}
    yield "gpu", {"tensorrt_llm": {"compute_capability": "9.0"}}
    yield "plugin", {"tensorrt_llm": {"build": {"gemm_plugin": "disable"}}}
    yield "workers", {"tensorrt_llm": {"build": {"workers": 2, "log_level": "error"}}}
    yield "gpu ids", {"tensorrt_llm": {"target_gpu_ids": [1]}}
    yield "triton", {"tensorrt_llm": {"kv_cache_free_gpu_mem_fraction": 0.5}}


def test_timing_cache_is_mounted_and_counts_as_an_input(tmp_path: Path, docker: Tools) -> None:
    timings = tmp_path / "old.cache"
    timings.write_bytes(b"x")
    pair = toy_pair(tmp_path, tensorrt_llm={"build": {"input_timing_cache": str(timings)}})
    stage = build_stage(pair, "draft")
    assert stage.inputs().files[-1] == timings
    cache.build(stage, tmp_path / "engine")
    line = docker.docker_calls()[-1]
    assert line[line.index("--input_timing_cache") + 1] == "/specpipe/timing.cache"
