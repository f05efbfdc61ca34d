"""What guides cost, and what they save.

    python benchmarks/guides.py                                  # masks at 152,064 tokens
    python benchmarks/guides.py --config configs/quickstart.yaml # and steps of a built pair

mask    time of a mask, of a vocabulary of that size, while a random walk follows each guide of
        guides.jsonl to its end; the first walk of a guide and later ones
apply   time of putting masks on rows of logits, beside that of the rows' argmax
steps   tokens a step of the pair with the set, with what is forced as draft tokens and without
others  time of a step of streams without a guide, alone and beside as many that have one
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from command import run_command
from measure import QUICKSTART

from specpipe.build.load import load_config
from specpipe.build.repositories import built_repository
from specpipe.checkpoints.limits import FILE_LIMITS
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.pair.torch_sampler import mask_rows
from specpipe.runtimes.runtime import load_runtime
from specpipe.speculative.draft_choice import DraftChoice
from specpipe.speculative.guide import Guide, allowed_ids
from specpipe.speculative.request import Request
from specpipe.text.guides.guides import Guides
from specpipe.triton.repository.contents import load_tokenizer

_VOCAB_SIZE = 152_064  # Qwen 2.5's
_SET = Path(__file__).with_name("guides.jsonl")
_NUM_WALKS = 4
_MOST_TOKENS = 200


class Synthetic:
    """As many tokens as a large vocabulary has, of the kinds that it has: bytes, words with and
    without a space before them, pieces of JSON, digits, other scripts.
    """

    special_token_ids = frozenset({_VOCAB_SIZE - 1})
    spells_tokens = True

    def __init__(self) -> None:
        rng = random.Random(1)
        letters = "etaoinshrdlcumwfgypbvkjxqz"
        weights = range(len(letters), 0, -1)
        found = dict.fromkeys(bytes([byte]) for byte in range(256))
        while len(found) < _VOCAB_SIZE - 1:
            word = "".join(rng.choices(letters, weights=weights, k=rng.randint(2, 8)))
            kind = rng.random()
            if kind < 0.5:
                word = f" {word}"
            elif kind < 0.6:
                start = rng.choice(['{"', '": ', '", "', '"}', "\n  ", "],", "(", ")", "123", "45"])
                word = start + word[: rng.randint(0, 3)]
            elif kind < 0.75:
                word = "".join(rng.choices("éüñøß漢字仮名交文中国人日本語пр", k=rng.randint(1, 3)))
            found[word.encode()] = None
        self._bytes = [*found, b"<end>"]
        self._ids = {token: i for i, token in enumerate(self._bytes)}
        self._longest = max(map(len, self._bytes))

    def tokens(self) -> dict[int, str]:
        return {i: token.decode("latin-1") for i, token in enumerate(self._bytes)}

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def encode_fragment(self, text: str) -> list[int]:
        data, token_ids = text.encode(), []
        while data:
            size = next(n for n in range(self._longest, 0, -1) if data[:n] in self._ids)
            token_ids.append(self._ids[data[:size]])
            data = data[size:]
        return token_ids


def main() -> None:
    arguments = parse_arguments()
    guides = read_set()
    measure_masks(guides)
    measure_applying()
    if arguments.config is not None:
        measure_pair(guides, arguments.config, arguments.num_draft_tokens)


def read_set() -> dict[str, Guide]:
    entries = [json.loads(line) for line in _SET.read_text().splitlines()]
    return {
        e["name"]: Guide(
            type=e["type"],
            text=e["guide"] if isinstance(e["guide"], str) else json.dumps(e["guide"]),
        )
        for e in entries
    }


def measure_masks(guides: Mapping[str, Guide]) -> None:
    start = time.perf_counter()
    made = Guides(Synthetic(), FILE_LIMITS)
    made.compile(Guide(type="json"))
    print(f"vocabulary of {_VOCAB_SIZE} tokens, made in {time.perf_counter() - start:.1f} s")
    all_times: list[float] = []
    for name, guide in guides.items():
        start = time.thread_time()
        made.compile(guide)
        compiled_ms = 1e3 * (time.thread_time() - start)
        times = [t for seed in range(_NUM_WALKS) for t in walk(made, guide, seed)]
        all_times += times
        print(f"  {name}: compiled in {compiled_ms:.1f} ms, mask {figures(times)}")
    print(f"mask ({len(all_times)} tokens, CPU time): {figures(all_times)}")


def walk(guides: Guides, guide: Guide, seed: int) -> Iterator[float]:
    """Yields the CPU time of each mask on a random way through a guide."""
    rng = random.Random(seed)
    end = frozenset({_VOCAB_SIZE - 1})
    matcher = guides.matcher(guide, end_token_ids=end, vocab_size=_VOCAB_SIZE)
    for _ in range(_MOST_TOKENS):
        start = time.thread_time()
        mask = matcher.mask([])
        yield time.thread_time() - start
        assert mask is not None, matcher.fault
        token_id = int(rng.choice(np.flatnonzero(allowed_ids(mask, _VOCAB_SIZE))))
        if token_id in end:
            return
        matcher.accept(token_id)
        if matcher.is_over:
            return


def measure_applying() -> None:
    made = Guides(Synthetic(), FILE_LIMITS)
    for num_rows in (1, 8, 40):
        logits = torch.randn(num_rows, _VOCAB_SIZE)
        matchers = [
            made.matcher(Guide(type="json"), end_token_ids=frozenset(), vocab_size=_VOCAB_SIZE)
            for _ in range(num_rows)
        ]
        for matcher in matchers:
            matcher.mask([])
        rows = [(matcher, list[int]()) for matcher in matchers]
        applied = median_ms(lambda: mask_rows(logits, rows))  # noqa: B023
        argmax = median_ms(lambda: logits.max(dim=-1))  # noqa: B023
        print(f"apply {num_rows} rows: {applied:.3f} ms; their argmax: {argmax:.3f} ms")


def measure_pair(guides: Mapping[str, Guide], config: Path, num_draft_tokens: int) -> None:
    repository = built_repository(load_config(config))
    tokenizer = load_tokenizer(repository)
    folder = repository / "speculative" / "1"
    options = PairOptions(num_draft_tokens=num_draft_tokens, adaptive=True, max_batch_size=8)
    pair = load_runtime("torch").load_pair(
        folder / "draft", folder / "target", options, tokenizer.detokenizer, tokenizer.guides
    )

    def requests(num: int, *, guided: bool, most: int = _MOST_TOKENS) -> list[Request]:
        prompt = tuple(tokenizer.encode("def answer():\n    return "))
        return [
            Request(
                request_id=f"{name} {guided}",
                prompt_token_ids=prompt,
                max_tokens=most,
                end_token_ids=tokenizer.end_token_ids if guided else frozenset(),
                guide=guide if guided else None,
            )
            for name, guide in list(guides.items())[:num]
        ]

    def run(asked: list[Request]) -> tuple[int, int, float]:
        """Returns tokens, steps of the requests together, and the median time of a step."""
        for request in asked:
            pair.submit(request)
        num_tokens = num_steps = 0
        times = []
        while pair.has_work():
            start = time.perf_counter()
            chunks = pair.step()
            times.append(time.perf_counter() - start)
            for chunk in chunks:
                if chunk.statistics is not None:
                    num_tokens += chunk.statistics.num_output_tokens
                    num_steps += chunk.statistics.num_steps
        return num_tokens, num_steps, statistics.median(times)

    with_forced = run(requests(len(guides), guided=True))
    with mock.patch.object(DraftChoice, "forced", lambda self, after=(): []):
        without = run(requests(len(guides), guided=True))
    rates = [tokens / steps for tokens, steps, _ in (with_forced, without)]
    print(
        f"steps of {config.name}, K {num_draft_tokens}: {rates[0]:.2f} tokens a step with what is "
        f"forced ({with_forced[0]} tokens), {rates[1]:.2f} without: {rates[0] / rates[1]:.2f}x"
    )
    free = requests(4, guided=False, most=64)
    alone = run([*free, *again(free)])
    beside = run([*free, *requests(4, guided=True, most=64)])
    times = [1e3 * seconds for _, _, seconds in (alone, beside)]
    print(f"others: a step of 8 streams {times[0]:.1f} ms, {times[1]:.1f} ms with 4 guided")


def again(requests: list[Request]) -> list[Request]:
    return [Request(**{**vars(r), "request_id": f"{r.request_id} again"}) for r in requests]


def median_ms(work: Callable[[], object]) -> float:
    times = []
    for _ in range(20):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def figures(seconds: list[float]) -> str:
    times = np.array(seconds) * 1e3
    median, high = np.quantile(times, [0.5, 0.99])
    return (
        f"mean {times.mean():.3f} ms, median {median:.3f}, 99 % {high:.3f}, most {times.max():.1f}"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--config", type=Path, help=f"a built pair, as {QUICKSTART}")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
