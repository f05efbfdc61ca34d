"""A gate of prompts and expected answers, before and after."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specpipe.errors import ConfigError, ServerError
from specpipe.evaluate.endpoints.base import Piece, Question
from specpipe.evaluate.verification.gate import Gate, GateResult, ask_gate, judge_gate, load_gate

IS_FOUR = [sys.executable, "-c", "import sys; sys.exit(sys.stdin.read() != '4')"]


class Answers:
    """Answers by the first token of the prompt, which the tests encode as its number."""

    name = "scripted"

    def __init__(self, alone: dict[int, str], speculative: dict[int, str]) -> None:
        self.alone, self.speculative = alone, speculative

    def stream(self, question: Question) -> Iterator[Piece]:
        assert question.token_ids is not None
        answers = self.alone if question.num_draft_tokens == 0 else self.speculative
        text = answers[question.token_ids[0]]
        if text == "FAILS":
            raise ServerError("out of memory")
        yield Piece(text=text, token_ids=(1,), num_tokens=1, finish_reason="stop")

    def close(self) -> None: ...


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return load_gate(
        write(
            tmp_path / "sums.jsonl",
            {"prompt": "2 + 2 =", "exact": "4"},
            {"prompt": "The capital of France is", "regex": "(?i)paris", "name": "france"},
            {"prompt": "2 * 2 =", "command": IS_FOUR},
        )
    )


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def run(gate: Gate, endpoint: Answers, **settings: float) -> GateResult:
    numbers = {item.prompt.name: (number,) for number, item in enumerate(gate.items)}
    alone, speculative = (
        ask_gate(
            gate,
            endpoint,
            encode=lambda prompt: numbers[prompt.name],
            max_tokens=8,
            num_draft_tokens=num_draft_tokens,
            at_once=2,
        )
        for num_draft_tokens in (0, 4)
    )
    return judge_gate(gate, alone=alone, speculative=speculative, **settings)


RIGHT = {0: " 4\n", 1: "It is Paris.", 2: "4"}


def test_right_answers_pass(gate: Gate) -> None:
    result = run(gate, Answers(RIGHT, RIGHT))
    assert result == GateResult(
        source=gate.source,
        digest=gate.digest,
        num_prompts=3,
        num_right=3,
        num_right_target_alone=3,
        num_failed=0,
        lost=(),
    )
    assert result.reason is None


def test_speculation_that_loses_an_answer_closes_the_gate(gate: Gate) -> None:
    result = run(gate, Answers(RIGHT, {**RIGHT, 1: "It is Lyon."}))
    assert result.lost == ("france",)
    assert result.reason == ("with speculation 2 of 3 answers of the gate are right, without it 3")
    assert result.to_json()["verdict"] == "fault"


def test_a_target_that_is_wrong_by_itself_is_no_fault_of_speculation(gate: Gate) -> None:
    wrong = {**RIGHT, 0: "5", 2: "44"}
    result = run(gate, Answers(wrong, wrong))
    assert (result.num_right, result.reason) == (1, None)


def test_a_share_that_must_be_right_is_held_against_both(gate: Gate) -> None:
    wrong = {**RIGHT, 0: "5"}
    result = run(gate, Answers(wrong, wrong), min_pass_rate=0.9)
    assert result.reason == (
        "2 of 3 answers of the gate are right, less than the share of 0.9 that is asked for"
    )
    assert run(gate, Answers(RIGHT, RIGHT), min_pass_rate=1.0).reason is None


def test_a_failed_request_closes_the_gate(gate: Gate) -> None:
    result = run(gate, Answers(RIGHT, {**RIGHT, 2: "FAILS"}))
    assert result.reason == "1 of the gate's requests failed"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "x"}, "expected exactly one of exact, regex, command"),
        (
            {"prompt": "x", "exact": "4", "regex": "4"},
            "expected exactly one of exact, regex, command",
        ),
        ({"prompt": "x", "exact": 4}, "exact is 4: expected a text"),
        (
            {"prompt": "x", "regex": "("},
            "regex is '(': missing ), unterminated subpattern at position 0",
        ),
        (
            {"prompt": "x", "command": []},
            'command is []: expected a list such as ["grep", "4"]',
        ),
        (
            {"prompt": "x", "exact": "4", "answer": "4"},
            "unknown key 'answer': expected name, kind, group, prompt, messages, max_tokens",
        ),
    ],
)
def test_a_line_that_says_something_else_is_refused_by_its_number(
    tmp_path: Path, line: dict[str, object], message: str
) -> None:
    path = write(tmp_path / "sums.jsonl", {"prompt": "2 + 2 =", "exact": "4"}, line)
    with pytest.raises(ConfigError) as caught:
        load_gate(path)
    assert str(caught.value) == f"{path}:2: {message}"


def test_texts_become_messages_of_a_user_and_the_digest_follows(gate: Gate) -> None:
    chat = gate.as_chat()
    assert chat.items[1].prompt.messages == (
        {"role": "user", "content": "The capital of France is"},
    )
    assert chat.items[1].is_right("Paris")
    assert chat.digest != gate.digest


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text("\n")
    with pytest.raises(ConfigError, match=f"^{path} has no prompts$"):
        load_gate(path)


def test_a_command_that_does_not_run_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "sums.jsonl", {"prompt": "x", "command": "no-such-program --grade"})
    with pytest.raises(ConfigError, match="sums.jsonl:1: command no-such-program does not run"):
        run(load_gate(path), Answers({0: "4"}, {0: "4"}))
