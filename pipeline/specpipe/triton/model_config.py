"""The `config.pbtxt` of every model, as Triton's own ModelConfig messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tritonclient.grpc import model_config_pb2 as pb

from specpipe.runtimes.repository_layout import ENSEMBLE, POSTPROCESSING, PREPROCESSING, SPECULATIVE
from specpipe.triton import serving
from specpipe.triton.serving.tensors import TensorSpec

# Parameters of our models; lint.py reads the same names.
CANCELS = "cancels"  # the model to which a client's cancellation is sent
CALLS_SUFFIX = "_model_name"  # such a parameter is a model that the model calls, as in NVIDIA's
PATH_SUFFIXES = ("_dir", "_file")  # such a parameter is a path, relative to the version's folder
REPOSITORY_PATH_SUFFIX = "_path"  # and such a one relative to the repository
TOKENIZER_DIR, LIMITS_FILE, PAIR_FILE = "tokenizer_dir", "limits_file", "pair_file"
DRAFT_ENGINE_DIR, TARGET_ENGINE_DIR = "draft_engine_dir", "target_engine_dir"

_MAX_BATCH_SIZE = 1
"""Requests are batched by the pair, step by step; each Triton request is one prompt."""


def model_configs(*, num_preprocessing: int = 1) -> tuple[pb.ModelConfig, ...]:
    """Returns the configs of the whole repository, callers first."""
    preprocessing = _python_model(
        PREPROCESSING,
        serving.PREPROCESSING_INPUTS,
        serving.PREPROCESSING_OUTPUTS,
        num_instances=num_preprocessing,
        parameters={TOKENIZER_DIR: "tokenizer", LIMITS_FILE: "limits.json"},
    )
    speculative = _python_model(
        SPECULATIVE,
        serving.SPECULATIVE_INPUTS,
        serving.SPECULATIVE_OUTPUTS,
        is_decoupled=True,
        parameters={
            PAIR_FILE: "pair.json",
            DRAFT_ENGINE_DIR: "draft",
            TARGET_ENGINE_DIR: "target",
            TOKENIZER_DIR: "tokenizer",
            LIMITS_FILE: "limits.json",
        },
    )
    # Not decoupled, one response a chunk: an ensemble may have one decoupled step alone.
    postprocessing = _python_model(
        POSTPROCESSING,
        serving.POSTPROCESSING_INPUTS,
        serving.POSTPROCESSING_OUTPUTS,
        parameters={CANCELS: SPECULATIVE},
    )
    models = (preprocessing, speculative, postprocessing)
    return (_ensemble(*models), *models)


def _ensemble(*models: pb.ModelConfig) -> pb.ModelConfig:
    """Chains the models: a step reads what earlier ones wrote, or an input, of the same name.

    What only lives between the models has a leading underscore in the ensemble, as in NVIDIA's.
    """
    inputs = {tensor.name for tensor in serving.ENSEMBLE_INPUTS}
    outputs = {tensor.name for tensor in serving.ENSEMBLE_OUTPUTS}
    config = pb.ModelConfig(
        name=ENSEMBLE,
        platform="ensemble",
        max_batch_size=_MAX_BATCH_SIZE,
        input=_inputs(serving.ENSEMBLE_INPUTS),
        output=_outputs(serving.ENSEMBLE_OUTPUTS),
        model_transaction_policy=pb.ModelTransactionPolicy(decoupled=True),
    )
    available = set(inputs)
    wanted_names = outputs | {tensor.name for model in models for tensor in model.input}
    for model in models:
        step = config.ensemble_scheduling.step.add(model_name=model.name, model_version=-1)
        for tensor in model.input:
            if tensor.name in available:
                step.input_map[tensor.name] = _ensemble_name(tensor.name, inputs | outputs)
        for tensor in model.output:
            if tensor.name in wanted_names:
                step.output_map[tensor.name] = _ensemble_name(tensor.name, inputs | outputs)
                available.add(tensor.name)
    return config


def _ensemble_name(name: str, face: set[str]) -> str:
    return name if name in face else f"_{name}"


def _python_model(
    name: str,
    inputs: Iterable[TensorSpec],
    outputs: Iterable[TensorSpec],
    *,
    is_decoupled: bool = False,
    num_instances: int = 1,
    parameters: Mapping[str, str],
) -> pb.ModelConfig:
    config = pb.ModelConfig(
        name=name,
        backend="python",
        max_batch_size=_MAX_BATCH_SIZE,
        input=_inputs(inputs),
        output=_outputs(outputs),
        # One instance of the others: two of `speculative` would load the engines twice, two of
        # `postprocessing` would send chunks out of order.
        instance_group=[
            pb.ModelInstanceGroup(count=num_instances, kind=pb.ModelInstanceGroup.KIND_CPU)
        ],
        model_transaction_policy=pb.ModelTransactionPolicy(decoupled=is_decoupled),
    )
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    return config


def _inputs(tensors: Iterable[TensorSpec]) -> list[pb.ModelInput]:
    """Returns declarations of optional inputs.

    Triton answers a missing required input of an ensemble with an empty success, so what a request
    must have is checked by preprocessing.
    """
    return [
        pb.ModelInput(
            name=tensor.name, data_type=f"TYPE_{tensor.dtype}", dims=tensor.dims, optional=True
        )
        for tensor in tensors
    ]


def _outputs(tensors: Iterable[TensorSpec]) -> list[pb.ModelOutput]:
    return [
        pb.ModelOutput(name=tensor.name, data_type=f"TYPE_{tensor.dtype}", dims=tensor.dims)
        for tensor in tensors
    ]
