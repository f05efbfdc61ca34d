"""A collection: written, interrupted, gone on with, read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, cast

import pytest

from specpipe.errors import ConfigError
from specpipe.training import collection_writer
from specpipe.training.collection import (
    Answer,
    Collection,
    CollectionInfo,
    open_collections,
    read_answers,
)
from specpipe.training.collection_writer import open_writer

INFO = CollectionInfo(
    answered_by={"endpoint": "in process"},
    tokenizer_digest="ab",
    settings={"temperatures": [0.0], "max_tokens": 8},
    prompts={"source": "code", "digest": "cd"},
)


def answer(number: int, token_ids: tuple[int, ...] = (7, 8)) -> Answer:
    return Answer(
        id=f"{number}-t0",
        prompt_token_ids=(1, number),
        token_ids=token_ids,
        finish_reason="stop",
        sampling={"temperature": 0.0},
        group=f"file{number}.py",
    )


def write(folder: Path, answers: Iterable[Answer], **options: int) -> CollectionInfo:
    """Collects what is not there yet, to the end."""
    with open_writer(folder, INFO, **options) as writer:
        for one in answers:
            if not writer.is_asked(one.id):
                writer.add(one)
        writer.complete(num_prompts=3)
        return writer.info


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("answers-*"))}


def test_what_was_written_is_read_in_its_order(tmp_path: Path) -> None:
    answers = [
        replace(answer(1), top_log_probs=(((7, -0.1), (9, -2.5)), ((8, -0.2), (7, -3.0)))),
        replace(answer(2), is_from_text=True, finish_reason=None),
    ]
    write(tmp_path, answers)
    collection = Collection.open(tmp_path)
    assert list(collection.answers()) == answers
    info = collection.info
    assert (info.num_answers, info.num_prompt_tokens, info.num_tokens) == (2, 4, 4)
    assert (info.num_from_text, info.is_complete) == (1, True)


def test_a_killed_run_that_is_gone_on_with_leaves_the_same_bytes(tmp_path: Path) -> None:
    answers = [answer(number) for number in range(6)]
    whole = write(tmp_path / "whole", answers, shard_bytes=300)
    broken = tmp_path / "broken"
    with pytest.raises(KeyboardInterrupt), open_writer(broken, INFO, shard_bytes=300) as writer:
        for one in answers[:4]:
            writer.add(one)
        raise KeyboardInterrupt
    assert not Collection.open(broken).info.is_complete
    last = sorted(shards(broken))[-1]
    with (broken / last).open("ab") as file:
        file.write(answers[4].to_line()[:20])  # as a kill in the middle of a write leaves it
    assert list(Collection.open(broken).answers()) == answers[:4]
    assert write(broken, answers, shard_bytes=300) == whole
    assert len(shards(broken)) > 1
    assert shards(broken) == shards(tmp_path / "whole")


def test_the_same_answer_to_the_same_prompt_is_kept_once_and_not_asked_again(
    tmp_path: Path,
) -> None:
    answers = [answer(1), replace(answer(1), id="1-t1-0"), answer(1, (9,)), answer(2)]
    answers[2] = replace(answers[2], id="1-t1-1")
    for _ in range(2):
        info = write(tmp_path, answers)
        assert (info.num_answers, info.num_duplicates) == (3, 1)
    with open_writer(tmp_path, INFO) as writer:
        assert all(writer.is_asked(one.id) for one in answers)


def test_what_failed_is_listed_and_asked_again(tmp_path: Path) -> None:
    with open_writer(tmp_path, INFO) as writer:
        writer.fail("1-t0", "prompts.jsonl:3", "the server broke off")
        writer.save()
        assert writer.info.num_failed == 1
    (line,) = (tmp_path / "left-out.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "id": "1-t0",
        "reason": "failed",
        "prompt": "prompts.jsonl:3",
        "error": "the server broke off",
    }
    with open_writer(tmp_path, INFO) as writer:
        assert not writer.is_asked("1-t0")
        assert writer.info.num_failed == 0


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        (
            replace(INFO, settings={"temperatures": [0.0], "max_tokens": 9}),
            "max_tokens was 8, is now 9",
        ),
        (replace(INFO, answered_by={"endpoint": "x"}), "endpoint was 'in process', is now 'x'"),
        (replace(INFO, tokenizer_digest="ef"), "the tokenizer is another one"),
    ],
)
def test_a_collection_is_not_gone_on_with_otherwise(
    changed: CollectionInfo, difference: str, tmp_path: Path
) -> None:
    write(tmp_path, [answer(1)])
    with pytest.raises(ConfigError) as caught, open_writer(tmp_path, changed):
        pass
    assert str(caught.value) == (
        f"{tmp_path} was collected otherwise: {difference}: collect into another folder "
        "(--output), or as before"
    )
    assert Collection.open(tmp_path).info.is_complete


def test_what_nothing_was_answered_to_may_be_asked_otherwise(tmp_path: Path) -> None:
    other = replace(INFO, answered_by={"endpoint": "x"})
    with pytest.raises(KeyboardInterrupt), open_writer(tmp_path / "out", INFO):
        raise KeyboardInterrupt
    assert not (tmp_path / "out").exists()
    with open_writer(tmp_path / "out", INFO) as writer:
        writer.fail("1-t0", "prompts.jsonl:3", "the server broke off")
    with open_writer(tmp_path / "out", other) as writer:
        assert writer.info.answered_by == {"endpoint": "x"}
        assert writer.info.num_failed == 0


def test_two_processes_do_not_write_one_collection(tmp_path: Path) -> None:
    with open_writer(tmp_path, INFO), pytest.raises(ConfigError, match="by another process"):
        open_writer(tmp_path, INFO).__enter__()


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk:
        """The shard's file, which has room for ten more bytes."""

        def __init__(self, file: object) -> None:
            self._file = file

        def __getattr__(self, name: str) -> object:
            return getattr(self._file, name)

        def write(self, data: bytes) -> int:
            if len(data) <= 10:
                raise OSError(28, "No space left on device")
            return self._file.write(data[:-10])  # type: ignore[attr-defined, no-any-return]

    append = collection_writer._append
    with pytest.raises(OSError, match="No space"), open_writer(tmp_path, INFO) as writer:
        writer.add(answer(1))
        monkeypatch.setattr(
            collection_writer,
            "_append",
            lambda file, line: append(cast(BinaryIO, FullDisk(file)), line),
        )
        writer.add(answer(2))
    assert list(shards(tmp_path).values()) == [answer(1).to_line()]
    assert list(Collection.open(tmp_path).answers()) == [answer(1)]


def _without_a_key(line: str) -> str:
    fields = json.loads(line)
    del fields["group"]
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda line: line[:-5], "is no answer of a collection: "),
        (_without_a_key, "is no answer of a collection: group: Field required"),
        (
            lambda line: line.replace("[7, 8]", "[7, -8]"),
            "is no answer of a collection: token_ids.1: Input should be greater than or equal to 0",
        ),
        (
            lambda line: json.dumps({**json.loads(line), "top_log_probs": [[[7, -0.5]]]}),
            ": answer 2-t0 has 2 tokens and top_log_probs of 1: expected one entry for each token",
        ),
        *(
            (
                lambda line, token_id=token_id: line.replace("[7, 8]", f"[7, {token_id}]"),
                "is no answer of a collection: token_ids.1: Input should be a valid integer",
            )
            for token_id in ("8.0", "true", '"8"')
        ),
        *(
            (
                lambda line, row=row: json.dumps({**json.loads(line), "top_log_probs": [row, row]}),
                f": top_log_probs of answer 2-t0 {fault}",
            )
            for row, fault in (
                ([], "list nothing for token 0"),
                ([[7, -0.5], [7, -0.5]], "list an id twice for token 0"),
                ([[7, 0.5]], "make 1.649 as probabilities of token 0, expected at most 1"),
                ([[7, -0.1], [8, -0.1]], "make 1.81 as probabilities of token 0"),
            )
        ),
    ],
)
def test_a_damaged_line_is_named(damage: Callable[[str], str], reason: str, tmp_path: Path) -> None:
    write(tmp_path, [answer(1), answer(2), answer(3)])
    shard = tmp_path / "answers-00000.jsonl"
    lines = shard.read_text().splitlines()
    lines[1] = damage(lines[1])
    shard.write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError) as caught:
        list(Collection.open(tmp_path).answers())
    assert str(caught.value).startswith(f"{shard}:2")
    assert reason in str(caught.value)


def test_a_complete_collection_that_lacks_answers_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [answer(number) for number in range(6)], shard_bytes=300)
    (tmp_path / "answers-00001.jsonl").unlink()
    with pytest.raises(ConfigError, match="has 3 answers, but its collection.json says 6"):
        list(Collection.open(tmp_path).answers())


def test_collections_are_read_together_where_their_tokenizers_are_one(tmp_path: Path) -> None:
    write(tmp_path / "a", [answer(1), answer(2)])
    write(tmp_path / "b", [answer(2), answer(3)])
    collections = open_collections([tmp_path / "a", tmp_path / "b"])
    assert list(read_answers(collections)) == [answer(1), answer(2), answer(3)]
    with open_writer(tmp_path / "c", replace(INFO, tokenizer_digest="ef")) as writer:
        writer.save()
    with pytest.raises(ConfigError, match="with different tokenizers"):
        open_collections([tmp_path / "a", tmp_path / "c"])


def test_what_is_no_collection_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no collection, since it has no collection.json"):
        Collection.open(tmp_path)
    (tmp_path / "collection.json").write_text('{"format": 2}')
    with pytest.raises(ConfigError, match="is not what `specpipe draft collect` writes"):
        Collection.open(tmp_path)
