"""How fast transformers and vLLM are on the same checkpoints and prompts: one stream, greedy.

    python benchmarks/peers.py --target /data/target-7b --draft /data/draft-0.4b \\
        --prompts prompts.json --num-draft-tokens 0,2,4 > peers.jsonl

The prompts are a JSON list of lists of token ids, so that every side reads the same. Each of these
is measured in a process of its own and gives one line of JSON:

transformers           `generate` as it comes; with draft tokens, the draft is its assistant model
transformers-compiled  static cache and torch.compile, mode reduce-overhead; without a draft only,
                       as assisted generation takes no static cache
vllm                   where it is installed; with draft tokens, its method draft_model
vllm-ngram             vLLM's method ngram: it copies draft tokens from the text; needs no --draft

End tokens are ignored, so that every answer has `--max-tokens` tokens. The first answers warm up
and are not counted. A run is all prompts one after the other: tokens_per_second is the median of
the runs, prefill included, and acceptance_length the tokens that a pass of the target over draft
tokens gave, null where there were none. What fails gives a line with `error`, and its log is on
stderr.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    # FlashInfer compiles its kernels when they are first used; greedy decoding needs none of them.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


@dataclass(frozen=True)
class Job:
    """One measurement; what a process of its own is told."""

    engine: str
    target: str
    draft: str | None
    num_draft_tokens: int
    prompts: list[list[int]]
    max_tokens: int = 192
    runs: int = 3
    dtype: str = "bfloat16"
    device: str = "cuda"
    vllm_options: dict[str, Any] = field(default_factory=dict)

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt and its answer."""
        return max(map(len, self.prompts)) + self.max_tokens


class Engine(Protocol):
    """What is measured: a loaded target, and its draft if the job has one."""

    version: str
    num_warm_ups: int
    """Answers until all is compiled and recorded."""

    def generate(self, prompt: Sequence[int]) -> Sequence[int]:
        """Returns the answer's tokens when all of them are there."""

    def num_passes_and_tokens(self) -> tuple[int, int]:
        """Counts passes of the target over draft tokens until now, and the tokens they gave."""


class Transformers:
    """transformers' `generate`, with an assistant model where the job has draft tokens."""

    num_warm_ups = 1

    def __init__(self, job: Job) -> None:
        import torch
        import transformers

        self.version = transformers.__version__
        self._torch, self._device = torch, job.device
        self._target = self._load(job.target, job.dtype)
        self._num_passes = self._num_tokens = 0
        self._options: dict[str, Any] = {"do_sample": False, "max_new_tokens": job.max_tokens}
        if job.num_draft_tokens:
            assert job.draft is not None
            draft = self._load(job.draft, job.dtype)
            draft.generation_config.num_assistant_tokens = job.num_draft_tokens
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            draft.generation_config.assistant_confidence_threshold = 0.0  # else it stops earlier
            self._options["assistant_model"] = draft
            self._target.register_forward_hook(self._count_pass)

    def _load(self, folder: str, dtype: str) -> Any:
        from transformers import AutoModelForCausalLM

        torch_dtype = getattr(self._torch, dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch_dtype)
        model.generation_config.eos_token_id = None
        return model.to(self._device).eval()

    def _count_pass(self, *_: object) -> None:
        self._num_passes += 1

    def generate(self, prompt: Sequence[int]) -> Sequence[int]:
        token_ids = self._torch.tensor([prompt], device=self._device)
        mask = self._torch.ones_like(token_ids)
        text = self._target.generate(token_ids, attention_mask=mask, **self._options)[0].tolist()
        answer: list[int] = text[len(prompt) :]
        self._num_tokens += len(answer)
        return answer

    def num_passes_and_tokens(self) -> tuple[int, int]:
        return self._num_passes, self._num_tokens


class CompiledTransformers(Transformers):
    """transformers' `generate` with one static cache for all answers and compiled decode steps.

    `generate` compiles by itself where the cache is static and the device a GPU. A cache that it
    makes anew for every answer would have its CUDA graphs recorded anew.
    """

    num_warm_ups = 2  # the first compiles, the second records CUDA graphs

    def __init__(self, job: Job) -> None:
        from transformers import CompileConfig, StaticCache

        super().__init__(job)
        length = job.max_length
        self._cache: Any = StaticCache(config=self._target.config, max_cache_len=length)
        # transformers 5 gave the argument a shorter name on its way.
        parameters = inspect.signature(self._target.forward).parameters
        self._options["cache" if "cache" in parameters else "past_key_values"] = self._cache
        if job.device != "cpu":
            self._options["compile_config"] = CompileConfig(mode="reduce-overhead")

    def generate(self, prompt: Sequence[int]) -> Sequence[int]:
        self._cache.reset()
        return super().generate(prompt)


class VLLM:
    """vLLM's offline engine, with CUDA graphs as they come."""

    num_warm_ups = 2

    def __init__(self, job: Job) -> None:
        for name, value in VLLM_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import vllm

        self.version = vllm.__version__
        options: dict[str, Any] = {
            "dtype": job.dtype,
            # It stops drafting where a draft might go beyond.
            "max_model_len": job.max_length + 2 * job.num_draft_tokens + 16,
            "max_num_seqs": 64,
            "gpu_memory_utilization": 0.85,
            "enable_prefix_caching": False,  # every run has the same prompts
            "disable_log_stats": False,  # else there are no metrics
        }
        if job.num_draft_tokens:
            options["speculative_config"] = {
                **self._method(job),
                "num_speculative_tokens": job.num_draft_tokens,
            }
        self._llm = vllm.LLM(job.target, **{**options, **job.vllm_options})
        self._sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True, detokenize=False
        )

    def _method(self, job: Job) -> dict[str, Any]:
        """How draft tokens are made."""
        return {"method": "draft_model", "model": job.draft}

    def generate(self, prompt: Sequence[int]) -> Sequence[int]:
        requests = [{"prompt_token_ids": list(prompt)}]
        answer = self._llm.generate(requests, self._sampling, use_tqdm=False)[0].outputs[0]
        token_ids: Sequence[int] = answer.token_ids
        return token_ids

    def num_passes_and_tokens(self) -> tuple[int, int]:
        values = {metric.name: getattr(metric, "value", 0) for metric in self._llm.get_metrics()}
        num_passes = int(values.get("vllm:spec_decode_num_drafts", 0))
        return num_passes, num_passes + int(values.get("vllm:spec_decode_num_accepted_tokens", 0))


class NgramVLLM(VLLM):
    """vLLM without a draft model: draft tokens are what followed the last ones earlier on.

    A pass for which it found none counts neither as a pass over draft tokens nor with its token.
    """

    def _method(self, job: Job) -> dict[str, Any]:
        return {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}


ENGINES: dict[str, Callable[[Job], Engine]] = {
    "transformers": Transformers,
    "transformers-compiled": CompiledTransformers,
    "vllm": VLLM,
    "vllm-ngram": NgramVLLM,
}
_NEEDS_VLLM = {"vllm", "vllm-ngram"}


def measure(job: Job) -> dict[str, Any]:
    """Runs one job in this process; returns its line."""
    engine = ENGINES[job.engine](job)
    for _ in range(engine.num_warm_ups):
        _check_length(engine.generate(max(job.prompts, key=len)), job)
    passes_before, tokens_before = engine.num_passes_and_tokens()
    rates = []
    for _ in range(job.runs):
        start = time.perf_counter()
        answers = [engine.generate(prompt) for prompt in job.prompts]
        seconds = time.perf_counter() - start
        for answer in answers:
            _check_length(answer, job)
        rates.append(len(answers) * job.max_tokens / seconds)
    num_passes, num_tokens = engine.num_passes_and_tokens()
    num_passes, num_tokens = num_passes - passes_before, num_tokens - tokens_before
    rate = statistics.median(rates)
    return {
        "engine": job.engine,
        "version": engine.version,
        "num_draft_tokens": job.num_draft_tokens,
        "tokens_per_second": round(rate, 2),
        "ms_per_token": round(1e3 / rate, 4),
        "acceptance_length": round(num_tokens / num_passes, 4) if num_passes else None,
        "runs": [round(rate, 2) for rate in rates],
        "num_prompts": len(job.prompts),
        "max_tokens": job.max_tokens,
        **_machine(job),
    }


def _check_length(answer: Sequence[int], job: Job) -> None:
    if len(answer) != job.max_tokens:
        raise RuntimeError(f"an answer has {len(answer)} tokens, {job.max_tokens} were asked for")


def _machine(job: Job) -> dict[str, str]:
    import torch

    name = torch.cuda.get_device_name() if job.device.startswith("cuda") else job.device
    return {"dtype": job.dtype, "device": name, "torch": torch.__version__}


def run_apart(job: Job, timeout_s: float) -> dict[str, Any]:
    """Runs a job in a process of its own, which leaves no memory of the GPU taken."""
    with tempfile.TemporaryDirectory(prefix="specpipe-peers-") as folder:
        job_file, result_file = Path(folder, "job.json"), Path(folder, "result.json")
        job_file.write_text(json.dumps(asdict(job)), encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, __file__, "--run-job", str(job_file), str(result_file)],
            stdout=sys.stderr.fileno(),
            start_new_session=True,
        )
        try:
            status = process.wait(timeout_s)
            error = f"exit status {status}"
        except subprocess.TimeoutExpired:
            error = f"no result after {timeout_s:g} s"
        finally:
            with suppress(ProcessLookupError):  # vLLM's engine is a process of the same group
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if result_file.exists():
            result: dict[str, Any] = json.loads(result_file.read_bytes())
            return result
        return {
            "engine": job.engine,
            "num_draft_tokens": job.num_draft_tokens,
            "error": error,
        }


def _run_job(job_file: Path, result_file: Path) -> None:
    result = measure(Job(**json.loads(job_file.read_bytes())))
    unfinished = result_file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(result), encoding="utf-8")
    unfinished.rename(result_file)


def jobs_of(arguments: argparse.Namespace) -> list[Job]:
    """Returns what is to be measured; says on stderr what is left out."""
    prompts = json.loads(arguments.prompts.read_bytes())[: arguments.limit]
    jobs = []
    for engine in arguments.engines:
        if engine in _NEEDS_VLLM and importlib.util.find_spec("vllm") is None:
            print(f"vllm is not installed: {engine} is left out", file=sys.stderr)
            continue
        for num_draft_tokens in arguments.num_draft_tokens:
            has_draft = arguments.draft is not None
            if not _is_measured(engine, num_draft_tokens, has_draft=has_draft):
                continue
            job = Job(
                engine=engine,
                target=str(arguments.target),
                draft=None if arguments.draft is None else str(arguments.draft),
                num_draft_tokens=num_draft_tokens,
                prompts=prompts,
                max_tokens=arguments.max_tokens,
                runs=arguments.runs,
                dtype=arguments.dtype,
                device=arguments.device,
                vllm_options=arguments.vllm_options,
            )
            jobs.append(job)
    return jobs


def _check_device(device: str) -> None:
    """Ends the process where it has no GPU that it wants; command.py would want specpipe."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            f"Error: --device cuda: there is no GPU here that torch {torch.__version__} can use"
        )


def _is_measured(engine: str, num_draft_tokens: int, *, has_draft: bool) -> bool:
    """Says whether an engine has a line for so many draft tokens."""
    if engine == "vllm-ngram":
        return num_draft_tokens > 0  # without draft tokens it is vllm
    return num_draft_tokens == 0 or (has_draft and engine != "transformers-compiled")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, required=True, help="a checkpoint folder")
    parser.add_argument("--draft", type=Path, help="a checkpoint folder")
    parser.add_argument("--prompts", type=Path, required=True, help="a JSON list of lists of ids")
    parser.add_argument("--limit", type=int, help="take so many prompts; default: all")
    parser.add_argument(
        "--engines",
        type=lambda text: text.split(","),
        default=list(ENGINES),
        help=f"separated by commas; default: {','.join(ENGINES)}",
    )
    parser.add_argument(
        "--num-draft-tokens",
        type=lambda text: [int(number) for number in text.split(",")],
        default=[0, 1, 2, 3, 4, 6, 8],
        help="separated by commas, 0 for the target alone; default: 0,1,2,3,4,6,8",
    )
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda", help="of transformers")
    parser.add_argument(
        "--vllm-options", type=json.loads, default={}, help="more arguments of vllm.LLM, as JSON"
    )
    parser.add_argument("--timeout", type=float, default=600, help="seconds that a job may take")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.engines) - ENGINES.keys():
        parser.error(f"--engines: unknown {', '.join(sorted(unknown))}; there are {list(ENGINES)}")
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    _check_device(arguments.device)
    for job in jobs_of(arguments):
        print(json.dumps(run_apart(job, arguments.timeout)), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run-job"]:
        _run_job(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
