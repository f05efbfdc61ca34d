"""Which files of a checkpoint are opened, and how much of them is read."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specpipe.build import planning
from specpipe.build.load import load_config
from specpipe.build.pairing import check_pair
from specpipe.build.stages.convert import convert
from specpipe.build.stages.export import _copied
from specpipe.build.stages.package import models_folder
from specpipe.checkpoints.checkpoint import INDEX_NAME, open_checkpoint, read_safetensors_header
from specpipe.checkpoints.limits import FileLimits
from specpipe.errors import CheckpointError, SpecpipeError
from specpipe.quantization.prequantized import read_prequantized
from specpipe.runtimes.pair_file import PairFile
from specpipe.text.files import TOKENIZER_FILES
from specpipe.text.tokenizer import Tokenizer
from tests.toy import toy_config, write_toy_checkpoint
from tests.toy_tokenizers import words, write_tokenizer

SMALL_FILES = (*TOKENIZER_FILES, "hf_quant_config.json", INDEX_NAME, "adapter_config.json")


def write_whole(folder: Path) -> Path:
    """A checkpoint in which every file is there that a plain one may have."""
    write_toy_checkpoint(folder)
    roles = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    write_tokenizer(folder, words(), **roles)
    (folder / "special_tokens_map.json").write_text("{}")
    (folder / "generation_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    return folder


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write_whole(tmp_path / "whole")


def config_of(folder: Path, **limits: Any) -> Path:
    path = folder.parent / "pair.yaml"
    sides = {role: {"checkpoint": folder.name} for role in ("draft", "target")}
    settings = {"name": "x", **sides, "engine": {"device": "cpu"}, "serving": {"limits": limits}}
    path.write_text(json.dumps(settings))
    return path


def use(folder: Path) -> None:
    """Reads all that is read of a checkpoint."""
    check_pair(folder, folder)
    read_prequantized(folder)
    open_checkpoint(folder)


def refusal(work: Callable[[], Any]) -> str:
    with pytest.raises(SpecpipeError) as error:
        work()
    return str(error.value)


# What a name leads to


@pytest.mark.parametrize("name", [*SMALL_FILES, "model.safetensors"])
def test_link_out_of_the_checkpoint_is_refused(tmp_path: Path, whole: Path, name: str) -> None:
    outside = tmp_path / "secret"
    path = whole / name
    if path.exists():
        path.rename(outside)
    else:
        outside.write_text("{}")
    path.symlink_to(outside)
    message = (
        f"{path} is a link to {outside}, which is outside the checkpoint; copy that file into the "
        "folder, or name the folder in which it is"
    )
    assert refusal(lambda: use(whole)).removeprefix("draft: ") == message


def test_folder_of_templates_outside_of_the_checkpoint_is_refused(
    tmp_path: Path, whole: Path
) -> None:
    folder = whole / "additional_chat_templates"
    folder.rename(tmp_path / "secret")
    folder.symlink_to(tmp_path / "secret")
    assert f"{folder}/tool_use.jinja is a link to {tmp_path}/secret/" in refusal(lambda: use(whole))


def test_link_out_of_the_checkpoint_is_packaged_nowhere(tmp_path: Path, whole: Path) -> None:
    """Neither by what reads it first nor by what copies it."""
    from specpipe.runtimes.pair.pair import PairOptions
    from specpipe.triton import repository

    secret = tmp_path / "secret"
    secret.write_text("{{ 'secret' }}")
    (whole / "chat_template.jinja").unlink()
    (whole / "chat_template.jinja").symlink_to(secret)
    (whole / "merges.txt").symlink_to(secret)
    assert _copied(whole)[-1].name == "merges.txt"
    out = tmp_path / "repository"
    message = refusal(
        lambda: repository.write(
            out,
            models=models_folder(),
            draft_engine=whole,
            target_engine=whole,
            tokenizer=whole,
            pair=PairFile("torch", PairOptions()),
        )
    )
    assert "chat_template.jinja is a link to" in message
    assert not list(out.rglob("*.jinja"))


def test_links_within_the_checkpoint_are_followed(tmp_path: Path, whole: Path) -> None:
    (whole / "data").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (whole / name).rename(whole / "data" / name)
        (whole / name).symlink_to(f"data/{name}")
    use(whole)
    link = tmp_path / "link"
    link.symlink_to(whole)
    use(link)


@pytest.fixture
def snapshot(tmp_path: Path, whole: Path) -> Path:
    """The checkpoint as the hub's cache has it."""
    repository = tmp_path / "hub" / "models--org--name"
    folder = repository / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(p for p in whole.rglob("*") if p.is_file())):
        blob, link = repository / "blobs" / f"{number:040}", folder / path.relative_to(whole)
        path.rename(blob)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return folder


def test_the_cache_of_the_hub_is_read(snapshot: Path) -> None:
    use(snapshot)


def test_blobs_of_the_hub_may_lie_on_another_disk(tmp_path: Path, snapshot: Path) -> None:
    blobs = snapshot.parents[1] / "blobs"
    shutil.move(blobs, tmp_path / "disk")
    blobs.symlink_to(tmp_path / "disk")
    use(snapshot)


@pytest.mark.parametrize("place", ["other/blobs/x", "models--org--name/x", "models--a--b/blobs/x"])
def test_other_places_of_the_cache_are_outside(snapshot: Path, place: str) -> None:
    outside = snapshot.parents[2] / place
    outside.parent.mkdir(parents=True, exist_ok=True)
    outside.write_bytes((snapshot / "config.json").read_bytes())
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(outside)
    assert f"config.json is a link to {outside}, which is outside" in refusal(
        lambda: open_checkpoint(snapshot)
    )


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's path has 107 bytes at most
        made.bind(path.name)
        os.chdir(here)


@pytest.mark.parametrize("name", [*SMALL_FILES, "model.safetensors"])
@pytest.mark.parametrize(
    ("make", "kind"),
    [(os.mkfifo, "a pipe"), (Path.mkdir, "a folder"), (make_socket, "a socket")],
    ids=["fifo", "folder", "socket"],
)
def test_what_is_no_file_is_refused_at_once(
    whole: Path, name: str, make: Callable[[Path], None], kind: str
) -> None:
    """Opening a pipe would wait for who writes into it."""
    (whole / name).unlink(missing_ok=True)
    make(whole / name)
    assert refusal(lambda: use(whole)).removeprefix("draft: ") == (
        f"{whole / name} is {kind}, not a file; download the checkpoint again"
    )


def test_device_is_refused(whole: Path) -> None:
    (whole / "config.json").unlink()
    (whole / "config.json").symlink_to("/dev/zero")
    assert refusal(lambda: open_checkpoint(whole)) == (
        f"{whole}/config.json is a device, not a file; download the checkpoint again"
    )


def test_loop_of_links_is_a_missing_file(whole: Path) -> None:
    (whole / "config.json").unlink()
    (whole / "config.json").symlink_to("config.json")
    assert refusal(lambda: open_checkpoint(whole)) == (
        f"{whole} has no config.json, so it is no Hugging Face checkpoint"
    )


# How much is read


@pytest.mark.parametrize("name", SMALL_FILES)
def test_file_of_a_terabyte_is_not_read(whole: Path, name: str) -> None:
    with (whole / name).open("wb") as file:
        file.truncate(1 << 40)
    message = refusal(lambda: use(whole)).removeprefix("draft: ")
    setting = {
        "tokenizer.json": "max_tokenizer_bytes",
        "chat_template.jinja": "max_chat_template_bytes",
        "additional_chat_templates/tool_use.jinja": "max_chat_template_bytes",
    }.get(name, "max_json_bytes")
    limit = FileLimits().model_dump()[setting]
    assert message == (
        f"{whole / name} has {1 << 40} bytes, expected at most {limit} (serving.limits.{setting})"
    )


SIZES = [
    ("num_hidden_layers", "max_num_layers"),
    ("vocab_size", "max_vocab_size"),
    ("max_position_embeddings", "max_context_length"),
    *(
        (key, "max_layer_size")
        for key in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")
    ),
]


@pytest.mark.parametrize(("key", "setting"), SIZES)
@pytest.mark.parametrize("value", [10**9, 2**70, 10**4000])
def test_size_in_config_is_bounded_wherever_it_is_read(
    whole: Path, key: str, setting: str, value: int
) -> None:
    (whole / "config.json").write_text(json.dumps(toy_config(**{key: value})))
    config = load_config(config_of(whole))
    messages = [
        refusal(lambda: planning.check(config)),
        refusal(lambda: convert(whole, whole / "out")),
    ]
    if key in ("vocab_size", "max_position_embeddings"):  # all that the pair contract reads
        messages.append(refusal(lambda: check_pair(whole, whole)))
    shown = str(value) if value < 10**30 else "a number of more than 30 digits"
    limit = FileLimits().model_dump()[setting]
    for message in messages:
        assert message.endswith(
            f": config.json: {key} is {shown}, expected at most {limit} (serving.limits.{setting})"
        )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1.5, True, "2", [2], {"a": 2}])
@pytest.mark.parametrize("key", [key for key, _ in SIZES])
def test_size_that_is_no_whole_number_is_refused(whole: Path, key: str, value: Any) -> None:
    (whole / "config.json").write_text(json.dumps(toy_config(**{key: value})))
    assert refusal(lambda: planning.check(load_config(config_of(whole)))).endswith(
        f": config.json: {key} is {value!r}, expected a whole number of at least 1"
    )


def test_rope_may_not_stretch_the_context_without_end(whole: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 1e29}
    (whole / "config.json").write_text(json.dumps(toy_config(rope_parameters=rope)))
    for work in (
        lambda: planning.check(load_config(config_of(whole))),
        lambda: check_pair(whole, whole),
    ):
        assert "rope stretches the context to" in refusal(work)


def test_limits_are_those_of_the_config(whole: Path) -> None:
    """Lower ones refuse what is there, in the plan, the pair check and the build; others let it."""
    num_layers = toy_config()["num_hidden_layers"]
    planning.check(load_config(config_of(whole, max_num_layers=num_layers)))
    for limits, message in (
        ({"max_num_layers": num_layers - 1}, "serving.limits.max_num_layers"),
        ({"max_vocab_size": 100}, "serving.limits.max_vocab_size"),
        ({"max_json_bytes": 10}, "serving.limits.max_json_bytes"),
        ({"max_tokenizer_bytes": 10}, "serving.limits.max_tokenizer_bytes"),
        ({"max_chat_template_bytes": 10}, "serving.limits.max_chat_template_bytes"),
    ):
        config = load_config(config_of(whole, **limits))
        assert message in refusal(lambda config=config: planning.check(config))
    config = load_config(config_of(whole, max_safetensors_header_bytes=10))
    stages = {planned.name: planned.stage for planned in planning.plan(config)}
    out = whole.parent / "out"
    out.mkdir()
    assert "serving.limits.max_safetensors_header_bytes" in refusal(
        lambda: stages["target/convert"].run(out)
    )


def test_more_layers_than_usual_are_a_matter_of_the_setting(whole: Path) -> None:
    many = {"num_hidden_layers": 513}
    (whole / "config.json").write_text(json.dumps(toy_config(**many)))
    checked = planning.check(load_config(config_of(whole, max_num_layers=513)))
    assert checked.memory


def test_header_of_99_megabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 99_000_000))
        file.truncate(100_000_000)
    assert refusal(lambda: read_safetensors_header(path)) == (
        f"{path}: its header has 99000000 bytes, expected at most 4194304 "
        "(serving.limits.max_safetensors_header_bytes)"
    )


def test_million_end_ids_are_refused(whole: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        before = (whole / name).read_text()
        ids = list(range(1_000_000))
        (whole / name).write_text(json.dumps({**json.loads(before), "eos_token_id": ids}))
        assert refusal(lambda: Tokenizer.load(whole)) == (
            f"{whole / name}: eos_token_id has 1000000 ids, expected at most 256 "
            "(serving.limits.max_end_token_ids)"
        )
        (whole / name).write_text(before)


@pytest.mark.parametrize("token_id", [2**32, 2**70, 10**4000, -(2**70)])
def test_token_id_that_no_model_has_is_refused(whole: Path, token_id: int) -> None:
    tokenizer = json.loads((whole / "tokenizer.json").read_text())
    tokenizer["added_tokens"][0]["id"] = token_id
    (whole / "tokenizer.json").write_text(json.dumps(tokenizer))
    message = refusal(lambda: check_pair(whole, whole))
    assert str(whole / "tokenizer.json") in message
    assert len(message) < 400


def test_many_added_tokens_are_refused(whole: Path) -> None:
    declared = {str(n): {"content": str(n)} for n in range(2_000)}
    (whole / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": declared}))
    assert refusal(lambda: Tokenizer.load(whole, FileLimits(max_vocab_size=1_000))) == (
        f"{whole}/tokenizer_config.json has 2000 tokens, expected at most 1000 "
        "(serving.limits.max_vocab_size)"
    )


def test_hostile_values_are_cut_in_messages(whole: Path) -> None:
    long = "x" * 1_000_000
    hostile: dict[str, Any] = {
        "architectures": [long],
        "model_type": long,
        "dtype": long,
        "hidden_act": long,
        "hidden_size": long,
        "rms_norm_eps": [long],
        "tie_word_embeddings": long,
        "rope_parameters": {"rope_type": long, "rope_theta": 1e4},
        "auto_map": {long: long},
        "quantization_config": {"quant_method": long},
        "eos_token_id": long,
    }
    for key, value in hostile.items():
        (whole / "config.json").write_text(json.dumps(toy_config(**{key: value})))
        assert len(refusal(lambda: (use(whole), convert(whole, whole / "out")))) < 600, key


@pytest.mark.parametrize("file", ["../../etc/passwd", "/etc/passwd", "a/b", ".", "..", "x" * 5000])
def test_index_names_files_of_its_folder_only(whole: Path, file: str) -> None:
    index = {"weight_map": {"lm_head.weight": file}}
    (whole / INDEX_NAME).write_text(json.dumps(index))
    message = refusal(lambda: open_checkpoint(whole))
    assert "which is no file name" in message or "lacks" in message
    assert len(message) < 400


@pytest.mark.parametrize("name", [n for n in SMALL_FILES if n.endswith(".json")])
@pytest.mark.parametrize("text", ["[" * 1_000_000, '{"a":' * 500_000], ids=["lists", "objects"])
def test_deep_nesting_is_one_sentence(whole: Path, name: str, text: str) -> None:
    (whole / name).write_text(text)
    message = refusal(lambda: use(whole))
    assert str(whole / name) in message
    assert len(message) < 400


def test_unreadable_file_is_named(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *args: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(whole)
    assert str(error.value) == f"{whole}/config.json cannot be read: Permission denied"
