from __future__ import annotations

import json
import struct
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specpipe.checkpoints.checkpoint import (
    INDEX_NAME,
    brief,
    checkpoint_files,
    create_safetensors,
    open_checkpoint,
    read_config,
    read_safetensors_header,
)
from specpipe.errors import CheckpointError
from tests.toy import read_tensor, toy_config, toy_tensors, write_tensors, write_toy_checkpoint

SHARD_1, SHARD_2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
LFS_POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


def refusal(folder: Path) -> str:
    """Returns the message with which a folder is refused, with the folder's path as FOLDER."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    return str(caught.value).replace(str(folder), "FOLDER")


def edit_index(folder: Path, **entries: str | None) -> None:
    """Places tensors anew in the index; None removes them. `__` in a name stands for a dot."""
    index = json.loads((folder / INDEX_NAME).read_text())
    for name, file in entries.items():
        name = name.replace("__", ".")
        if file is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = file
    (folder / INDEX_NAME).write_text(json.dumps(index))


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_toy_checkpoint(tmp_path / "toy", num_shards=2)


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_opens_whole_folders(tmp_path: Path, num_shards: int) -> None:
    folder = write_toy_checkpoint(tmp_path / "toy", num_shards=num_shards)
    checkpoint = open_checkpoint(folder)
    expected = toy_tensors(toy_config())
    assert checkpoint.config == toy_config()
    assert set(checkpoint.tensors) == set(expected)
    for name, array in expected.items():
        info = checkpoint.tensors[name]
        assert (info.dtype, info.shape) == ("BF16", array.shape)
        assert np.array_equal(read_tensor(info), array)


def test_one_shard_without_index_is_enough(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path / "toy")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    assert len(open_checkpoint(folder).tensors) == 21


def test_other_copies_of_the_weights_are_left_alone(sharded: Path) -> None:
    write_tensors(sharded / "consolidated.safetensors", {"tok_embeddings": np.zeros(2, np.uint16)})
    (sharded / "pytorch_model.bin").write_bytes(b"pickle")
    assert len(open_checkpoint(sharded).tensors) == 21
    assert [path.name for path in checkpoint_files(sharded)] == [
        "config.json",
        INDEX_NAME,
        SHARD_1,
        SHARD_2,
    ]


def test_missing_shard_is_named_with_its_share(sharded: Path) -> None:
    (sharded / SHARD_2).unlink()
    assert refusal(sharded) == (
        "FOLDER lacks model-00002-of-00002.safetensors, which holds 11 of its 21 tensors; "
        "the download seems incomplete, run it again"
    )


def test_missing_index_is_named(sharded: Path) -> None:
    (sharded / INDEX_NAME).unlink()
    assert refusal(sharded) == (
        "FOLDER has 2 safetensors files but no model.safetensors.index.json; "
        "the download seems incomplete, run it again"
    )


def test_surplus_shard_is_named(sharded: Path) -> None:
    write_tensors(sharded / "model-00003-of-00003.safetensors", {"x": np.zeros(2, np.uint16)})
    assert refusal(sharded) == (
        "FOLDER has model-00003-of-00003.safetensors, which model.safetensors.index.json does not "
        "name; delete what does not belong to this checkpoint"
    )


def test_single_file_beside_an_index_is_surplus(sharded: Path) -> None:
    write_tensors(sharded / "model.safetensors", toy_tensors(toy_config()))
    assert refusal(sharded).startswith(
        "FOLDER has model.safetensors, which model.safetensors.index"
    )


def test_index_names_a_tensor_that_its_shard_lacks(sharded: Path) -> None:
    edit_index(sharded, lm_head__bias=SHARD_2)
    assert refusal(sharded) == (
        "FOLDER/model.safetensors.index.json is stale: model-00002-of-00002.safetensors does not "
        "hold lm_head.bias; download index and shards from one revision"
    )


def test_shard_holds_a_tensor_that_the_index_lacks(sharded: Path) -> None:
    edit_index(sharded, lm_head__weight=None)
    assert refusal(sharded) == (
        "FOLDER/model.safetensors.index.json is stale: it does not place lm_head.weight in "
        "model-00002-of-00002.safetensors; download index and shards from one revision"
    )


def test_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    held = read_safetensors_header(sharded / SHARD_1)
    tensors = {name: read_tensor(info) for name, info in held.items()}
    write_target = sharded / SHARD_1
    write_target.unlink()
    write_tensors(write_target, tensors | {"lm_head.weight": np.zeros((256, 32), np.uint16)})
    assert "does not place lm_head.weight in model-00001-of-00002" in refusal(sharded)


@pytest.mark.parametrize("file", ["../other/model.safetensors", "/etc/model.safetensors", "", 7])
def test_index_stays_in_its_folder(sharded: Path, file: Any) -> None:
    edit_index(sharded, lm_head__weight=file)
    assert refusal(sharded) == (
        f"FOLDER/model.safetensors.index.json places lm_head.weight in {file!r}, "
        "which is no file name"
    )


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": []}'])
def test_index_without_weight_map(sharded: Path, text: str) -> None:
    (sharded / INDEX_NAME).write_text(text)
    assert refusal(sharded) == (
        "FOLDER/model.safetensors.index.json has no weight_map; download it again"
    )


def test_lfs_pointer_is_named(sharded: Path) -> None:
    (sharded / SHARD_1).write_text(LFS_POINTER)
    assert refusal(sharded) == (
        "FOLDER/model-00001-of-00002.safetensors is a Git LFS pointer, not the weights; "
        "run `git lfs pull` in FOLDER"
    )


def test_lfs_pointer_in_place_of_a_json_file(sharded: Path) -> None:
    (sharded / INDEX_NAME).write_text(LFS_POINTER)
    assert refusal(sharded) == (
        "FOLDER/model.safetensors.index.json is a Git LFS pointer, not the file; "
        "run `git lfs pull` in FOLDER"
    )


def test_truncated_data(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path / "toy")
    path = folder / "model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 1000)
    assert refusal(folder) == (
        f"FOLDER/model.safetensors is truncated: its tensors need {size} bytes, the file has "
        f"{size - 1000}; download it again"
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "F is truncated: 0 bytes; download it again"),
        (b"\x10\x00\x00", "F is truncated: 3 bytes; download it again"),
        (
            struct.pack("<Q", 1000) + b"{}",
            "F is truncated: its header has 1000 bytes, the whole file 10; download it again",
        ),
        (
            b"\x80\x02}q\x00X\x05\x00\x00\x00model",
            "F is not a safetensors file: its header cannot be read",
        ),
        (
            safetensors_bytes(b"[1]"),
            "F is not a safetensors file: expected a JSON object",
        ),
        (
            safetensors_bytes(b'{"a": {}, "a": {}}'),
            "F is not a safetensors file: the key 'a' stands twice",
        ),
        (safetensors_bytes({"a": 1}), "F is not a safetensors file: its entry for a is no object"),
        (
            safetensors_bytes({"a": {"dtype": "F16", "shape": [-1], "data_offsets": [0, 2]}}),
            "F is not a safetensors file: its entry for a has no valid shape or data_offsets",
        ),
        (
            safetensors_bytes({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, b"1"),
            "F: tensor a has dtype F4, which is not supported; "
            "use a checkpoint that is not quantized",
        ),
        (
            safetensors_bytes({"a": {"dtype": "F16", "shape": [2], "data_offsets": [0, 2]}}, b"12"),
            "F is damaged: tensor a of shape [2] and dtype F16 needs 4 bytes, its entry spans 2",
        ),
        (
            safetensors_bytes({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}, b"12"),
            "F is damaged: tensor a begins at byte 69, expected 68",
        ),
        (
            safetensors_bytes({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"123"),
            "F is damaged: 2 bytes follow its last tensor",
        ),
    ],
)
def test_broken_file_is_described(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        read_safetensors_header(path)
    assert str(caught.value).replace(str(path), "F") == message


def test_small_file_causes_no_large_allocation(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 99_000_000) + b" " * 100)
    huge = tmp_path / "huge.safetensors"
    shape = [2**40, 2**40]
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * 2**80]}
    huge.write_bytes(safetensors_bytes({"a": entry}))
    tracemalloc.start()
    try:
        for file in (path, huge):
            with pytest.raises(CheckpointError, match="is truncated"):
                read_safetensors_header(file)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_deeply_nested_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes(b'{"a":' + b"[" * 200_000))
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        read_safetensors_header(path)


_HEADER = b'{"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}'


@settings(max_examples=200, deadline=None)
@given(
    position=st.integers(0, len(_HEADER) + 7),
    value=st.integers(0, 255),
    cut=st.integers(0, len(_HEADER) + 19),  # one less than the whole file
)
def test_damaged_file_opens_or_is_refused(position: int, value: int, cut: int) -> None:
    data = bytearray(safetensors_bytes(_HEADER, bytes(12)))
    data[position] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(data[:cut])
        with pytest.raises(CheckpointError):
            read_safetensors_header(path)
        path.write_bytes(data)
        try:
            tensors = read_safetensors_header(path)
        except CheckpointError:
            return
        assert sum(info.num_bytes for info in tensors.values()) == 12


def test_pickles_are_refused(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path / "toy")
    (folder / "model.safetensors").unlink()
    for part in (1, 2, 3, 4, 5):
        (folder / f"pytorch_model-{part:05}-of-00005.bin").write_bytes(b"\x80\x02")
    assert refusal(folder) == (
        "FOLDER holds its weights as pickles only (pytorch_model-00001-of-00005.bin, "
        "pytorch_model-00002-of-00005.bin, pytorch_model-00003-of-00005.bin and 2 more), which can "
        "run code when they are read; save the model as safetensors"
    )


def test_folder_without_weights(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path / "toy")
    (folder / "model.safetensors").unlink()
    assert refusal(folder) == (
        "FOLDER has no *.safetensors file, the only kind of weights that specpipe reads"
    )


def test_folder_without_config(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path / "toy")
    (folder / "config.json").unlink()
    assert refusal(folder) == "FOLDER has no config.json, so it is no Hugging Face checkpoint"


def test_path_that_is_no_folder(tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent") == "FOLDER is not a folder"


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1, "a": 2}', "\xff"])
def test_unreadable_config(tmp_path: Path, text: str) -> None:
    folder = write_toy_checkpoint(tmp_path / "toy")
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert refusal(folder).startswith("FOLDER/config.json cannot be read: ")


@pytest.mark.parametrize(
    ("auto_map", "named"),
    [
        (
            {"AutoModelForCausalLM": "modeling.Model", "AutoConfig": "config.Config"},
            "AutoConfig, AutoModelForCausalLM",
        ),
        ("modeling.Model", "modeling.Model"),
    ],
)
def test_remote_code_is_refused(tmp_path: Path, auto_map: Any, named: str) -> None:
    folder = write_toy_checkpoint(tmp_path / "toy", auto_map=auto_map)
    assert refusal(folder) == (
        f"FOLDER/config.json asks for remote code (auto_map: {named}), "
        "which specpipe never runs; use a checkpoint of a supported architecture"
    )


def test_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/base"})
    )
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        read_config(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} is an adapter for org/base, which is not supported; "
        "merge it into its base model and save the result"
    )


def test_quantized_by_modelopt_is_refused(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path / "toy")
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert refusal(folder) == (
        "FOLDER is already quantized (hf_quant_config.json); use the one it was quantized from"
    )


def test_dangling_link_is_a_missing_file(sharded: Path) -> None:
    (sharded / SHARD_1).unlink()
    (sharded / SHARD_1).symlink_to(sharded / "gone")
    assert refusal(sharded).startswith("FOLDER lacks model-00001-of-00002.safetensors, which holds")


def test_unreadable_file_is_named(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def open_(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == SHARD_2:
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", open_)
    assert refusal(sharded) == (
        "FOLDER/model-00002-of-00002.safetensors cannot be read: Permission denied"
    )


def test_writer_makes_what_safetensors_reads(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "a.safetensors"
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    with create_safetensors(path, {"x": ("F32", (2, 3)), "y": ("F16", (1,))}) as writer:
        writer.write("x", values.view(np.uint32))
        writer.write("y", np.array([1.5], np.float16).view(np.uint16))
    read = safetensors.load_file(path)
    assert np.array_equal(read["x"], values)
    assert read["y"].tolist() == [1.5]
    assert all(info.offset % 8 == 0 for info in read_safetensors_header(path).values())


def test_long_lists_are_cut() -> None:
    assert brief(["a", "b", "c"]) == "a, b, c"
    assert brief(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
