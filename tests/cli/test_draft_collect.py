"""`specpipe draft collect`, with a toy pair in this process and with servers that a test writes."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specpipe.build import execution, planning
from specpipe.build.load import load_config
from specpipe.cli.group import main
from specpipe.evaluate.endpoints.base import Question, record
from specpipe.evaluate.endpoints.in_process import InProcess
from specpipe.training.collection import Answer, Collection
from specpipe.training.collection_writer import CollectionWriter
from tests.evaluate.endpoints.fake_openai import DONE, Refusal, completion, serving, summary
from tests.quiet import Quiet
from tests.toy import write_toy_checkpoint
from tests.toy_tokenizers import byte_level

YAML = """
name: toy
draft: {checkpoint: checkpoint}
target: {checkpoint: checkpoint}
speculation: {num_draft_tokens: 2}
engine: {max_batch_size: 4, max_seq_len: 64}
"""
TEMPLATE = "{% for message in messages %}[{{ message.content }}]{% endfor %}>"
PROMPTS = [
    {"prompt": "alpha", "group": "a.py"},
    {"prompt": "beta", "name": "second", "max_tokens": 3},
    {"messages": [{"role": "user", "content": "gamma"}]},
    {"prompt": "alpha", "group": "elsewhere.py"},
    {"prompt": "delta"},
]
SETTINGS = ("--max-tokens", "6", "--temperature", "0", "--temperature", "1.5", "--samples", "2")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A built pair: its YAML."""
    folder = tmp_path_factory.mktemp("toy")
    checkpoint = write_toy_checkpoint(folder / "checkpoint")
    (checkpoint / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A toy\n")
    byte_level().save(str(checkpoint / "tokenizer.json"))
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "toy.yaml").write_text(YAML)
    config = load_config(folder / "toy.yaml", [])
    execution.run(planning.plan(config), Quiet())
    return folder / "toy.yaml"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(prompt)}\n" for prompt in PROMPTS))
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["draft", "collect", *map(str, arguments)])


def answers(folder: Path) -> list[Answer]:
    return list(Collection.open(folder).answers())


def shard(folder: Path) -> bytes:
    return (folder / "answers-00000.jsonl").read_bytes()


def ids(text: str) -> tuple[int, ...]:
    return tuple(byte_level().encode(text).ids)


def test_each_prompt_is_asked_as_it_is_served(pair: Path, prompts: Path, tmp_path: Path) -> None:
    listed = ("--top-log-probs", "2", "--licence", "mine", "--output", tmp_path / "out", "--json")
    result = run("--config", pair, "--prompts", prompts, *SETTINGS, *listed)
    assert result.exit_code == 0, result.output
    found = answers(tmp_path / "out")
    greedy = found[::3]
    assert [answer.prompt_token_ids for answer in greedy] == [
        ids("alpha"),
        ids("beta"),
        ids("[gamma]>"),
        ids("delta"),
    ]
    own = [answer.id.removesuffix("-t0") for answer in greedy]
    assert [answer.group for answer in greedy] == ["a.py", "second", own[2], own[3]]
    assert [len(answer.token_ids) for answer in greedy] == [6, 3, 6, 6]
    assert [answer.id for answer in found[:3]] == [f"{own[0]}-t0"] + [
        f"{own[0]}-t1.5-{number}" for number in range(2)
    ]
    assert found[0].sampling == {"temperature": 0.0}
    assert found[1].sampling.keys() == {"temperature", "seed"}
    assert found[1].token_ids != found[2].token_ids
    for answer in greedy:
        assert [row[0][0] for row in answer.top_log_probs] == list(answer.token_ids)
    config = load_config(pair, [])
    endpoint = InProcess.load(config.artifacts.repository)
    alone = record(endpoint, Question(text="alpha", max_tokens=6, num_draft_tokens=0))
    endpoint.close()
    assert found[0].token_ids == alone.token_ids
    info = json.loads(result.stdout)
    assert info == json.loads((tmp_path / "out" / "collection.json").read_text())
    assert (info["num_prompts"], info["num_answers"], info["is_complete"]) == (4, 12, True)
    assert info["licences"]["prompts"] == "mine"
    assert info["licences"]["target"]["declared"] == ["apache-2.0"]
    assert info["answered_by"]["pair"] == "toy"
    assert info["top_log_probs"]["count"] == 2


def test_an_interrupted_run_goes_on_to_the_same_bytes(
    pair: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("--config", pair, "--prompts", prompts, *SETTINGS)
    assert run(*asked, "--output", tmp_path / "whole").exit_code == 0
    broken = tmp_path / "broken"
    add = CollectionWriter.add

    def interrupted(self: CollectionWriter, answer: Answer) -> bool:
        if self.info.num_answers == 5:
            raise KeyboardInterrupt
        return add(self, answer)

    monkeypatch.setattr(CollectionWriter, "add", interrupted)
    assert run(*asked, "--output", broken).exit_code == 130
    monkeypatch.undo()
    assert len(answers(broken)) == 5
    with (broken / "answers-00000.jsonl").open("ab") as file:
        file.write(b'{"id": "torn')
    result = run(*asked, "--output", broken, "--concurrency", "1")
    assert result.exit_code == 0
    assert ": 5 answers so far" in result.stderr
    assert shard(broken) == shard(tmp_path / "whole")
    assert Collection.open(broken).info.num_answers == 12


def test_the_collection_is_beside_the_repository_and_keeps_to_its_settings(
    pair: Path, prompts: Path
) -> None:
    asked = ("--config", pair, "--prompts", prompts, "--max-tokens", "2")
    result = run(*asked)
    folder = load_config(pair, []).artifacts.collection
    assert result.stdout.splitlines() == [
        "4 answers of 9 tokens to 4 prompts",
        "licences: prompts not given; target apache-2.0",
        f"written: {folder}",
    ]
    before = shard(folder)
    assert run(*asked).exit_code == 0
    assert shard(folder) == before
    result = run(*asked[:-1], "3", "--temperature", "0.5")
    assert (result.exit_code, result.stderr) == (
        1,
        f"Error: {folder} was collected otherwise: max_tokens was 2, is now 3; temperatures was "
        "[0.0], is now [0.5]: collect into another folder (--output), or as before\n",
    )


def test_a_prompt_that_is_too_long_is_left_out_and_told(pair: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"{'x' * length}\n" for length in (*range(1, 12), 80)))
    out = tmp_path / "out"
    result = run("--config", pair, "--prompts", path, "--max-tokens", "1", "--output", out)
    assert result.exit_code == 0
    assert "1 question without an answer: left-out.jsonl says why" in result.stdout
    assert json.loads((out / "left-out.jsonl").read_text()) == {
        "id": "prompts.txt:12",
        "reason": "failed",
        "prompt": "prompts.txt:12",
        "error": "the prompt has 80 tokens; prompt and output together may have 64 "
        "(engine.max_seq_len)",
    }
    assert len(answers(out)) == 11


def test_lines_of_a_log_of_requests_are_prompts(pair: Path, tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    request = {
        "model": "gpt",
        "messages": [{"role": "user", "content": "gamma"}],
        "temperature": 0.7,
        "tools": [],
        "tool_choice": None,
        "response_format": {"type": "text"},
    }
    completion = {"model": "gpt", "prompt": "beta", "max_tokens": 2, "n": 4, "stop": ["x"]}
    lines = [{**request, "max_tokens": None, "max_completion_tokens": 3}, completion]
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    asked = ("--config", pair, "--prompts", log, "--max-tokens", "6", "--output", tmp_path / "out")
    assert run(*asked).exit_code == 0
    found = [(one.prompt_token_ids, len(one.token_ids)) for one in answers(tmp_path / "out")]
    assert found == [(ids("[gamma]>"), 3), (ids("beta"), 2)]
    assert {one.sampling["temperature"] for one in answers(tmp_path / "out")} == {0.0}
    for key, value in (
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "json_object"}),
        ("add_generation_prompt", False),
    ):
        log.write_text(f"{json.dumps(completion)}\n{json.dumps({**request, key: value})}\n")
        result = run(*asked[:-1], tmp_path / key)
        assert (result.exit_code, result.stderr) == (
            1,
            f"Error: {log}:2: {key} changes what the target reads or may say, and cannot be asked "
            f"with: leave this line out, or {key}, to ask without it\n",
        )
    log.write_text('{"prompt": "x", "temprature": 1}\n')
    assert ":1: unknown key 'temprature': expected name" in run(*asked).stderr


def listed(log_probs: dict[int, float]) -> dict[str, Any]:
    """Returns a token with what it is one of, as vLLM's completions have it."""
    row = {f"token_id:{token_id}": log_prob for token_id, log_prob in log_probs.items()}
    return {"token_ids": [9], "logprobs": {"top_logprobs": [row]}}


Respond = Callable[[dict[str, Any]], Any]


def ask_server(respond: Respond, pair: Path, prompts: Path, out: Path, *more: str) -> Result:
    with serving(respond) as server:
        tokenizer = pair.parent / "checkpoint"
        url = ("--url", server.url, "--model", "m", "--tokenizer", tokenizer)
        return run(*url, "--prompts", prompts, "--max-tokens", "6", "--output", out, *more)


def test_a_server_sends_ids_or_text(pair: Path, prompts: Path, tmp_path: Path) -> None:
    def respond(body: dict[str, Any]) -> Any:
        chunk = completion("xyz", finish_reason="stop")
        if tuple(body["prompt"]) == ids("beta"):
            chunk["choices"][0]["token_ids"] = [9, 8, 7]
        return [chunk, DONE]

    result = ask_server(respond, pair, prompts, tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "3 answers came as text alone" in result.stdout
    text = (ids("xyz"), True)
    found = [(one.token_ids, one.is_from_text) for one in answers(tmp_path / "out")]
    assert found == [text, ((9, 8, 7), False), text, text]


def test_what_a_server_made_of_the_prompt_is_what_counts(
    pair: Path, prompts: Path, tmp_path: Path
) -> None:
    def tells(body: dict[str, Any]) -> Any:
        chunk = completion("x", finish_reason="stop")
        chunk["choices"][0]["prompt_token_ids"] = [1, 2, 3]
        return [chunk, DONE]

    def counts(body: dict[str, Any]) -> Any:
        return [completion("x", finish_reason="stop"), summary(4, 1), DONE]

    assert (
        ask_server(tells, pair, prompts, tmp_path / "a", "--as-text", "--limit", "1").exit_code == 0
    )
    assert [one.prompt_token_ids for one in answers(tmp_path / "a")] == [(1, 2, 3)]
    result = ask_server(counts, pair, prompts, tmp_path / "b", "--as-text", "--limit", "1")
    assert (result.exit_code, result.stderr) == (
        1,
        "Error: 1 of 1 questions have no answer, the first since: the server read 4 tokens of a "
        "prompt of 5: its chat template, special tokens or tokenizer are not those of the target; "
        "the same command asks them again\n",
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_token_ids": [-5]}, "the prompt that was read has token id -5, which is none of"),
        ({"token_ids": [9, 10**9]}, "the answer has token id 1000000000, which is none of the to"),
        (listed({9: math.nan}), "make nan as probabilities of token 0, expected at most 1"),
        (listed({9: 5.0}), "make 2.718 as probabilities of token 0, expected at most 1"),
        (listed({9: -math.inf}), "list nothing for token 0"),
        (listed({9: -0.1, 10**11: -3.0}), "list what is no token id for token 0"),
    ],
)
def test_what_could_not_be_read_again_is_no_answer(
    fields: dict[str, Any], message: str, pair: Path, prompts: Path, tmp_path: Path
) -> None:
    def respond(body: dict[str, Any]) -> Any:
        chunk = completion("x", finish_reason="stop")
        chunk["choices"][0] |= {**listed({9: -0.1}), **fields}
        return [chunk, DONE]

    asked = ("--limit", "1", "--top-log-probs", "2")
    result = ask_server(respond, pair, prompts, tmp_path / "out", *asked)
    assert (result.exit_code, answers(tmp_path / "out")) == (1, [])
    assert message in result.stderr


def test_temperatures_that_are_nearly_one_are_asked_apart(
    pair: Path, prompts: Path, tmp_path: Path
) -> None:
    drawn = ("--temperature", "0.7", "--temperature", "0.70000001", "--limit", "1")
    result = run("--config", pair, "--prompts", prompts, "--output", tmp_path / "out", *drawn)
    assert result.exit_code == 0, result.output
    asked = (tmp_path / "out" / "answers-00000.jsonl").read_text()
    if (left_out := tmp_path / "out" / "left-out.jsonl").exists():
        asked += left_out.read_text()
    assert '-t0.7-0"' in asked
    assert '-t0.70000001-0"' in asked


def test_the_same_answer_is_kept_once_and_what_failed_is_asked_again(
    pair: Path, prompts: Path, tmp_path: Path
) -> None:
    fails = True
    num_asked = 0

    def respond(body: dict[str, Any]) -> Any:
        nonlocal num_asked
        num_asked += 1
        if fails and tuple(body["prompt"]) == ids("delta"):
            return Refusal(503, "busy")
        return [completion("x", finish_reason="stop"), DONE]

    # Each server has a port of its own, which is not what this is about.
    with serving(respond) as server:
        tokenizer = pair.parent / "checkpoint"
        url = ("--url", server.url, "--model", "m", "--tokenizer", tokenizer)
        sampled = ("--temperature", "1", "--samples", "2", "--output", tmp_path / "out")
        asked = (*url, "--prompts", prompts, *sampled)
        result = run(*asked)
        assert result.exit_code == 1
        assert "2 of 8 questions have no answer" in result.stderr
        fails, num_asked = False, 0
        result = run(*asked)
    assert (result.exit_code, num_asked) == (0, 2)
    info = Collection.open(tmp_path / "out").info
    assert (info.num_answers, info.num_duplicates, info.num_failed) == (4, 4, 0)


def test_a_server_that_does_not_answer_ends_the_run(pair: Path, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"openai+http://127.0.0.1:{listener.getsockname()[1]}"
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"number {number}\n" for number in range(50)))
    server = ("--url", url, "--model", "m", "--config", pair)
    result = run(*server, "--prompts", path, "--output", tmp_path / "out")
    assert result.exit_code == 1
    assert result.stderr.startswith(
        "Error: the last 32 questions failed alike, so no more are asked: "
    )
    assert not Collection.open(tmp_path / "out").info.is_complete


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Give --config, --url or both."),
        (("--url", "http://h:1"), "--url without --config needs --tokenizer and --output."),
        (("--config", "x.yaml", "--as-text"), "--tokenizer and --as-text need --url."),
        (
            ("--config", "x.yaml", "--top-p", "0.5"),
            "--top-k and --top-p need --temperature: greedy has no use for them.",
        ),
        (("--config", "x.yaml", "--samples", "2"), "--samples needs a --temperature above 0."),
    ],
)
def test_options_that_do_not_go_together(arguments: tuple[str, ...], message: str) -> None:
    result = run("--prompts", "code", *arguments)
    assert result.exit_code == 2
    assert f"Error: {message}\n" in result.stderr
