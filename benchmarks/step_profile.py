"""Where the time of one forward goes on a CPU, for both engines of a built pair.

    python benchmarks/step_profile.py --config configs/quickstart.yaml --threads 2

Four times are measured in turn, each with the weights of both engines read in between, as a
draft-verify step reads them:

forward   one forward of 1 or K + 1 tokens after 256 others, logits included
products  the matrix products of that forward by themselves
calls     how many operations torch is asked for, and what remains of the forward for each of them
tiny      one addition of 256 numbers, straight after another one and after the weights
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from command import cpu_name, run_command
from measure import QUICKSTART
from torch.utils._python_dispatch import TorchDispatchMode

from specpipe.build.load import load_config
from specpipe.build.repositories import built_repository
from specpipe.runtimes.torch.build import WEIGHTS_NAME
from specpipe.runtimes.torch.engine import TorchEngine, load_weights

_CONTEXT = 256
_ROUNDS = 200


class _CallCounter(TorchDispatchMode):
    """Counts operations, views of tensors included."""

    num_calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def main() -> None:
    arguments = parse_arguments()
    config = load_config(arguments.config)
    folder = built_repository(config) / "speculative" / "1"
    engines = {
        role: TorchEngine.load(folder / role, num_threads=arguments.threads)
        for role in ("draft", "target")
    }
    matrices = {role: read_matrices(folder / role) for role in engines}
    everything = [matrix for role in matrices.values() for matrix in role]

    def read_all_weights() -> None:
        for matrix in everything:
            torch.mm(matrix.new_ones(1, matrix.shape[0]), matrix)

    print(
        f"{cpu_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads; "
        f"pair {config.name}, torch {torch.__version__}\n"
    )
    print("engine  tokens  forward  products  rest  calls  rest per call")
    for role, engine in engines.items():
        for num_tokens in (1, engine.max_draft_len + 1):
            step = Step(engine, num_tokens)
            step.run()
            with _CallCounter() as counter:
                step.run()
            forward = median_us(step.run, lambda s=step: (s.undo(), read_all_weights()))
            products = median_us(
                lambda r=role, n=num_tokens: multiply(matrices[r], n), read_all_weights
            )
            rest = forward - products
            print(
                f"{role:6}  {num_tokens:6}  {forward:4.0f} us   {products:4.0f} us "
                f"{rest:4.0f} us  {counter.num_calls:5}  {rest / counter.num_calls:10.1f} us"
            )
    x = torch.zeros(256)
    hot = median_us(lambda: x.add_(1.0), lambda: x.add_(1.0))
    cold = median_us(lambda: x.add_(1.0), read_all_weights)
    print(f"\ntiny addition: {hot:.1f} us after another one, {cold:.1f} us after the weights")


def read_matrices(engine_folder: Path) -> list[torch.Tensor]:
    """The matrices that every forward multiplies with; rows of the embedding are looked up."""
    weights = load_weights(engine_folder / WEIGHTS_NAME, torch.device("cpu"))
    return [w for name, w in weights.items() if w.dim() == 2 and "embedding" not in name]


def multiply(matrices: list[torch.Tensor], num_tokens: int) -> None:
    for matrix in matrices:
        torch.mm(matrix.new_ones(num_tokens, matrix.shape[0]), matrix)


class Step:
    """One forward after a context, to be run again and again."""

    def __init__(self, engine: TorchEngine, num_tokens: int) -> None:
        self._engine, self._num_tokens = engine, num_tokens
        self._sequence = engine.allocate(
            prompt_length=_CONTEXT, max_tokens=_CONTEXT + 2 * num_tokens
        )
        engine.skip(self._sequence, _CONTEXT)

    def run(self) -> None:
        token_ids = [0] * self._num_tokens
        self._engine.forward([(self._sequence, token_ids)], [self._num_tokens])

    def undo(self) -> None:
        self._engine.truncate(self._sequence, _CONTEXT)


def median_us(timed: Callable[[], object], before: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_ROUNDS):
        before()
        start = time.perf_counter()
        timed()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e6


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=QUICKSTART)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
