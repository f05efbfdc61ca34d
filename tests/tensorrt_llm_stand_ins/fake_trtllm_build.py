"""A stand-in for `trtllm-build`: its command line, read strictly, and what it writes.

Written from TensorRT-LLM's sources (commands/build.py@65f1d153, plugin/plugin.py@c20322ff,
builder.py@008b2b8d) without a look at specpipe's own table of flags, so that each checks the other.
The engine is some bytes; config.json is as the builder would write it, with all that it switches
off or raises by itself. The environment says on what machine it runs:

FAKE_VERSION  its release, 1.2.1
FAKE_SM       the GPU's compute capability times 10, 90
FAKE_FAIL     a failure to act out, by name
FAKE_SLEEP    seconds to sleep in the middle; the process is then named in FAKE_STATE/builder.pid
FAKE_EDIT     Python that changes `config` before it is written
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ON_OFF = ["enable", "disable"]
DTYPES = ["auto", "float16", "float32", "bfloat16", "int32", "disable"]
FP8 = ["fp8", "disable"]
FP8_FMHA = ("FP8", "W4A8_AWQ", "NVFP4")

FAILURES: dict[str, tuple[int, str]] = {
    "gpu_memory": (
        1,
        "[TRT] [E] [virtualMemoryBuffer.cpp::resizePhysical::151] Error Code 2: OutOfMemory "
        "(Requested size was 16654532608 bytes.)\n"
        "[TRT-LLM] [E] Engine building failed, please check the error log.",
    ),
    "host_memory": (-9, "[TRT] [I] Global timing cache in use."),
    "kv_type": (
        1,
        "RuntimeError: Paged Context FMHA doesn't work with int8 kv cache currently.",
    ),
    "format": (1, "RuntimeError: INT8/INT4 quantization is not supported on SM>=100."),
    "no_kernel": (
        1,
        "[TRT] [E] Error Code 10: Internal Error (Could not find any implementation for node "
        "{ForeignNode[...]}.)",
    ),
    "driver": (
        1,
        "RuntimeError: CUDA error: CUDA driver version is insufficient for CUDA runtime version",
    ),
    "no_gpu": (1, "RuntimeError: No CUDA GPUs are available"),
    "disk": (1, "OSError: [Errno 28] No space left on device"),
    "architecture": (1, "AssertionError: Unsupported model architecture: Qwen9ForCausalLM"),
    "tensors": (
        1,
        "RuntimeError: Required but not provided tensors:{'transformer.layers.0.mlp.fc.weight'}",
    ),
    "config": (1, "TypeError: QuantConfig.__init__() got an unexpected keyword argument 'x_y'"),
    "other": (3, "ValueError: something new"),
}


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser("trtllm-build", allow_abbrev=False)
    add = parse.add_argument
    for name in ("checkpoint_dir", "model_config", "build_config", "model_cls_file"):
        add(f"--{name}", type=str)
    for name in ("model_cls_name", "input_timing_cache", "visualize_network", "paged_kv_cache"):
        add(f"--{name}", type=str)
    add("--output_dir", default="engine_outputs")
    add("--output_timing_cache", default="model.cache")
    add("--max_batch_size", type=int, default=2048)
    add("--max_input_len", type=int, default=1024)
    add("--max_seq_len", "--max_decoder_seq_len", dest="max_seq_len", type=int)
    add("--max_beam_width", type=int, default=1)
    add("--max_num_tokens", type=int, default=8192)
    add("--opt_num_tokens", type=int)
    add("--max_encoder_input_len", type=int, default=1024)
    add("--max_prompt_embedding_table_size", "--max_multimodal_len", type=int, default=0)
    add("--kv_cache_type", choices=["continuous", "paged", "disabled"])
    verbosities = ["layer_names_only", "detailed", "none"]
    add("--profiling_verbosity", choices=verbosities, default="layer_names_only")
    for name in ("strip_plan", "weight_sparsity", "weight_streaming", "fast_build", "dry_run"):
        add(f"--{name}", action="store_true")
    for name in ("enable_debug_output", "monitor_memory", "gather_context_logits"):
        add(f"--{name}", action="store_true")
    for name in ("gather_generation_logits", "gather_all_token_logits"):
        add(f"--{name}", action="store_true")
    add("--workers", type=int, default=1)
    levels = ["internal_error", "error", "warning", "info", "verbose", "debug"]
    add("--log_level", choices=levels, default="info")
    add("--logits_dtype", choices=["float16", "float32"])
    add("--lora_dir", nargs="+")
    add("--lora_ckpt_source", choices=["hf", "nemo"], default="hf")
    add("--lora_target_modules", nargs="+")
    add("--max_lora_rank", type=int, default=64)
    modes = ["draft_tokens_external", "lookahead_decoding", "medusa", "explicit_draft_tokens"]
    add("--speculative_decoding_mode", choices=[*modes, "eagle"])
    add("--max_draft_len", type=int, default=0)
    for name in ("bert_attention_plugin", "gpt_attention_plugin", "moe_plugin", "nccl_plugin"):
        add(f"--{name}", choices=DTYPES, default="auto")
    add("--mamba_conv1d_plugin", choices=DTYPES, default="auto")
    add("--gemm_plugin", choices=[*DTYPES, "fp8", "nvfp4"])
    for name in ("fp8_rowwise_gemm_plugin", "lora_plugin"):
        add(f"--{name}", choices=DTYPES, default="disable")
    for name in ("gemm_swiglu_plugin", "low_latency_gemm_plugin", "low_latency_gemm_swiglu_plugin"):
        add(f"--{name}", choices=FP8, default="disable")
    allreduce = ["float16", "bfloat16", "disable"]
    add("--gemm_allreduce_plugin", choices=allreduce, default="disable")
    for name in ("context_fmha", "remove_input_padding", "use_paged_context_fmha"):
        add(f"--{name}", choices=ON_OFF, default="enable")
    for name in ("use_fp8_context_fmha", "paged_state", "use_fused_mlp"):
        add(f"--{name}", choices=ON_OFF, default="enable")
    for name in ("dora_plugin", "bert_context_fmha_fp32_acc", "fuse_fp4_quant", "streamingllm"):
        add(f"--{name}", choices=ON_OFF, default="disable")
    for name in ("multiple_profiles", "norm_quant_fusion", "reduce_fusion", "user_buffer"):
        add(f"--{name}", choices=ON_OFF, default="disable")
    add("--pp_reduce_scatter", choices=ON_OFF, default="disable")
    add("--tokens_per_block", type=int, default=32)
    return parse


PLUGINS = [
    "bert_attention_plugin",
    "gpt_attention_plugin",
    "moe_plugin",
    "nccl_plugin",
    "mamba_conv1d_plugin",
    "gemm_plugin",
    "fp8_rowwise_gemm_plugin",
    "lora_plugin",
    "gemm_swiglu_plugin",
    "low_latency_gemm_plugin",
    "low_latency_gemm_swiglu_plugin",
    "gemm_allreduce_plugin",
    "context_fmha",
    "remove_input_padding",
    "use_paged_context_fmha",
    "use_fp8_context_fmha",
    "paged_state",
    "use_fused_mlp",
    "dora_plugin",
    "bert_context_fmha_fp32_acc",
    "fuse_fp4_quant",
    "streamingllm",
    "multiple_profiles",
    "norm_quant_fusion",
    "reduce_fusion",
    "user_buffer",
    "pp_reduce_scatter",
    "tokens_per_block",
]

SUFFIXES = {
    "FP8": {"weight", "activation_scaling_factor", "weights_scaling_factor"},
    "FP8_PER_CHANNEL_PER_TOKEN": {"weight", "per_channel_scale"},
    "W8A8_SQ_PER_CHANNEL": {
        "weight",
        "activation_scaling_factor",
        "weights_scaling_factor",
        "prequant_scaling_factor",
    },
    "W4A16_AWQ": {"weight", "weights_scaling_factor", "prequant_scaling_factor"},
    "W8A16": {"weight"},
}
"""Tensors of a quantized linear, for the algorithms that tests build from."""

MODES = {None: 1, "draft_tokens_external": 2, "medusa": 4, "lookahead_decoding": 8}
MODES |= {"explicit_draft_tokens": 16, "eagle": 32}

LINEAR = r"(attention\.(qkv|dense)|mlp\.(fc|gate|proj)|lm_head)\.weight$"

BUILD_KEYS = [
    "max_input_len",
    "max_seq_len",
    "max_batch_size",
    "max_beam_width",
    "max_num_tokens",
    "opt_num_tokens",
    "max_prompt_embedding_table_size",
    "gather_context_logits",
    "gather_generation_logits",
    "profiling_verbosity",
    "enable_debug_output",
    "max_draft_len",
    "input_timing_cache",
    "output_timing_cache",
    "weight_sparsity",
    "weight_streaming",
    "max_encoder_input_len",
    "monitor_memory",
]


def warn(text: str) -> None:
    print(f"[TRT-LLM] [W] {text}", flush=True)


def plugin_config(args: argparse.Namespace, pretrained: dict[str, Any]) -> dict[str, Any]:
    plugins: dict[str, Any] = {"dtype": pretrained["dtype"]}
    for name in PLUGINS:
        value = getattr(args, name)
        is_toggle = value in ON_OFF and not name.endswith("_plugin") or name == "dora_plugin"
        if is_toggle:
            value = value == "enable"
        elif value == "disable":
            value = None
        elif value == "auto":
            value = pretrained["dtype"]
        plugins[name] = value
    if pretrained["mapping"]["world_size"] == 1:
        plugins["nccl_plugin"] = None
    plugins["paged_kv_cache"] = args.kv_cache_type in (None, "paged")
    plugins["manage_weights"] = args.fast_build
    return plugins


def build_config(args: argparse.Namespace, pretrained: dict[str, Any]) -> dict[str, Any]:
    """What `build` makes of the command line, with everything that it changes by itself."""
    sm = int(os.environ.get("FAKE_SM", "90"))
    plugins = plugin_config(args, pretrained)
    build = {name: getattr(args, name) for name in BUILD_KEYS}
    build |= {
        "opt_batch_size": 8,
        "kv_cache_type": (args.kv_cache_type or "paged").upper(),
        "strongly_typed": True,
        "force_num_profiles": None,
        "speculative_decoding_mode": MODES[args.speculative_decoding_mode],
        "use_refit": False,
        "lora_config": {"lora_dir": [], "lora_ckpt_source": "hf", "max_lora_rank": 64},
        "plugin_config": plugins,
        "use_strip_plan": args.strip_plan,
        "use_mrope": False,
    }
    if build["max_seq_len"] is None:
        build["max_seq_len"] = pretrained["max_position_embeddings"]
    if build["max_input_len"] > build["max_seq_len"]:
        build["max_input_len"] = build["max_seq_len"]
    if build["opt_num_tokens"] is None:
        build["opt_num_tokens"] = args.max_batch_size * args.max_beam_width
    if args.speculative_decoding_mode is not None:
        build["max_seq_len"] += args.max_draft_len
        num_tokens = args.max_batch_size * (args.max_draft_len + 1)
        build["max_num_tokens"] = max(build["max_num_tokens"], num_tokens)

    quantization = pretrained["quantization"]
    algo, kv_algo = quantization["quant_algo"], quantization["kv_cache_quant_algo"]
    if not plugins["context_fmha"]:
        plugins["use_fp8_context_fmha"] = plugins["use_paged_context_fmha"] = False
        warn("Context FMHA is disabled, FP8 Context FMHA and Paged Context FMHA are disabled.")
    elif algo not in FP8_FMHA or sm < 89:
        plugins["use_fp8_context_fmha"] = False
        if kv_algo == "FP8":
            plugins["use_paged_context_fmha"] = False
            warn("FP8 Paged Context FMHA is disabled because FP8 context FMHA is disabled.")
    elif plugins["use_paged_context_fmha"]:
        plugins["use_fp8_context_fmha"] = kv_algo == "FP8"
    if plugins["use_paged_context_fmha"] and kv_algo == "INT8":
        plugins["use_paged_context_fmha"] = False
        warn("Paged Context FMHA is disabled because it doesn't work with int8 kv cache currently.")
    if 100 <= sm < 120 and (algo not in (None, "FP8", "NVFP4") or kv_algo == "INT8"):
        raise RuntimeError("INT8/INT4 quantization is not supported on SM>=100.")
    if algo == "NVFP4" and args.gemm_plugin != "disable":
        plugins["gemm_plugin"] = "nvfp4"
    return build


def header(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        found: dict[str, Any] = json.loads(file.read(size))
    return found


def check_weights(pretrained: dict[str, Any], path: Path) -> None:
    """Looks for what the network of one rank would load, as its `quantization` makes it."""
    quantization, there = pretrained["quantization"], set(header(path))
    suffixes = SUFFIXES.get(quantization["quant_algo"])
    linears = {name.removesuffix(".weight") for name in there if re.search(LINEAR, name)}
    wanted = set()
    for module in linears if suffixes is not None else ():
        if not any(fnmatchcase(module, name) for name in quantization["exclude_modules"]):
            wanted |= {f"{module}.{suffix}" for suffix in suffixes or ()}
    embedding, excluded = "transformer.vocab_embedding", quantization.get("exclude_modules", ())
    is_plain = any(fnmatchcase(embedding, name) for name in excluded)
    if quantization["quant_algo"] == "W8A16" and f"{embedding}.weight" in there and not is_plain:
        wanted.add(f"{embedding}.per_token_scale")
    if quantization["kv_cache_quant_algo"] is not None:
        attentions = {name.partition(".qkv.")[0] for name in there if ".attention.qkv." in name}
        wanted |= {f"{module}.kv_cache_scaling_factor" for module in attentions}
    if missing := wanted - there:
        raise RuntimeError(f"Required but not provided tensors:{missing}")


def fail(name: str) -> None:
    exit_code, text = FAILURES[name]
    print(text, flush=True)
    if exit_code < 0:
        os.kill(os.getpid(), -exit_code)
    sys.exit(exit_code)


def main(argv: list[str]) -> None:
    args = parser().parse_args(argv)
    print(f"[TensorRT-LLM] TensorRT-LLM version: {version()}", flush=True)
    if args.gather_context_logits and args.max_draft_len > 0:
        raise RuntimeError("Gather context logits is not support with draft len > 0. ")
    if args.multiple_profiles == "enable" and args.opt_num_tokens is not None:
        raise RuntimeError("multiple_profiles is enabled, while opt_num_tokens is set. ")
    if os.environ.get("FAKE_FAIL") in FAILURES:
        fail(os.environ["FAKE_FAIL"])
    folder, out = Path(args.checkpoint_dir), Path(args.output_dir)
    pretrained = json.loads((folder / "config.json").read_bytes())
    if args.logits_dtype is not None:
        pretrained["logits_dtype"] = args.logits_dtype
    build = build_config(args, pretrained)
    if "FAKE_SLEEP" in os.environ:
        Path(os.environ["FAKE_STATE"], "builder.pid").write_text(str(os.getpid()))
        print("building", flush=True)
        time.sleep(float(os.environ["FAKE_SLEEP"]))
    out.mkdir(parents=True, exist_ok=True)
    config = {"version": version(), "pretrained_config": pretrained, "build_config": build}
    for rank in range(pretrained["mapping"]["world_size"]):
        check_weights(pretrained, folder / f"rank{rank}.safetensors")
        weights = (folder / f"rank{rank}.safetensors").read_bytes()
        (out / f"rank{rank}.engine").write_bytes(b"engine" + weights[:64])
    exec(os.environ.get("FAKE_EDIT", ""), {"config": config, "out": out})
    (out / "config.json").write_text(json.dumps(config, indent=4))
    Path(args.output_timing_cache).write_bytes(b"timings")
    print("[TRT-LLM] [I] Total time of building all engines: 00:00:00", flush=True)


def version() -> str:
    return os.environ.get("FAKE_VERSION", "1.2.1")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main(sys.argv[1:])
