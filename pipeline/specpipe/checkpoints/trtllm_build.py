"""What a unified checkpoint has otherwise where `trtllm-build` reads it.

Other runtimes keep what is more exact, or shorter; only TensorRT-LLM's builder needs these.

Sources: TensorRT-LLM, functional.py (rms_norm multiplies by the weight without a cast, and networks
are strongly typed) and models/gemma/convert.py (1 + weight, then rounded); layers/attention.py
(rope has a row for each of `max_position_embeddings`); quantization/quantize.py (modules are left
out by their names) and models/convert_utils.py (weight_only_quantize_dict: tensors by theirs).
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from specpipe.checkpoints.formats import FORMATS
from specpipe.checkpoints.hf_config import stretched_length
from specpipe.checkpoints.quantized_rules import is_linear
from specpipe.checkpoints.unified_config import Gemma2Config, UnifiedConfig
from specpipe.checkpoints.unified_layout import tensor_rules
from specpipe.checkpoints.unified_sections import UNQUANTIZED


def fit_trtllm_build(config: UnifiedConfig) -> UnifiedConfig:
    """Returns the config of the same checkpoint for `trtllm-build`; mostly the same.

    Norms that are 1 + a weight are in the checkpoint's dtype; yarn's context is the stretched one;
    what is left out of weight-only quantization is named by module and by tensor.
    """
    changes: dict[str, Any] = {}
    if isinstance(config, Gemma2Config):
        changes["rounds_norms"] = True
    scaling = config.rotary_scaling
    if scaling is not None and scaling["rope_type"] == "yarn":
        stretched = int(stretched_length(config.max_position_embeddings, scaling))
        if stretched != config.max_position_embeddings:
            changes["max_position_embeddings"] = stretched
    excluded = _excluded(config)
    if excluded != config.quantization.exclude_modules:
        changes["quantization"] = config.quantization.model_copy(
            update={"exclude_modules": excluded}
        )
    return config.model_copy(update=changes) if changes else config


def _excluded(config: UnifiedConfig) -> list[str] | None:
    """Adds to patterns that match a module, but not its weight, others that match the weight."""
    patterns = config.quantization.exclude_modules
    name = config.format
    if patterns is None or name is None or FORMATS[name].weight_dtype is not None:
        return patterns
    weights = []
    for rule, layer in tensor_rules(config.quantized(UNQUANTIZED)):
        module, _, kind = rule.name.format(n=layer).rpartition(".")
        if layer is not None and kind == "weight" and is_linear(module):
            weights.append(f"{module}.weight")
    added = [
        f"{pattern}.weight"
        for pattern in patterns
        if any(
            fnmatchcase(weight.removesuffix(".weight"), pattern)
            and not any(fnmatchcase(weight, other) for other in patterns)
            for weight in weights
        )
    ]
    return [*patterns, *added]
