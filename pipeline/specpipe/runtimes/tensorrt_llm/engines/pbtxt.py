"""The `config.pbtxt` of an engine's model, as Triton's own ModelConfig message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tritonclient.grpc import model_config_pb2 as pb

from specpipe.errors import RepositoryError
from specpipe.roles import Role
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.repository_layout import VERSION
from specpipe.runtimes.tensorrt_llm.engines import contract
from specpipe.runtimes.tensorrt_llm.engines.contract import BackendTensor, Parameter
from specpipe.runtimes.tensorrt_llm.engines.engine_config import BuiltEngine


def engine_model(role: Role, engine: BuiltEngine, options: PairOptions) -> pb.ModelConfig:
    """Returns the config of one engine's model.

    Every parameter of the template is there but those that must be absent, an empty one where the
    backend's default holds.
    """
    logits = contract.logits_type(engine.logits_dtype)
    parameters = options.runtime_settings["parameters"]
    config = pb.ModelConfig(
        name=role,
        backend=contract.BACKEND,
        max_batch_size=options.max_batch_size,
        model_transaction_policy=pb.ModelTransactionPolicy(decoupled=role == contract.TARGET),
        dynamic_batching=pb.ModelDynamicBatching(
            preferred_batch_size=[options.max_batch_size],
            max_queue_delay_microseconds=parameters["max_queue_delay_microseconds"],
            default_queue_policy=pb.ModelQueuePolicy(max_queue_size=parameters["max_queue_size"]),
        ),
        input=[_input(tensor, logits) for tensor in contract.inputs(engine.version)],
        output=[
            pb.ModelOutput(name=tensor.name, data_type=_type(tensor, logits), dims=tensor.dims)
            for tensor in contract.outputs(engine.version)
        ],
        # One instance: a second would load the engine once more.
        instance_group=[pb.ModelInstanceGroup(count=1, kind=pb.ModelInstanceGroup.KIND_CPU)],
    )
    for key, value in _parameters(role, engine, options):
        config.parameters[key].string_value = value
    return config


def _input(tensor: BackendTensor, logits: str) -> pb.ModelInput:
    return pb.ModelInput(
        name=tensor.name,
        data_type=_type(tensor, logits),
        dims=tensor.dims,
        optional=tensor.optional,
        allow_ragged_batch=tensor.is_ragged,
        reshape=pb.ModelTensorReshape() if tensor.is_scalar else None,
    )


def _type(tensor: BackendTensor, logits: str) -> str:
    return f"TYPE_{logits if tensor.dtype == contract.LOGITS else tensor.dtype}"


def _parameters(role: Role, engine: BuiltEngine, options: PairOptions) -> Iterator[tuple[str, str]]:
    settings = options.runtime_settings
    planned = {
        "gpt_model_path": f"{role}/{VERSION}/{contract.ENGINE_DIR}",
        "max_tokens_in_paged_kv_cache": settings[f"{role}_kv_cache_tokens"],
        "max_attention_window_size": _windows(role, engine, settings),
        "kv_cache_free_gpu_mem_fraction": settings["kv_cache_free_gpu_mem_fraction"],
        "gpu_device_ids": settings[f"{role}_gpu_ids"],
        "participant_ids": None,  # the orchestrator spawns its workers
    }
    for parameter in contract.PARAMETERS:
        if parameter.use == "absent":
            continue
        yield parameter.key, _text(_value(parameter, planned, settings["parameters"]))


def _value(parameter: Parameter, planned: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    match parameter.use:
        case "planned":
            return planned[parameter.key]
        case "setting":
            return given[parameter.key]
        case _:
            return parameter.value  # "unset": empty


def _text(value: Any) -> str:
    """Writes a value as the backend parses it; nothing where its default holds."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value)


def _windows(role: Role, engine: BuiltEngine, settings: Mapping[str, Any]) -> list[int] | None:
    """The tokens that each layer attends to, where the checkpoint has sliding windows."""
    windows: list[int | None] | None = settings[f"{role}_attention_windows"]
    if windows is None:
        return None
    shortest = min(window for window in windows if window is not None)
    if engine.max_seq_len > shortest:
        raise RepositoryError(
            f"the {role} engine was built with max_seq_len {engine.max_seq_len}, past its sliding "
            f"window of {shortest} tokens: lower engine.max_seq_len and build it again"
        )
    return [engine.max_seq_len] * len(windows)
