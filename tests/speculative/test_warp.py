import numpy as np
import pytest

from specpipe.errors import RequestError
from specpipe.speculative.request import Sampling
from specpipe.speculative.warp import banned_token_ids, softmax, warp

INF = float("inf")


def scores(logits: list[float], sampling: Sampling, **context: object) -> list[float]:
    arguments = {"prompt": [0], "output": [], **context}
    return warp(logits, sampling, **arguments).tolist()  # type: ignore[arg-type]


def test_greedy_keeps_raw_logits() -> None:
    assert scores([1.0, -2.0], Sampling(temperature=0.0, top_k=5, top_p=0.1)) == [1.0, -2.0]


def test_temperature_divides() -> None:
    assert scores([1.0, -2.0], Sampling(temperature=0.5)) == [2.0, -4.0]


def test_top_k_keeps_k_and_lower_ids_at_ties() -> None:
    kept = scores([3.0, 5.0, 3.0, 3.0], Sampling(temperature=1.0, top_k=2))
    assert kept == [3.0, 5.0, -INF, -INF]


def test_top_p_keeps_the_token_that_crosses() -> None:
    logits = np.log([0.5, 0.3, 0.15, 0.05]).tolist()
    kept = scores(logits, Sampling(temperature=1.0, top_p=0.6))
    assert [k > -INF for k in kept] == [True, True, False, False]


def test_top_p_acts_on_what_top_k_left() -> None:
    # Of 0.5, 0.3, 0.2 top-k leaves 0.5 and 0.3, that is 0.625 and 0.375: top-p 0.6 then needs the
    # first alone.
    logits = np.log([0.5, 0.3, 0.2]).tolist()
    kept = scores(logits, Sampling(temperature=1.0, top_k=2, top_p=0.6))
    assert [k > -INF for k in kept] == [True, False, False]


def test_min_p_is_relative_to_the_best() -> None:
    logits = np.log([0.5, 0.3, 0.2]).tolist()
    kept = scores(logits, Sampling(temperature=1.0, min_p=0.5))
    assert [k > -INF for k in kept] == [True, True, False]


def test_repetition_penalty_sees_prompt_and_output() -> None:
    sampling = Sampling(repetition_penalty=2.0)
    assert scores([1.0, 1.0, -1.0, 1.0], sampling, prompt=[0], output=[2, 2]) == [
        0.5,
        1.0,
        -2.0,
        1.0,
    ]


def test_presence_and_frequency_penalties_see_output_only() -> None:
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    assert scores([1.0, 1.0, 1.0], sampling, prompt=[0, 0], output=[1, 2, 2]) == [1.0, 0.25, 0.0]


def test_logit_bias_is_added_after_penalties_and_before_temperature() -> None:
    sampling = Sampling(
        temperature=0.5, repetition_penalty=2.0, logit_bias=((0, -3.0), (2, 1.5), (2, 0.5))
    )
    # Of the score 4.0, not of 1.0, the penalty leaves half.
    assert scores([4.0, 1.0, 1.0], sampling, prompt=[0]) == [-2.0, 2.0, 6.0]
    assert scores([4.0, 1.0], Sampling(logit_bias=((0, -100.0),))) == [-96.0, 1.0]


def test_a_biased_token_that_is_banned_stays_banned() -> None:
    sampling = Sampling(logit_bias=((1, 100.0),), bad_words=((1,),))
    assert scores([1.0, 2.0], sampling) == [1.0, -INF]


def test_min_tokens_bans_end_ids_until_reached() -> None:
    sampling = Sampling(min_tokens=2)
    short = scores([1.0, 2.0], sampling, output=[0], end_token_ids={1})
    assert short == [1.0, -INF]
    assert scores([1.0, 2.0], sampling, output=[0, 0], end_token_ids={1}) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("prompt", "output", "banned"),
    [
        ([9], [], [3]),
        ([9, 1], [], [3, 2]),
        ([9], [1], [3, 2]),
        ([9, 4, 1], [2], [3]),
        ([5, 4], [1], [3, 2, 6]),
    ],
)
def test_bad_words_ban_the_token_that_completes_them(
    prompt: list[int], output: list[int], banned: list[int]
) -> None:
    bad_words = ((3,), (1, 2), (5, 4, 1, 6))
    assert banned_token_ids(bad_words, prompt, output) == banned


def test_softmax_of_excluded_is_zero() -> None:
    assert softmax(np.array([0.0, -INF, 0.0])).tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0; it must be 0 (greedy) or a positive number"),
        (
            {"temperature": float("nan")},
            "temperature is nan; it must be 0 (greedy) or a positive number",
        ),
        ({"top_p": 1.5}, "top_p is 1.5; it must be between 0 (exclusive) and 1"),
        ({"top_k": -1}, "top_k is -1; it must be 0 (off) or a positive count"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be a positive number"),
        ({"seed": 2**64}, "seed is 18446744073709551616; it must be an unsigned 64-bit integer"),
        ({"bad_words": ((),)}, "bad_words has an empty entry; leave it out"),
        (
            {"logit_bias": ((1, 2.0), (7, float("inf")))},
            "logit_bias of token id 7 is inf; it must be a finite number",
        ),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        Sampling(**settings)  # type: ignore[arg-type]
    assert str(caught.value) == message
