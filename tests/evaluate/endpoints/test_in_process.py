from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from specpipe.build import execution, planning, repositories
from specpipe.build.load import load_config
from specpipe.evaluate.endpoints.base import Question, ask, record
from specpipe.evaluate.endpoints.in_process import InProcess
from specpipe.speculative.request import Chunk, Request
from specpipe.triton.loop import PairLoop
from tests.quiet import Quiet
from tests.runtimes.table_engine import make_pair
from tests.speculative.table import TableModel, greedy_reference, half_rule, request, target_rule

ROOT = Path(__file__).parents[3]
PROMPT = (4, 5, 6)
REFERENCE = tuple(greedy_reference(request()))  # 17 tokens after PROMPT


class Words:
    """Id 7 is "w7"; a conversation begins with id 1."""

    end_token_ids = frozenset({REFERENCE[5]})

    def encode(self, text: str) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    def encode_messages(self, messages: list[dict[str, Any]]) -> list[int]:
        return [1, *self.encode(messages[0]["content"])]

    def encode_fragment(self, text: str) -> list[int]:
        return self.encode(text)

    def is_used(self, token_id: int) -> bool:
        return True


@pytest.fixture
def endpoint() -> Iterator[InProcess]:
    pair = make_pair(TableModel(target_rule), TableModel(half_rule), num_draft_tokens=4)
    made = InProcess(pair, Words())
    yield made
    made.close()


def question(**settings: Any) -> Question:
    return Question(**{"token_ids": PROMPT, "max_tokens": 17, "ignores_end": True, **settings})


def test_ids_go_in_and_come_out_with_the_counts(endpoint: InProcess) -> None:
    answer = record(endpoint, question())
    assert answer.token_ids == REFERENCE
    assert answer.text == "".join(f"w{i} " for i in REFERENCE)
    assert answer.finish_reason == "length"
    usage = answer.usage
    assert usage is not None
    assert (usage.num_input_tokens, usage.num_output_tokens) == (3, 17)
    assert len(answer.pieces) == usage.num_steps
    assert usage.total_accepted_draft_tokens == 17 - len(answer.pieces)


def test_without_drafting_each_piece_is_a_token(endpoint: InProcess) -> None:
    answer = record(endpoint, question(num_draft_tokens=0))
    assert [piece.token_ids for piece in answer.pieces] == [(i,) for i in REFERENCE]
    assert [piece.num_tokens for piece in answer.pieces] == [1] * 17


def test_the_end_id_ends_an_answer_unless_it_is_ignored(endpoint: InProcess) -> None:
    answer = record(endpoint, question(ignores_end=False))
    assert (answer.token_ids, answer.finish_reason) == (REFERENCE[:5], "stop")


def test_the_end_id_and_the_likeliest_tokens_come_where_they_are_asked_for(
    endpoint: InProcess,
) -> None:
    answer = record(endpoint, question(ignores_end=False, returns_ids=True, num_top_log_probs=2))
    assert (answer.token_ids, answer.finish_reason) == (REFERENCE[:6], "stop")
    assert [top[0][0] for top in answer.top_log_probs] == list(REFERENCE[:6])
    assert [len(top) for top in answer.top_log_probs] == [2] * 6


def test_text_and_messages_are_encoded(endpoint: InProcess) -> None:
    text = record(endpoint, question(token_ids=None, text="w4 w5 w6"))
    assert text.token_ids == REFERENCE
    messages = ({"role": "user", "content": "w4 w5 w6"},)
    chat = record(endpoint, question(token_ids=None, messages=messages))
    same = record(endpoint, question(token_ids=(1, 4, 5, 6)))
    assert chat.token_ids == same.token_ids != REFERENCE


def test_many_ask_at_once(endpoint: InProcess) -> None:
    prompts = [(4 + i, 5, 6) for i in range(12)]
    answers = ask(endpoint, [question(token_ids=prompt) for prompt in prompts], at_once=6)
    expected = [
        tuple(greedy_reference(request(prompt_token_ids=prompt)))  # type: ignore[arg-type]
        for prompt in prompts
    ]
    assert [answer.token_ids for answer in answers] == expected


def test_a_refusal_is_told(endpoint: InProcess) -> None:
    answer = record(endpoint, question(max_tokens=1000))
    assert answer.ending == "failed"
    assert answer.error is not None and answer.error.startswith("max_tokens is 1000; prompt and")


def test_an_answer_whose_pair_is_closed_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(loop: PairLoop, request: Request, *, on_chunk: Any, on_refusal: Any) -> None:
        on_chunk(Chunk(request_id=request.request_id, text="w7", token_ids=(7,)))
        loop.close()
        on_chunk(Chunk(request_id=request.request_id, finish_reason="cancelled"))

    monkeypatch.setattr(PairLoop, "submit", submit)
    endpoint = InProcess(make_pair(TableModel(target_rule), TableModel(half_rule)), Words())
    answer = record(endpoint, question())
    assert (answer.token_ids, answer.ending) == ((7,), "cut")
    assert answer.error == "the pair was closed before the end of the answer"


def test_an_answer_that_nobody_wants_is_cancelled() -> None:
    pair = make_pair(TableModel(target_rule), TableModel(half_rule))
    endpoint = InProcess(pair, Words())
    stream = endpoint.stream(question(max_tokens=400))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert record(endpoint, question()).token_ids == REFERENCE
    endpoint.close()
    assert not pair.has_work()
    assert pair.num_steps < 400


def test_a_fault_of_the_pair_is_told() -> None:
    pair = make_pair(TableModel(target_rule), TableModel(half_rule))

    def broken() -> Sequence[Chunk]:
        raise ZeroDivisionError("as asked")

    pair.step = broken  # type: ignore[method-assign,assignment]
    endpoint = InProcess(pair, Words())
    answer = record(endpoint, question())
    endpoint.close()
    assert (answer.ending, answer.error) == (
        "failed",
        "the request failed: the draft-verify loop failed: ZeroDivisionError: as asked",
    )


def test_a_built_pair_is_loaded_with_other_options(tmp_path: Path) -> None:
    config = load_config(ROOT / "configs" / "quickstart.yaml", [f"output_dir={tmp_path}"])
    execution.run(planning.plan(config), Quiet())
    endpoint = InProcess.load(repositories.built_repository(config), adaptive=False)
    try:
        asked = Question(text="def fibonacci(n):", max_tokens=12)
        drafted = record(endpoint, asked)
        alone = record(endpoint, Question(text=asked.text, max_tokens=12, num_draft_tokens=0))
    finally:
        endpoint.close()
    assert drafted.token_ids == alone.token_ids
    assert drafted.usage is not None and (drafted.usage.total_draft_tokens or 0) > 0
    assert alone.usage is not None and alone.usage.total_draft_tokens == 0
