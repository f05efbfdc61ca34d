"""What drafting and copying gain: who is asked when, and what the figures come to."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import cast

import pytest

pytest.importorskip("tritonclient.grpc")

from specpipe.errors import ServerError  # noqa: E402
from specpipe.evaluate.gains import Gain, Way, compare, that_go_on  # noqa: E402
from specpipe.triton.client import Client, Completion  # noqa: E402
from tests.gateway.fake_upstream import statistics  # noqa: E402

PROMPTS = ["one", "two"]


@dataclass
class Clock:
    """Time that passes only while something is answered; `slowness` is of the machine."""

    now: float = 0.0
    slowness: float = 1.0


@dataclass
class FakeClient:
    """Answers of up to 10 tokens: 0.1 s for a prompt, and then what each pass takes."""

    name: str
    clock: Clock
    pass_s: float
    accepted_per_pass: int = 0
    text: str = "same"
    ended: tuple[str, ...] = ()
    asked: list[str] = field(default_factory=list)

    def generate(self, prompt: str, *, max_tokens: int, num_draft_tokens: int | None) -> Completion:
        self.asked.append(f"{prompt} {self.name}")
        num_passes = max(max_tokens // (1 + self.accepted_per_pass), 1)
        self.clock.now += (0.1 + num_passes * self.pass_s) * self.clock.slowness
        counted = replace(
            statistics(3, max_tokens),
            num_steps=num_passes,
            total_accepted_draft_tokens=max_tokens - num_passes,
        )
        reason = "stop" if prompt in self.ended else "length"
        return Completion(text=self.text, finish_reason=reason, statistics=counted)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def ways(*clients: FakeClient) -> list[Way]:
    asked: list[str] = []
    for client in clients:
        client.asked = asked
    return [Way(client.name, cast(Client, client)) for client in clients]


def test_figures_of_passes_leave_out_what_prompts_cost(clock: Clock) -> None:
    alone = FakeClient("alone", clock, pass_s=0.01)
    drafting = FakeClient("drafting", clock, pass_s=0.02, accepted_per_pass=4)
    gains = compare(ways(alone, drafting), PROMPTS, max_tokens=10, num_rounds=3)
    # 10 tokens in 0.1 s + 10 passes of 0.01 s, and in 0.1 s + 2 passes of 0.02 s
    assert [round(gain.rate, 6) for gain in gains] == [50.0, round(10 / 0.14, 6)]
    assert [round(gain.ratio, 6) for gain in gains] == [1.0, round(0.2 / 0.14, 6)]
    assert [gain.tokens_per_pass for gain in gains] == [1.0, 5.0]
    assert [round(gain.pass_time, 6) for gain in gains] == [1.0, 2.0]


def test_each_way_is_the_first_in_its_turn(clock: Clock) -> None:
    asked = ways(*(FakeClient(name, clock, pass_s=0.01) for name in "abc"))
    compare(asked, PROMPTS, max_tokens=10, num_rounds=2)
    log = cast(FakeClient, asked[0].client).asked
    warm, measured = log[:3], log[3:]
    assert warm == ["one a", "one b", "one c"]
    # Each prompt twice in a row: its first token alone, and the whole answer.
    assert measured[::2] == measured[1::2]
    assert [question[-1] for question in measured[::2]] == list("abcbca" + "bcacab")


def test_answers_that_differ_are_no_gain(clock: Clock) -> None:
    wrong = FakeClient("drafting", clock, pass_s=0.01, text="other")
    with pytest.raises(ServerError, match=r"^speculation changed the answer to 'one'$"):
        compare(
            ways(FakeClient("alone", clock, pass_s=0.01), wrong),
            PROMPTS,
            max_tokens=10,
            num_rounds=1,
        )


def test_a_slow_moment_is_no_gain_and_no_loss(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, same = (FakeClient(name, clock, pass_s=0.01) for name in ("alone", "same"))
    generate = FakeClient.generate

    def slow_for_a_while(self: FakeClient, *args: str, **settings: int) -> Completion:
        # The second of three rounds, in which the second way is caught by something else.
        clock.slowness = 5.0 if self is same and 10 < len(self.asked) <= 18 else 1.0
        return generate(self, *args, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeClient, "generate", slow_for_a_while)
    gains = compare(ways(alone, same), PROMPTS, max_tokens=10, num_rounds=3)
    assert gains[1] == Gain("same", *(pytest.approx(x) for x in (50.0, 1.0, 1.0, 1.0)))  # type: ignore[arg-type]


def test_prompts_that_the_target_ends_at_once_are_left_out_and_counted(clock: Clock) -> None:
    client = FakeClient("alone", clock, pass_s=0.01, ended=("two", "four"))
    (alone,) = ways(client)
    texts = ["one", "two", "three", "four", "five"]
    assert that_go_on(alone, texts, 2) == (["one", "three"], 1)
    assert [question.split()[0] for question in client.asked] == ["one", "two", "three"]
    assert that_go_on(alone, texts, 9) == (["one", "three", "five"], 2)
    with pytest.raises(ServerError, match=r"^the target ends all of 2 prompts at once$"):
        that_go_on(alone, ["two", "four"], 2)
