from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from specpipe.errors import ConfigError
from specpipe.evaluate.prompts import (
    BUILT_IN,
    Lengths,
    Prompt,
    as_messages,
    digest,
    iterate_prompts,
    load_prompts,
    read_json_lines,
    with_lengths,
    with_max_tokens,
)
from specpipe.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]


class Characters:
    """A tokenizer whose tokens are characters, but "th" is one."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text.replace("th", "\0")]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids)).replace("\0", "th")


def file(tmp_path: Path, text: str, name: str = "mine.jsonl") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_set_is_there(name: str) -> None:
    found = load_prompts(name)
    assert found.source == name
    assert len(found.prompts) >= 8
    assert all(prompt.text and prompt.kind == name for prompt in found.prompts)
    assert len({prompt.text for prompt in found.prompts}) == len(found.prompts)


def test_the_benchmarks_file_is_one(tmp_path: Path) -> None:
    found = load_prompts(ROOT / "benchmarks" / "prompts.jsonl", limit=2)
    assert [(prompt.name, prompt.kind) for prompt in found.prompts] == [
        ("textwrap.py:1-13", "code_head"),
        ("heapq.py:1-7", "code_head"),
    ]


def test_a_line_may_have_a_prompt_alone(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        '{"prompt": "one\u2028two"}\n\n'
        '{"messages": [{"role": "user", "content": "hi"}], "name": "n", "kind": "k", '
        '"max_tokens": 7}\n{"prompt": "three", "name": "m", "group": "a.py"}',
    )
    hi = {"role": "user", "content": "hi"}
    assert load_prompts(path).prompts == (
        Prompt(name="mine.jsonl:1", kind="mine", text="one\u2028two"),
        Prompt(name="n", kind="k", messages=(hi,), max_tokens=7, group="n"),
        Prompt(name="m", kind="mine", text="three", group="a.py"),
    )


def test_a_set_is_read_line_by_line(tmp_path: Path) -> None:
    path = file(tmp_path, '{"prompt": "one"}\n{"prompt": 2}\n')
    prompts = iterate_prompts(path)
    assert next(prompts).text == "one"
    with pytest.raises(ConfigError, match=f"^{path}:2: prompt is 2"):
        next(prompts)
    assert [prompt.text for prompt in iterate_prompts(path, limit=1)] == ["one"]


def test_a_text_file_has_a_prompt_on_each_line(tmp_path: Path) -> None:
    path = file(tmp_path, "one\n\n  two\n", "mine.txt")
    assert load_prompts(path).prompts == (
        Prompt(name="mine.txt:1", kind="mine", text="one"),
        Prompt(name="mine.txt:3", kind="mine", text="  two"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", " has no prompts"),
        ("{", ":1: not JSON: Expecting property name"),
        ('\n["x"]', ':2: expected an object such as {"prompt": "…"}'),
        ('{"promt": "x"}', ":1: unknown key 'promt': expected name, kind, group, prompt, mess"),
        ("{}", ":1: expected either prompt or messages"),
        ('{"prompt": "x", "messages": []}', ":1: expected either prompt or messages"),
        ('{"prompt": ""}', ":1: prompt is '': expected a text that is not empty"),
        ('{"prompt": 3}', ":1: prompt is 3: expected a text"),
        ('{"messages": ["hi"]}', ':1: messages[0] must be an object with a "role"'),
        ('{"messages": {"role": "user"}}', ":1: messages must be a list such as [{"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            ":1: messages[0].content[0] is a part of type 'image_url': this model takes text parts",
        ),
        ('{"prompt": "x", "max_tokens": true}', ":1: max_tokens is True: expected a positive"),
        ('{"prompt": "x", "max_tokens": 0}', ":1: max_tokens is 0: expected a positive"),
        ('{"prompt": "x", "name": 1}', ":1: name is 1: expected a text"),
        ('{"prompt": "x", "name": "a"}\n{"prompt": "y", "name": "a"}', ": two prompts are named"),
        ('{"prompt": "\\ud800"}', ":1: prompt holds half of a character (a surrogate)"),
        ('{"prompt": "x", "name": "\\ud800"}', ":1: name holds half of a character"),
        ('{"prompt": "x", "group": "\\udfff"}', ":1: group holds half of a character"),
        (
            '{"messages": [{"role": "user", "content": "\\ud800"}]}',
            ":1: messages holds half of a character",
        ),
    ],
)
def test_a_fault_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = file(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        load_prompts(path)
    assert str(raised.value).startswith(f"{path}{message}")


def test_a_value_of_any_size_is_named_in_a_short_sentence(tmp_path: Path) -> None:
    for line in (
        {"prompt": {"a": "k" * 10**5}},
        {"k" * 10**5: 1},
        {"prompt": "x", "name": [1] * 9**5},
    ):
        with pytest.raises(ConfigError) as raised:
            load_prompts(file(tmp_path, json.dumps(line)))
        assert len(str(raised.value)) < 500


@pytest.mark.parametrize("name", ["marked.txt", "marked.jsonl"])
def test_files_of_windows_are_read_without_their_marks(tmp_path: Path, name: str) -> None:
    lines = [json.dumps({"prompt": text}) if name.endswith("l") else text for text in ("x", "y")]
    (tmp_path / name).write_bytes("\ufeff{}\r\n{}\r\n".format(*lines).encode())
    assert [prompt.text for prompt in load_prompts(tmp_path / name).prompts] == ["x", "y"]


def test_a_name_that_is_no_utf_8_can_be_written(tmp_path: Path) -> None:
    path = file(tmp_path, "one", os.fsdecode(b"a\xff.txt"))
    (prompt,) = load_prompts(path).prompts
    assert (prompt.name, prompt.kind) == ("a\ufffd.txt:1", "a\ufffd")


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ConfigError, match="pipe.jsonl cannot be read: it is no regular file"):
        load_prompts(tmp_path / "pipe.jsonl")


def test_what_is_no_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^chats is no set of prompts: expected one of chat, cod"):
        load_prompts("chats")
    with pytest.raises(ConfigError, match=r"missing.jsonl cannot be read: No such file"):
        load_prompts(tmp_path / "missing.jsonl")


def test_json_lines_keep_keys_of_others(tmp_path: Path) -> None:
    path = file(tmp_path, '{"prompt": "x", "expected": "y"}\n')
    assert list(read_json_lines(path)) == [(f"{path}:1", {"prompt": "x", "expected": "y"})]


def test_the_digest_is_of_what_is_asked() -> None:
    prompt = Prompt(name="a", kind="k", text="x")
    renamed = Prompt(name="b", kind="l", text="x")
    # printf '[["x", null, null]]' | sha256sum
    expected = "94c7dd762fccf24a553278fdaf9f51602cccac6b2d6ba93465f8e9688065e31f"
    assert digest([prompt]) == digest([renamed]) == expected
    others = [
        [prompt, prompt],
        [Prompt(name="a", kind="k", text="y")],
        [Prompt(name="a", kind="k", text="x", max_tokens=3)],
        as_messages([prompt]),
    ]
    assert len({digest([prompt]), *map(digest, others)}) == 5


def test_a_text_becomes_a_users_message() -> None:
    messages = ({"role": "system", "content": "s"},)
    given = [Prompt(name="a", kind="k", text="x"), Prompt(name="b", kind="k", messages=messages)]
    assert as_messages(given) == (
        Prompt(name="a", kind="k", messages=({"role": "user", "content": "x"},)),
        given[1],
    )


@pytest.mark.parametrize(
    ("text", "low", "high"), [("128", 128, 128), ("64-256", 64, 256), ("3-3", 3, 3)]
)
def test_lengths_are_fixed_or_a_range(text: str, low: int, high: int) -> None:
    assert Lengths.parse(text) == Lengths(low, high)
    assert str(Lengths.parse(text)) in (text, str(low))


@pytest.mark.parametrize("text", ["", "0", "x", "5-3", "1-2-3", "-4", "1.5"])
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no length: expected tokens as in 128, or 64-256"):
        Lengths.parse(text)


def test_drawn_lengths_repeat_with_their_seed_and_fill_the_range() -> None:
    lengths = Lengths(3, 6)
    drawn = lengths.draw(200, seed=1)
    assert drawn == lengths.draw(200, seed=1) != lengths.draw(200, seed=2)
    assert set(drawn) == {3, 4, 5, 6}
    assert Lengths(5, 5).draw(3, seed=1) == [5, 5, 5]


def test_answers_get_their_lengths_whatever_the_file_says() -> None:
    given = [Prompt(name=n, kind="k", text="x", max_tokens=9) for n in "ab"]
    assert [p.max_tokens for p in with_max_tokens(given, Lengths(4, 4), seed=0)] == [4, 4]


def test_prompts_get_their_lengths() -> None:
    given = [Prompt(name="a", kind="k", text="abcdef"), Prompt(name="b", kind="k", text="xyz")]
    short = with_lengths(given, Lengths(4, 4), Characters(), seed=0)
    assert [prompt.text for prompt in short] == ["abcd", "xyz\n"]
    long = with_lengths(given, Lengths(17, 17), Characters(), seed=0)
    assert [prompt.text for prompt in long] == ["abcdef\n\nxyz\n\nabcd", "xyz\n\nabcdef\n\nxyz\n"]


def test_a_length_that_cannot_be_met_is_missed_by_little() -> None:
    """Four tokens of "tth" and on: cut after its "t", the rest is as many; "th" stays whole."""
    given = [Prompt(name="a", kind="k", text="aathb")]
    assert with_lengths(given, Lengths(3, 3), Characters(), seed=0)[0].text == "aath"


def test_lengths_hold_with_a_real_tokenizer() -> None:
    tokenizer = Tokenizer.load(ROOT / "models" / "python-code" / "target")
    prompts = load_prompts("code").prompts
    lengths = Lengths(20, 300)
    resized = with_lengths(prompts, lengths, tokenizer, seed=3)
    wanted = lengths.draw(len(prompts), seed=3)
    found = [len(tokenizer.encode(prompt.text or "")) for prompt in resized]
    assert max(abs(a - b) for a, b in zip(wanted, found, strict=True)) <= 2


def test_messages_keep_their_length() -> None:
    given = as_messages([Prompt(name="a", kind="k", text="x")])
    with pytest.raises(ConfigError, match="^a has messages: only the length of a text can be chan"):
        with_lengths(given, Lengths(4, 4), Characters(), seed=0)
