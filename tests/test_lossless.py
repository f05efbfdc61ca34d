"""The quickstart pair in process: what comes out is the target's own, whatever the draft length."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specpipe.build.stages.convert import convert
from specpipe.runtimes.pair.pair import LateWork, Pair, PairOptions
from specpipe.runtimes.runtime import load_runtime
from specpipe.runtimes.torch.build import BuildTorchEngine
from specpipe.speculative.draft_choice import DraftChoice
from specpipe.speculative.request import GREEDY, Chunk, Request, Sampling
from specpipe.text.tokenizer import Tokenizer

pytest.importorskip("torch")

ROOT = Path(__file__).parents[1]
PROMPTS = [
    json.loads(line)["prompt"]
    for line in (ROOT / "benchmarks" / "prompts.jsonl").read_text().splitlines()
]
SEEDED = Sampling(temperature=0.8, top_p=0.95, seed=11, is_seeded=True)
PENALTY = 1.05
"""Of every other seeded prompt; fused rounds run those without one."""
BIAS = tuple((token_id, 1.5) for token_id in range(300, 400))
"""Of every other prompt that has a penalty."""
MAX_TOKENS = 32


@dataclasses.dataclass(frozen=True)
class Setting:
    device: str
    dtype: str
    kernels: str


SETTINGS = [
    Setting("cpu", "float32", "auto"),
    *(
        pytest.param(Setting("cuda", dtype, kernels), marks=pytest.mark.gpu)
        for dtype, kernels in (
            ("float32", "plain"),
            ("float32", "fused"),
            ("bfloat16", "fused"),
        )
    ),
]


@pytest.fixture(scope="module", params=SETTINGS, ids=str)
def setting(request: pytest.FixtureRequest) -> Setting:
    value: Setting = request.param
    return value


@pytest.fixture(scope="module")
def engines(setting: Setting, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """draft/engine and target/engine, for up to 8 draft tokens."""
    folder = tmp_path_factory.mktemp("pair")
    for role in ("draft", "target"):
        checkpoint, engine = folder / role / "checkpoint", folder / role / "engine"
        checkpoint.mkdir(parents=True)
        engine.mkdir()
        convert(ROOT / "models" / "python-code" / role, checkpoint)
        BuildTorchEngine(
            role=role,  # type: ignore[arg-type]
            checkpoint=checkpoint,
            max_batch_size=8,
            max_seq_len=1024,
            max_draft_len=8,
            max_num_tokens=256,
            dtype=setting.dtype,  # type: ignore[arg-type]
            device=setting.device,  # type: ignore[arg-type]
        ).run(engine)
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(ROOT / "models" / "python-code" / "target")


def load(
    engines: Path, setting: Setting, tokenizer: Tokenizer, *, chooses_drafts: bool = False
) -> Pair:
    return load_runtime("torch").load_pair(
        engines / "draft" / "engine",
        engines / "target" / "engine",
        PairOptions(
            num_draft_tokens=8,
            adaptive=chooses_drafts,
            prompt_lookup=chooses_drafts,
            runtime_settings={"kernels": setting.kernels},
        ),
        tokenizer.detokenizer,
    )


@pytest.fixture(scope="module")
def pair(engines: Path, setting: Setting, tokenizer: Tokenizer) -> Pair:
    """Drafts as many tokens as a request asks for."""
    return load(engines, setting, tokenizer)


@pytest.fixture(scope="module")
def target_alone(pair: Pair, tokenizer: Tokenizer) -> dict[str, list[list[int]]]:
    """The output ids of every prompt without speculation, one request at a time."""
    return {
        name: answers(pair, tokenizer, sampling, num_draft_tokens=0, at_once=1)
        for name, sampling in (("greedy", GREEDY), ("seeded", SEEDED))
    }


def answers(
    pair: Pair,
    tokenizer: Tokenizer,
    sampling: Sampling,
    *,
    num_draft_tokens: int | None,
    at_once: int,
) -> list[list[int]]:
    output: list[list[int]] = [[] for _ in PROMPTS]
    for first in range(0, len(PROMPTS), at_once):
        for index in range(first, min(first + at_once, len(PROMPTS))):
            pair.submit(
                Request(
                    request_id=str(index),
                    prompt_token_ids=tuple(tokenizer.encode(PROMPTS[index])),
                    max_tokens=MAX_TOKENS,
                    num_draft_tokens=num_draft_tokens,
                    sampling=sampling_of(sampling, index),
                    end_token_ids=tokenizer.end_token_ids,
                )
            )
        while pair.has_work():
            for chunk in pair.step():
                output[int(chunk.request_id)] += chunk.token_ids
    return output


def sampling_of(sampling: Sampling, index: int) -> Sampling:
    if sampling.is_greedy:
        return sampling
    penalty = PENALTY if index % 2 else 1.0
    return dataclasses.replace(
        sampling,
        seed=sampling.seed + index,
        repetition_penalty=penalty,
        logit_bias=BIAS if index % 4 == 3 else (),
    )


# Each draft length of each kind is asked here or through Triton, in triton/test_quickstart.py.
QUICK = {("greedy", 1, 1), ("greedy", 8, 8), ("seeded", 2, 1), ("seeded", 4, 8)}


@pytest.mark.parametrize(
    ("name", "num_draft_tokens", "at_once"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(("greedy", "seeded"), (0, 1, 2, 4, 8), (1, 8))
    ],
)
def test_speculative_output_is_that_of_the_target_alone(
    pair: Pair,
    tokenizer: Tokenizer,
    target_alone: dict[str, list[list[int]]],
    name: str,
    num_draft_tokens: int,
    at_once: int,
) -> None:
    sampling = GREEDY if name == "greedy" else SEEDED
    output = answers(pair, tokenizer, sampling, num_draft_tokens=num_draft_tokens, at_once=at_once)
    assert output == target_alone[name]


def test_output_with_prompt_lookup_is_that_of_the_target_alone(
    engines: Path,
    setting: Setting,
    tokenizer: Tokenizer,
    target_alone: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_copied = []
    next_num_copied_tokens = DraftChoice.next_num_copied_tokens

    def recorded(*arguments: Any, **options: Any) -> int:
        num_copied.append(next_num_copied_tokens(*arguments, **options))
        return num_copied[-1]

    monkeypatch.setattr(DraftChoice, "next_num_copied_tokens", recorded)
    chooses = load(engines, setting, tokenizer, chooses_drafts=True)
    for name, sampling in (("greedy", GREEDY), ("seeded", SEEDED)):
        output = answers(chooses, tokenizer, sampling, num_draft_tokens=None, at_once=1)
        assert output == target_alone[name]
    assert sum(num_copied) > 100


def test_the_target_alone_is_transformers_greedy(
    setting: Setting, tokenizer: Tokenizer, target_alone: dict[str, list[list[int]]]
) -> None:
    """An independent implementation of the same checkpoint, in float32."""
    if setting.dtype != "float32":
        pytest.skip("two implementations round to bfloat16 in different places")
    import torch

    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        ROOT / "models" / "python-code" / "target", dtype=torch.float32
    )
    for prompt, expected in list(zip(PROMPTS, target_alone["greedy"], strict=True))[::4]:
        ids = torch.tensor([tokenizer.encode(prompt)])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False
        )
        assert without_end(output[0, ids.shape[1] :].tolist(), tokenizer) == expected


def test_log_probabilities_of_prompt_and_output_are_those_of_transformers(
    pair: Pair, setting: Setting, tokenizer: Tokenizer
) -> None:
    """And the likeliest tokens, whatever the draft length, beside others, under any sampling."""
    if setting.dtype != "float32":
        pytest.skip("two implementations round to bfloat16 in different places")
    import torch

    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        ROOT / "models" / "python-code" / "target", dtype=torch.float32
    )
    requests = [
        Request(
            request_id=f"{index}-{num_draft_tokens}",
            prompt_token_ids=tuple(tokenizer.encode(PROMPTS[index])),
            max_tokens=max_tokens,
            num_draft_tokens=num_draft_tokens,
            sampling=sampling_of(SEEDED, index),
            return_log_probs=True,
            num_top_log_probs=4,
            return_prompt_log_probs=True,
        )
        for index, max_tokens in ((2, MAX_TOKENS), (3, MAX_TOKENS), (5, 0))
        for num_draft_tokens in (0, 4)
    ]
    chunks: dict[str, list[Chunk]] = {r.request_id: [] for r in requests}
    for request in requests:
        pair.submit(request)
    while pair.has_work():
        for chunk in pair.step():
            chunks[chunk.request_id].append(chunk)
    for request in requests:
        found = chunks[request.request_id]
        text = [*request.prompt_token_ids, *(i for c in found for i in c.token_ids)]
        expected = model(torch.tensor([text])).logits[0, :-1].log_softmax(dim=-1)
        own = [*found[0].prompt_log_probs, *(p for c in found for p in c.log_probs)]
        rows = torch.arange(len(text) - 1)
        torch.testing.assert_close(
            torch.tensor(own), expected[rows, text[1:]], atol=1e-3, rtol=1e-4
        )
        top = [*found[0].prompt_top_log_probs, *(t for c in found for t in c.top_log_probs)]
        torch.testing.assert_close(
            torch.tensor([[p for _, p in likeliest] for likeliest in top]),
            expected.topk(4).values,
            atol=1e-3,
            rtol=1e-4,
        )


def test_nothing_was_made_ready_while_requests_waited(
    pair: Pair, target_alone: dict[str, list[list[int]]]
) -> None:
    """By all that was asked of the pair so far; on a CPU there is nothing to compile or record."""
    assert pair.occupancy().late_work == LateWork()


def without_end(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    return [i for i in token_ids if i not in tokenizer.end_token_ids]
