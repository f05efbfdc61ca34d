"""Holds what `model.yaml` and requests say against the installed `tensorrt_llm`, in its own words.

TensorRT-LLM is imported in another process, since that takes a while, opens the GPUs and may end
the process. Its classes are given what specpipe writes, and refuse what they do not know; `LLM`
would load the model, so that its arguments are only looked up in its signature and in the fields of
the class that keeps them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from specpipe.runtimes.tensorrt_llm.differences import Difference, refused
from specpipe.runtimes.tensorrt_llm.llmapi.model_yaml import (
    DECODING_TYPE,
    KV_CACHE_CONFIG,
    SPECULATIVE_CONFIG,
    drafting_class,
)

SAMPLING: Mapping[str, Any] = {
    "max_tokens": 8,
    "end_id": 0,
    "pad_id": 0,
    "ignore_eos": False,
    "stop_token_ids": None,
    "detokenize": False,
    "return_perf_metrics": True,
    "logprobs": 1,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.9,
}
"""What LlmPair may put into the `SamplingParams` of a request."""

_MARK = "specpipe-refused "
_PROBE = f"""\
import inspect, json, sys
written = json.load(sys.stdin)
import tensorrt_llm
from tensorrt_llm import llmapi
refused = []
for name, arguments in written["classes"].items():
    where = tensorrt_llm if hasattr(tensorrt_llm, name) else llmapi
    try:
        getattr(where, name)(**arguments)
    except Exception as exc:
        refused.append([name, " ".join(f"{{type(exc).__name__}}: {{exc}}".split())])
known = set(inspect.signature(tensorrt_llm.LLM.__init__).parameters)
try:
    from tensorrt_llm.llmapi.llm_args import TorchLlmArgs
    for name, field in TorchLlmArgs.model_fields.items():
        known |= {{name, field.alias}}
except ImportError as exc:
    refused.append(["LLM", f"its arguments are unknown: {{exc}}"])
else:
    missing = [name for name in written["LLM"] if name not in known]
    refused += [["LLM", f"it has no argument {{name}}"] for name in missing]
print({_MARK!r} + json.dumps(refused))
"""

_TIMEOUT_S = 300  # importing TensorRT-LLM takes a minute on a cold disk
_MAX_SHOWN = 300  # characters of what a class says


def llm_api_differences(arguments: Mapping[str, Any]) -> Iterator[Difference]:
    """Yields what the installed LLM API refuses of what specpipe writes.

    arguments  of `LLM`, as `model.yaml` has them
    """
    classes = {"SamplingParams": SAMPLING}
    if drafting := arguments.get(SPECULATIVE_CONFIG):
        fields = {k: v for k, v in drafting.items() if k != DECODING_TYPE}
        classes[drafting_class(drafting)] = fields
    if KV_CACHE_CONFIG in arguments:
        classes["KvCacheConfig"] = arguments[KV_CACHE_CONFIG]
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _PROBE],
            input=json.dumps({"classes": classes, "LLM": list(arguments)}),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        yield refused(f"it was not imported within {_TIMEOUT_S} s: try again, with a GPU free")
        return
    told = [line for line in asked.stdout.splitlines() if line.startswith(_MARK)]
    if not told:
        last = (asked.stderr.strip() or "it says nothing").splitlines()[-1][:_MAX_SHOWN]
        yield refused(
            f"it cannot be imported: {last}: start the container with `--gpus all`, or take "
            "NVIDIA's image as it is"
        )
        return
    for name, reason in json.loads(told[-1].removeprefix(_MARK)):
        yield refused(
            f"{name}: {reason[:_MAX_SHOWN]}: backend pytorch needs the image of a release that is "
            "known"
        )
