"""Under which conditions a number was measured, in words: a number without them says nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specpipe.evaluate.report.artifact import Artifact, Json
from specpipe.evaluate.report.blocks import UNKNOWN


def machine(result: Json) -> str:
    """Returns the GPUs of the machine of a result, or its processor where it has none."""
    described = result["machine"]
    names = [str(gpu.get("name", UNKNOWN)) for gpu in described["gpus"]]
    if not names:
        return f"{described['cpu']}, {described['num_cores']} cores"
    return ", ".join(f"{names.count(n)} × {n}" for n in dict.fromkeys(names))


def place(artifact: Artifact, result: Json) -> str:
    """Returns where the models ran, and in which format: card or CPU, dtype, quantization."""
    device = artifact.engines["target"].get("build_config", {}).get("device")
    where = machine({**result, "machine": {**result["machine"], "gpus": []}})
    return f"{where if device == 'cpu' else machine(result)}; target {numbers(artifact)}"


def numbers(artifact: Artifact) -> str:
    """Returns what the target computes in, and what it is quantized to."""
    engine = artifact.engines["target"]
    return quantized(engine) or compute_dtype(engine)


def compute_dtype(engine: Json) -> str:
    """Returns the dtype of the engine; that of the checkpoint where the engine keeps it."""
    built = engine.get("build_config", {}).get("dtype")
    return str(built or engine.get("pretrained_config", {}).get("dtype", UNKNOWN))


def quantized(engine: Json) -> str:
    """Returns the formats of quantized weights and KV cache; "" where nothing is quantized."""
    quantization = engine.get("pretrained_config", {}).get("quantization") or {}
    algorithm, kv_cache = quantization.get("quant_algo"), quantization.get("kv_cache_quant_algo")
    parts = [str(algorithm)] if algorithm else []
    return ", ".join([*parts, *([f"KV cache {kv_cache}"] if kv_cache else [])])


def prompts(result: Json) -> str:
    """Returns how many prompts of which set were asked, with a digest, since names may repeat."""
    asked = result["prompts"]
    return f"{asked['count']} prompts of {asked['source']} ({str(asked['digest'])[:8]})"


def sampling(settings: Json) -> str:
    """Returns how tokens were chosen."""
    if not settings.get("temperature"):
        return "greedy"
    words = [f"T = {settings['temperature']:g}"]
    if settings.get("top_k"):
        words.append(f"top-k {settings['top_k']}")
    if settings.get("top_p", 1.0) < 1.0:
        words.append(f"top-p {settings['top_p']:g}")
    return " ".join(words)


def listed(values: Iterable[Any]) -> str:
    return ", ".join(str(value) for value in values)


def of_bench(artifact: Artifact, bench: Json) -> str:
    """Returns the conditions of everything that was measured under load."""
    settings = bench["settings"]
    summaries = [summary for load in bench["loads"] for summary in load["sides"].values()]
    lengths = []
    inputs = [s["mean_input_tokens"] for s in summaries if s["mean_input_tokens"] is not None]
    if inputs:
        lengths.append(f"{sum(inputs) / len(inputs):.0f} prompt")
    num_answers = sum(s["num_complete"] for s in summaries)
    if num_answers and all(s["num_output_tokens"] is not None for s in summaries):
        num_tokens = sum(s["num_output_tokens"] for s in summaries)
        lengths.append(f"{num_tokens / num_answers:.0f} output")
    parts = [
        place(artifact, bench),
        f"{listed(settings['concurrencies'])} streams at once",
        f"{' and '.join(lengths)} tokens on average" if lengths else "",
        prompts(bench),
        sampling(settings),
        f"{settings['rounds']} rounds",
    ]
    return "; ".join(part for part in parts if part)


def of_tune(artifact: Artifact, tune: Json) -> str:
    """Returns the conditions of everything that tuning measured in one process."""
    settings = tune["settings"]
    return "; ".join(
        (
            place(artifact, tune),
            f"batches of {listed(settings['concurrencies'])}",
            f"answers of up to {settings['max_tokens']} tokens, costs at {tune['context']} tokens",
            prompts(tune),
            sampling(settings),
            f"{settings['rounds']} rounds",
        )
    )


def of_verification(artifact: Artifact, verification: Json) -> str:
    settings = verification["settings"]
    return "; ".join(
        (
            place(artifact, verification),
            f"by {settings['served_by']}",
            f"batches of 1 and {settings['at_once']}",
            f"answers of up to {settings['max_tokens']} tokens",
            prompts(verification),
        )
    )


def of_quality(quality: Json) -> str:
    return (
        f"runtime torch, {quality['engines']}; {quality['num_prompts']} prompts cut from texts "
        f"held out, greedy, K = {quality['num_draft_tokens']}, 8 at once"
    )
