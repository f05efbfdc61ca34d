from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from specpipe.config.sections import CalibrationConfig
from specpipe.errors import ConfigError, RuntimeUnavailable
from specpipe.machine.libraries import with_library
from specpipe.quantization.texts import Texts, check_data, read_texts
from tests.toy_tokenizers import byte_level, words, write_tokenizer

TEMPLATE = "<bos>{% for m in messages %} <turn> {{ m.content }}{% endfor %} <turn>"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Has the tokenizer T250, which puts <bos> (1) first; w4 to w249 are the ids 4 to 249."""
    return write_tokenizer(
        tmp_path / "checkpoint",
        words(),
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=TEMPLATE,
    )


def read(checkpoint: Path, data: str, content: str | bytes, **settings: Any) -> Texts:
    """Writes a data file beside the checkpoint and reads its texts."""
    path = checkpoint.parent / data
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_texts(CalibrationConfig(data=data, **settings), path.parent, checkpoint)


def refusal(checkpoint: Path, data: str, content: str | bytes, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(checkpoint, data, content, **settings)
    return str(caught.value).replace(f"{checkpoint.parent}/", "")


def rows(*values: dict[str, Any]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def test_every_eighth_text_is_held_out(checkpoint: Path) -> None:
    content = "".join(f"w{10 + i} w4\n" for i in range(17))
    texts = read(checkpoint, "data.txt", content)
    assert texts.held_out == ((1, 10, 4), (1, 18, 4), (1, 26, 4))
    assert texts.calibration == tuple((1, 10 + i, 4) for i in range(17) if i not in (0, 8, 16))
    assert texts.description == ("14 texts of data.txt with 42 tokens, and 3 with 9 held out")


def test_no_more_is_read_than_asked_for(checkpoint: Path) -> None:
    content = b"w4 w5 w6 w7 w8 w9 w10 w11 w12 w13 w14 w15 w16 w17 w18 w19 w20\nw5\nw6\n\xff"
    texts = read(checkpoint, "data.txt", content, num_samples=3, max_seq_len=16)
    assert texts.held_out == ((1, *range(4, 19)),)
    assert texts.calibration == ((1, 5), (1, 6))


def test_texts_end_where_the_model_has_no_more_positions(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text('{"max_position_embeddings": 3}')
    texts = read(checkpoint, "data.txt", "w4\nw5 w6 w7 w8\n")
    assert texts.calibration == ((1, 5, 6),)


def test_case_a13_exactly_one_bos_and_the_answer_as_the_model_writes_it(checkpoint: Path) -> None:
    hello = [{"role": "user", "content": "w4"}]
    content = rows(
        {"messages": hello},
        {"messages": [*hello, {"role": "assistant", "content": "w5"}]},
        {"messages": [{"role": "assistant", "content": "w6"}]},
    )
    texts = read(checkpoint, "chat.jsonl", content)
    assert texts.held_out == ((1, 3, 4, 3),)
    assert texts.calibration == ((1, 3, 4, 3, 5), (1, 3, 6, 3))
    assert read(checkpoint, "data.txt", "<bos> w4\nw5\n").held_out == ((1, 4),)


def test_columns_of_jsonl(checkpoint: Path) -> None:
    content = rows({"id": 1, "text": "w4"}, {"id": 2, "text": "w5", "other": "w6"})
    assert read(checkpoint, "a.jsonl", content).calibration == ((1, 5),)
    content = rows({"prompt": "w4", "text": "w5"}, {"prompt": "w6", "text": "w7"})
    assert read(checkpoint, "a.jsonl", content, column="prompt").calibration == ((1, 6),)


def test_empty_rows_are_left_out_and_counted(checkpoint: Path) -> None:
    content = rows({"text": "w4"}, {"text": "  "}, {"text": None}) + "\n" + rows({"text": "w5"})
    texts = read(checkpoint, "a.jsonl", content)
    assert (texts.held_out, texts.calibration) == (((1, 4),), ((1, 5),))
    assert texts.description.endswith("; 3 empty rows left out")
    assert read(checkpoint, "a.txt", "\ufeffw4\r\n\r\nw5").calibration == ((1, 5),)


def test_digest_is_of_the_rows_and_not_of_their_spelling(checkpoint: Path) -> None:
    plain = read(checkpoint, "a.txt", "w4\nw5\n")
    assert plain.digest == read(checkpoint, "b.jsonl", rows({"text": "w4"}, {"text": "w5"})).digest
    assert plain.digest != read(checkpoint, "c.txt", "w4\nw6\n").digest
    assert plain.digest == hashlib.sha256(b'"w4"\n"w5"\n').hexdigest()


@pytest.mark.parametrize(
    ("data", "content", "settings", "message"),
    [
        (
            "a.csv",
            "w4\nw5\n",
            {},
            "calibration.data is a.csv, expected builtin or the name of a .jsonl, .txt or "
            ".parquet file",
        ),
        ("a.txt", "", {}, "a.txt is empty; calibration needs at least 2 texts"),
        (
            "a.txt",
            "w4\n",
            {},
            "a.txt holds one text; calibration needs at least 2, as some are held out to measure "
            "what it costs",
        ),
        (
            "a.txt",
            "\n \n",
            {},
            "a.txt holds no text and 2 empty rows; calibration needs at least 2, as some are held "
            "out to measure what it costs",
        ),
        (
            "a.txt",
            "w4\nw5\n",
            {"column": "text"},
            "calibration.column is 'text', but a.txt has no columns; leave it out",
        ),
        (
            "a.txt",
            b"w4\nw5 \xe4\n",
            {},
            "a.txt:2: byte 0xe4 is not UTF-8; save the file as UTF-8",
        ),
        (
            "a.jsonl",
            rows({"text": "w4"}) + "{'text': 'w5'}\n",
            {},
            "a.jsonl:2: not a row of JSON: Expecting property name enclosed in double quotes: "
            "line 1 column 2 (char 1)",
        ),
        (
            "a.jsonl",
            rows({"text": "w4"}) + '"w5"\n',
            {},
            'a.jsonl:2: the row is \'w5\', expected an object such as {"text": "..."}',
        ),
        (
            "a.jsonl",
            rows({"prompt": "w4", "answer": "w5"}),
            {},
            "a.jsonl:1: there are neither a column text nor messages; set calibration.column to "
            "one of: prompt, answer",
        ),
        (
            "a.jsonl",
            rows({"text": "w4", "messages": []}),
            {},
            "a.jsonl:1: there are both columns text and messages; set calibration.column to one "
            "of: text, messages",
        ),
        (
            "a.jsonl",
            rows({"text": "w4"}, {"prompt": "w5"}),
            {"column": "text"},
            "a.jsonl:2: there is no column 'text'; there are: prompt",
        ),
        (
            "a.jsonl",
            rows({"text": "w4"}, {"text": 5}),
            {},
            "a.jsonl:2: the value is 5, expected a text or a list of messages",
        ),
        (
            "a.jsonl",
            rows({"messages": [{"content": "w4"}]}),
            {},
            'a.jsonl:1: messages[0] must be an object with a "role"',
        ),
    ],
)
def test_bad_data_is_refused_with_its_line(
    checkpoint: Path, data: str, content: str | bytes, settings: dict[str, Any], message: str
) -> None:
    assert refusal(checkpoint, data, content, **settings) == message


def test_a_text_of_one_token_is_refused(tmp_path: Path) -> None:
    checkpoint = write_tokenizer(tmp_path / "checkpoint", byte_level())
    assert refusal(checkpoint, "a.txt", "ab\nc\n") == (
        "a.txt:2: 'c' has fewer than 2 tokens, so there is none to predict; remove the row"
    )


def test_messages_need_a_chat_template(tmp_path: Path) -> None:
    checkpoint = write_tokenizer(tmp_path / "checkpoint", words(), bos_token="<bos>")
    content = rows({"messages": [{"role": "user", "content": "w4"}]})
    assert refusal(checkpoint, "a.jsonl", content) == (
        "a.jsonl:1: the row holds chat messages, but checkpoint has no chat template; "
        "use a column of texts"
    )


def test_missing_file_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_data(CalibrationConfig(data="sub/a.jsonl"), tmp_path)
    assert str(caught.value) == f"calibration.data: {tmp_path}/sub/a.jsonl does not exist"
    (tmp_path / "b.jsonl").mkdir()
    with pytest.raises(ConfigError, match="is a folder"):
        check_data(CalibrationConfig(data="b.jsonl"), tmp_path)


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeUnavailable) as caught:
        check_data(CalibrationConfig(data="a.parquet"), tmp_path)
    assert str(caught.value) == (
        f"reading {tmp_path}/a.parquet needs 'pyarrow', unless the texts are saved as .jsonl: "
        f"{with_library('pyarrow')}"
    )


def test_parquet(checkpoint: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = checkpoint.parent
    messages = [{"role": "user", "content": f"w{i}"} for i in range(4, 7)]
    columns = {"text": ["w4", None, "w5"], "chat": [[message] for message in messages]}
    parquet.write_table(pyarrow.table(columns), folder / "a.parquet")
    texts = read_texts(CalibrationConfig(data="a.parquet"), folder, checkpoint)
    assert (texts.held_out, texts.calibration) == (((1, 4),), ((1, 5),))
    chats = read_texts(CalibrationConfig(data="a.parquet", column="chat"), folder, checkpoint)
    assert chats.calibration == ((1, 3, 5, 3), (1, 3, 6, 3))
    with pytest.raises(ConfigError, match="there is no column 'x'; there are: text, chat"):
        read_texts(CalibrationConfig(data="a.parquet", column="x"), folder, checkpoint)
    assert refusal(checkpoint, "b.parquet", "w4").startswith(
        "b.parquet cannot be read as Parquet: "
    )


def test_builtin_texts_are_many_kinds_and_need_no_template(tmp_path: Path) -> None:
    checkpoint = write_tokenizer(tmp_path / "checkpoint", byte_level())
    everything = CalibrationConfig(num_samples=1000, max_seq_len=4096)
    texts = read_texts(everything, tmp_path, checkpoint)
    assert (len(texts.calibration), len(texts.held_out)) == (140, 20)
    assert len({*texts.calibration, *texts.held_out}) == 160
    default = read_texts(CalibrationConfig(), tmp_path, checkpoint)
    assert default.description.startswith("112 texts of specpipe's own set with ")
    assert 40 < min(map(len, default.calibration)) < max(map(len, default.calibration)) < 512
    assert default == read_texts(CalibrationConfig(), tmp_path, checkpoint)
    with pytest.raises(ConfigError, match="calibration.column is 'text', but builtin has no col"):
        check_data(CalibrationConfig(column="text"), tmp_path)


def test_builtin_chat_goes_through_a_template(checkpoint: Path) -> None:
    template = "{% for m in messages %}<turn>{% endfor %}"
    plain = write_tokenizer(checkpoint.parent / "plain", byte_level())
    chat = write_tokenizer(checkpoint.parent / "chat", byte_level(), chat_template=template)
    settings = CalibrationConfig(num_samples=40)
    texts = [read_texts(settings, checkpoint.parent, folder) for folder in (plain, chat)]
    assert texts[0].digest == texts[1].digest
    pairs = zip(texts[0].calibration, texts[1].calibration, strict=True)
    num_chats = sum(first != second for first, second in pairs)
    assert 0 < num_chats < len(texts[0].calibration)
