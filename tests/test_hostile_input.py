"""Files as no tool writes them: each is refused in a sentence, or read; nothing else may happen.

That is: no exception but a SpecpipeError, no hang, and no memory out of proportion to the file.
"""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from specpipe.build import execution, planning
from specpipe.build.inspection import inspect
from specpipe.build.load import load_config
from specpipe.build.pairing import check_pair
from specpipe.build.stages.convert import convert
from specpipe.checkpoints import source
from specpipe.checkpoints.checkpoint import open_checkpoint, read_safetensors_header
from specpipe.errors import CheckpointError, ConfigError, SpecpipeError
from specpipe.text.tokenizer import Tokenizer
from tests.toy import ARCHITECTURES, LLAMA3_SCALING, toy_config, write_toy_checkpoint
from tests.toy_tokenizers import byte_level, space_mark, word_piece, words, write_tokenizer

ROOT = Path(__file__).parents[1]


def hostile(max_examples: int) -> Callable[[Any], Any]:
    """Settings of every test here: the same examples each time, each far from its deadline."""
    return settings(
        max_examples=max_examples,
        deadline=timedelta(seconds=20),
        derandomize=True,
        database=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=(HealthCheck.function_scoped_fixture, HealthCheck.too_slow),
    )


@contextmanager
def refused_or_fine(*, max_bytes: int | None = None) -> Iterator[None]:
    """Lets SpecpipeError pass, if it has something to say; max_bytes limits what is allocated."""
    if max_bytes is not None:
        tracemalloc.start()
    try:
        yield
    except SpecpipeError as exc:
        assert str(exc).strip()
    finally:
        if max_bytes is not None:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    if max_bytes is not None:
        assert peak <= max_bytes


numbers = st.one_of(
    st.sampled_from([0, -1, 1, 7, 2**31, 2**63, -(2**63), 2**64, 10**30, 10**400, 10**4299]),
    st.sampled_from([0.0, -0.5, 1e-300, 1e300, float("inf"), float("nan")]),
    st.integers(),
)
texts = st.one_of(
    st.sampled_from(
        ["", "a", "\0", "a/b", "../..", "~", "~nobody-of-this-name/x", "x" * 300, "\ud800", "-1"]
    ),
    st.text(max_size=8),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
trees = st.recursive(
    scalars,
    lambda children: st.one_of(
        st.lists(children, max_size=4), st.dictionaries(texts, children, max_size=4)
    ),
    max_leaves=8,
)


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every value in a tree; of a tokenizer's vocabulary, of the first few."""
    yield path
    items: Any = ()
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, list):
        items = enumerate(tree)
    for key, value in list(items)[:40]:
        yield from places(value, (*path, key))


def changed(tree: Any, path: Sequence[Any], change: Callable[[Any, Any], None]) -> Any:
    """Returns a copy of a tree after `change(container, key)` at one place."""
    copy = json.loads(json.dumps({"": tree}))
    container = copy
    for key in ("", *path)[:-1]:
        container = container[key]
    change(container, ("", *path)[-1])
    return copy[""]


@st.composite
def mutations(draw: st.DrawFn, tree: Any, *, max_changes: int = 3, values: Any = trees) -> Any:
    """A tree of JSON with a few places replaced, removed or added to."""
    for _ in range(draw(st.integers(1, max_changes))):
        path = draw(st.sampled_from(list(places(tree))))
        kind = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
        value, key = draw(values), draw(texts)

        def change(
            container: Any, last: Any, kind: str = kind, value: Any = value, key: str = key
        ) -> None:
            if kind == "remove" and last != "":
                del container[last]
            elif kind == "add" and isinstance(container[last], dict):
                container[last][key] = value
            else:
                container[last] = value

        tree = changed(tree, path, change)
    return tree


# The YAML


CONFIG = {
    "name": "toy",
    "draft": {"checkpoint": "toy", "tp_size": 1, "pp_size": 2},
    "target": {"checkpoint": "toy", "revision": None},
    "speculation": {"num_draft_tokens": 4, "adaptive": True},
    "engine": {
        "runtime": "torch",
        "max_batch_size": 8,
        "max_seq_len": 128,
        "max_num_tokens": 256,
        "dtype": "auto",
        "device": "cpu",
        "num_threads": 1,
    },
    "serving": {"max_queue_size": 128, "request_timeout_s": 600.0},
    "output_dir": "out",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint that CONFIG names; tests write beside it."""
    folder = tmp_path_factory.mktemp("hostile")
    write_toy_checkpoint(folder / "toy")
    roles = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    write_tokenizer(folder / "toy", words(), **roles)
    return folder


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(repo_id: str, *_: Any) -> Path:
        raise CheckpointError(f"{repo_id} is not here")

    monkeypatch.setattr(source, "_fetch", refuse)


def use_config(path: Path, text: str) -> None:
    """Goes as far with a config as is possible without writing anything."""
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with refused_or_fine(max_bytes=20_000_000 + 200 * len(text)):
        config = load_config(path)
        assert config.artifacts_dir.is_absolute()
        execution.preview(planning.plan(config))
        planning.check(config)


@hostile(150)
@given(tree=mutations(CONFIG))
def test_changed_config(folder: Path, tree: Any) -> None:
    use_config(folder / "changed.yaml", json.dumps(tree))


@hostile(100)
@given(tree=trees)
def test_any_tree_as_config(folder: Path, tree: Any) -> None:
    use_config(folder / "tree.yaml", yaml.safe_dump(tree, allow_unicode=True))


tags = st.sampled_from(
    ["int", "float", "bool", "null", "str", "timestamp", "binary", "map", "seq", "set", "omap"]
    + ["merge", "value", "pairs", "python/object/apply:os.system"]
)
odd_scalars = st.builds(
    lambda tag, text: f"{tag}{text}",
    st.one_of(st.just(""), tags.map(lambda tag: f"!!{tag} ")),
    st.one_of(
        st.sampled_from(["''", "1:60:1.5", "0x" + "f" * 5000, "1" * 5000, "2001-13-45", "<<", "="]),
        st.sampled_from([".inf", "2001-01-01 00:00:00 +99:99", "9:" * 400 + "9.5", "*a", "&a *a"]),
        st.sampled_from(["0b", "0x_", "-", "+.e1", "{<<: {? [a] : 1}}", "{<<: [*a, *a]}"]),
        st.text(alphabet="01289abex:._-+TZ '\"\\{}[],&*!?|>%@#~\n", max_size=12),
    ),
)


@hostile(200)
@given(
    keys=st.lists(st.sampled_from(["name", "draft", "engine", "<<", "a"]), max_size=3),
    data=st.data(),
)
def test_odd_scalars_in_config(folder: Path, keys: list[str], data: st.DataObject) -> None:
    lines = ["a: &a {b: 1}", *(f"{key}: {data.draw(odd_scalars)}" for key in keys)]
    use_config(folder / "odd.yaml", "\n".join(lines))


@hostile(150)
@given(
    text=st.one_of(
        st.text(max_size=60), st.text(alphabet="ab1:-{}[]&*!|>'\"#%@,\n <~?", max_size=60)
    )
)
def test_any_text_as_config(folder: Path, text: str) -> None:
    use_config(folder / "text.yaml", text)


@hostile(150)
@given(data=st.binary(max_size=60))
def test_any_bytes_as_config(folder: Path, data: bytes) -> None:
    path = folder / "bytes.yaml"
    path.write_bytes(data)
    with refused_or_fine():
        load_config(path)


@hostile(100)
@given(
    overrides=st.lists(st.one_of(texts, st.builds("{}={}".format, texts, odd_scalars)), max_size=2)
)
def test_any_override(folder: Path, overrides: list[str]) -> None:
    path = folder / "override.yaml"
    path.write_text(json.dumps(CONFIG))
    with refused_or_fine():
        load_config(path, overrides)


def nested(depth: int) -> str:
    return "a: " + "[" * depth + "]" * depth


MERGE_BOMB = "\n".join(
    [
        "m0: &m0 {a: 1, b: 2}",
        *(f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}" for n in range(1, 12)),
    ]
)
ALIAS_BOMB = "\n".join(
    [
        "m0: &m0 [1, 2]",
        *(f"m{n}: &m{n} [{', '.join([f'*m{n - 1}'] * 9)}]" for n in range(1, 12)),
        "name: *m11",
    ]
)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a: !!int ''",
        "a: !!float ''",
        "a: !!bool maybe",
        "a: !!timestamp soon",
        "a: !!binary =",
        "a: !!python/object/apply:os.system [true]",
        "!!int '': a",
        "? [a]\n: 1",
        "<<: {? [a] : 1}",
        "<<: {1: 2}",
        "<<: 3",
        "<<: [3]",
        "a: &a {<<: *a}",
        "a: &a [*a]",
        "name: 0x" + "f" * 10_000,
        "name: [0x" + "f" * 10_000 + "]",
        "name: " + "1" * 10_000,
        "name: 1" + ":59" * 5_000,
        "name: 1" + ":59" * 5_000 + ".5",
        "name: 0001-01-01 00:00:00 +23:59",
        "name: '" + "x" * 100_000 + "'",
        "x" * 100_000 + ": 1",
        "\n".join(f"key{n}: 1" for n in range(5_000)),
        nested(50),
        nested(100_000),
        "a: " * 1_000,
        MERGE_BOMB,
        ALIAS_BOMB,
        "%YAML 9.9\n---\na: 1",
        "a: 1\n---\na: 2",
    ],
    ids=lambda text: repr(text[:30]),
)
def test_hostile_yaml_is_refused(folder: Path, text: str) -> None:
    path = folder / "hostile.yaml"
    path.write_text(text)
    with (
        refused_or_fine(max_bytes=5_000_000 + 500 * len(text)),
        pytest.raises(ConfigError) as error,
    ):
        load_config(path)
    assert len(str(error.value)) < 2 * len(text) + 5_000


def test_yaml_of_a_terabyte_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value) == f"{path} has more than 262144 bytes: expected a configuration"


@pytest.mark.parametrize("text", ["x" * 100_000, "a." * 40_000 + "b=1", "name=" + "[" * 100_000])
def test_override_is_cut_in_messages(folder: Path, text: str) -> None:
    path = folder / "override.yaml"
    path.write_text(json.dumps(CONFIG))
    with pytest.raises(ConfigError) as error:
        load_config(path, [text])
    assert len(str(error.value)) < 1_000


@pytest.mark.parametrize("key", ["draft.checkpoint", "target.checkpoint", "output_dir", "name"])
@pytest.mark.parametrize(
    "value",
    [
        "a\0b",
        "\ud800",
        "~nobody-of-this-name/x",
        "x" * 300,
        "x" * 5_000,
        "../" * 3_000,
        "loop",
        ".",
    ],
    ids=lambda value: ascii(value[:20]),
)
def test_hostile_path(folder: Path, key: str, value: str) -> None:
    loop = folder / "loop"
    if not loop.is_symlink():
        loop.symlink_to(loop)
    tree = json.loads(json.dumps(CONFIG))
    section = tree
    for part in key.split(".")[:-1]:
        section = section[part]
    section[key.rpartition(".")[2]] = value
    use_config(folder / "path.yaml", json.dumps(tree))


# Safetensors


def header_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])


def safetensors(header: bytes, *, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "U8", "shape": [], "data_offsets": [32, 33]},
}


def use_header(path: Path, data: bytes) -> None:
    """What is accepted fills the file exactly, so that every tensor can be mapped."""
    path.write_bytes(data)
    with refused_or_fine(max_bytes=1_000_000 + 100 * len(data)):
        tensors = read_safetensors_header(path)
        data_bytes = len(data) - 8 - struct.unpack("<Q", data[:8])[0]
        assert sum(info.num_bytes for info in tensors.values()) == data_bytes
        assert all(info.offset + info.num_bytes <= len(data) for info in tensors.values())


offsets = st.one_of(st.integers(-5, 40), numbers)
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.one_of(st.sampled_from(["F32", "BF16", "U8", "F4", "f32", ""]), trees),
        "shape": st.one_of(st.lists(offsets, max_size=4), st.just([10**300] * 300), trees),
        "data_offsets": st.one_of(st.lists(offsets, max_size=3), trees),
    },
)


@hostile(250)
@given(header=mutations(HEADER, values=st.one_of(entries, trees, offsets)))
def test_changed_safetensors_header(tmp_path: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    use_header(tmp_path / "x.safetensors", safetensors(text, data=bytes(33)))


@hostile(200)
@given(header=st.dictionaries(texts, entries, max_size=4), num_bytes=st.integers(0, 80))
def test_any_safetensors_entries(tmp_path: Path, header: Any, num_bytes: int) -> None:
    text = json.dumps(header).encode()
    use_header(tmp_path / "x.safetensors", safetensors(text, data=bytes(num_bytes)))


@hostile(200)
@given(
    data=st.one_of(
        st.binary(max_size=40),
        st.builds(
            lambda length, header: safetensors(header, length=length),
            st.one_of(st.integers(0, 60), st.integers(0, 2**64 - 1)),
            st.one_of(
                st.binary(max_size=40), st.text(alphabet='{}[]":,a1', max_size=40).map(str.encode)
            ),
        ),
    )
)
def test_any_bytes_as_safetensors(tmp_path: Path, data: bytes) -> None:
    use_header(tmp_path / "x.safetensors", data)


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":' * 50_000,
        b"[" * 200_000,
        b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"U8","shape":[' + b"9" * 4000 + b'],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"U8","shape":['
        + b",".join([b"9" * 4000] * 20)
        + b'],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"U8","shape":[' + b",".join([b"0"] * 100_000) + b'],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},' * 2,
        b'{"a":{"dtype":"U8","shape":[0],"shape":[1],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
        b'"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}',
        b'{"a":{"dtype":"U8","shape":[-1],"data_offsets":[1,0]}}',
        b'{"a":{"dtype":["U8"],"shape":[1],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":{},"shape":[1],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,Infinity]}}',
        b'{"a":{"dtype":"U8","shape":[true],"data_offsets":[false,true]}}',
        '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.encode("utf-16"),
        b"\xff" * 100,
        b"",
    ],
    ids=lambda header: repr(header[:40]),
)
def test_hostile_safetensors_header_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors(header, data=b"\0"))
    with refused_or_fine(max_bytes=1_000_000 + 100 * len(header)), pytest.raises(CheckpointError):
        read_safetensors_header(path)


@hostile(80)
@given(header=st.data())
def test_checkpoint_with_a_changed_header(
    folder: Path, tmp_path: Path, header: st.DataObject
) -> None:
    """Opened and matched with its config: what tensors are there, and of which shape."""
    original = header_of(folder / "toy" / "model.safetensors")
    tree = header.draw(mutations(original, values=st.one_of(entries, trees, offsets)))
    whole = (folder / "toy" / "model.safetensors").read_bytes()
    data = whole[8 + struct.unpack("<Q", whole[:8])[0] :]
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    for made in (checkpoint, out):
        made.mkdir(exist_ok=True)
    (checkpoint / "config.json").write_bytes((folder / "toy" / "config.json").read_bytes())
    text = json.dumps(tree).encode()
    (checkpoint / "model.safetensors").write_bytes(safetensors(text, data=data))
    with refused_or_fine(max_bytes=20_000_000):
        convert(checkpoint, out)
    for made_file in out.iterdir():
        made_file.unlink()


@hostile(100)
@given(
    tree=mutations(
        {"metadata": {"total_size": 1}, "weight_map": {"a": "model.safetensors", "b": "x"}}
    )
)
def test_changed_index(folder: Path, tmp_path: Path, tree: Any) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / "toy" / name).read_bytes())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(tree))
    with refused_or_fine(max_bytes=5_000_000):
        open_checkpoint(tmp_path)


# config.json


ROPES = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    {"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3_SCALING},
]


@hostile(150)
@given(data=st.data())
def test_changed_checkpoint_config(folder: Path, data: st.DataObject) -> None:
    """Through everything that reads one: plan, pair check, memory estimate, conversion."""
    config = toy_config(data.draw(st.sampled_from(sorted(ARCHITECTURES))))
    config["rope_parameters"] = data.draw(st.sampled_from(ROPES))
    config |= data.draw(
        st.sampled_from(
            [
                {},
                {"sliding_window": 64, "use_sliding_window": True, "layer_types": None},
                {"quantization_config": {"quant_method": "fp8"}, "auto_map": {"A": "b"}},
                {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 1e4},
                {"eos_token_id": [1, 2], "attention_bias": True, "mlp_bias": False},
            ]
        )
    )
    checkpoint = folder / "changed-config"
    if not checkpoint.exists():
        write_toy_checkpoint(checkpoint)
        write_tokenizer(checkpoint, words(), bos_token="<bos>", eos_token="<eos>")
    (checkpoint / "config.json").write_text(json.dumps(data.draw(mutations(config))))
    path = folder / "changed-config.yaml"
    sides = {role: {"checkpoint": "changed-config"} for role in ("draft", "target")}
    path.write_text(json.dumps({"name": "x", **sides, "engine": {"device": "cpu"}}))
    for use in (
        lambda: planning.plan(load_config(path)),
        lambda: planning.check(load_config(path)),
        lambda: check_pair(checkpoint, folder / "toy"),
        lambda: open_checkpoint(checkpoint),
    ):
        with refused_or_fine(max_bytes=20_000_000):
            use()


# An artifact, as somebody else may hand it over


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[" * 1_000_000, "is no engine and holds none"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected at most 65536"),
    ],
    ids=["nested", "layers"],
)
def test_hostile_engine_is_inspected_at_once(
    folder: Path, tmp_path: Path, config: Any, message: str
) -> None:
    torch = pytest.importorskip("specpipe.runtimes.torch.build")
    unified, engine = tmp_path / "unified", tmp_path / "engine"
    for made in (unified, engine):
        made.mkdir()
    convert(folder / "toy", unified)
    sizes = {"max_batch_size": 1, "max_seq_len": 64, "max_draft_len": 1, "max_num_tokens": 8}
    torch.BuildTorchEngine(role="target", checkpoint=unified, device="cpu", **sizes).run(engine)
    path = engine / "config.json"
    if isinstance(config, dict):
        tree = json.loads(path.read_text())
        tree["pretrained_config"] |= config
        config = json.dumps(tree)
    path.write_text(config)
    with pytest.raises(SpecpipeError) as error:
        inspect(engine)
    assert message in str(error.value)


# Tokenizers


TOKENIZERS = {
    "words": words,
    "byte_level": lambda: byte_level(merges=(("a", "b"),)),
    "space_mark": space_mark,
    "word_piece": word_piece,
}
SETTINGS = {
    "bos_token": "<bos>",
    "eos_token": {"content": "<eos>", "special": True},
    "pad_token": None,
    "add_bos_token": True,
    "add_eos_token": False,
    "additional_special_tokens": ["<turn>"],
    "extra_special_tokens": {"image_token": "<pad>"},
    "added_tokens_decoder": {"0": {"content": "<pad>", "special": True, "lstrip": False}},
    "chat_template": [{"name": "default", "template": "{{ messages }}"}],
    "split_special_tokens": False,
}


def use_tokenizer(folder: Path) -> None:
    """Loads it and does what serving does with it."""
    with refused_or_fine():
        tokenizer = Tokenizer.load(folder)
        tokenizer.tokens()
        ids = tokenizer.encode("Deep w5 w6")
        tokenizer.encode_fragment("w5")
        tokenizer.decode(ids)
        detokenizer = tokenizer.detokenizer()
        detokenizer.append(ids)
        detokenizer.flush()
    with refused_or_fine():
        check_pair(folder, folder)


@hostile(150)
@given(kind=st.sampled_from(sorted(TOKENIZERS)), data=st.data())
def test_changed_tokenizer(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    tree = json.loads(TOKENIZERS[kind]().to_str())
    (tmp_path / "tokenizer.json").write_text(json.dumps(data.draw(mutations(tree))))
    (tmp_path / "config.json").write_text(json.dumps(toy_config(vocab_size=400)))
    use_tokenizer(tmp_path)


@hostile(120)
@given(tree=mutations(SETTINGS))
def test_changed_tokenizer_config(tmp_path: Path, tree: Any) -> None:
    write_tokenizer(tmp_path, words())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tree))
    (tmp_path / "config.json").write_text(json.dumps(toy_config()))
    use_tokenizer(tmp_path)


@hostile(80)
@given(
    name=st.sampled_from(["generation_config.json", "special_tokens_map.json", "config.json"]),
    tree=st.one_of(
        trees,
        mutations({"eos_token_id": [1, 2], "bos_token_id": 1, "pad_token_id": 0, **SETTINGS}),
    ),
)
def test_changed_small_files(tmp_path: Path, name: str, tree: Any) -> None:
    write_tokenizer(tmp_path, words(), bos_token="<bos>")
    (tmp_path / name).write_text(json.dumps(tree))
    use_tokenizer(tmp_path)
    (tmp_path / name).unlink()


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{{ 'a' * 10**12 }}{{ '%1000000000000d' % 1 }}", "cannot render a plain question: "),
        ("{{ " + "(" * 2_000 + "1" + ")" * 2_000 + " }}", "does not compile: "),
        ("{{ " + "1" * 5_000 + " }}", "does not compile: "),
        ("{% for %}", "does not compile: line 1: "),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_hostile_chat_template(tmp_path: Path, template: str, fault: str) -> None:
    """The pair check tries it, in a process that has limits."""
    write_tokenizer(tmp_path, words(), chat_template=template)
    (tmp_path / "config.json").write_text(json.dumps(toy_config()))
    with refused_or_fine(max_bytes=20_000_000):
        (note,) = check_pair(tmp_path, tmp_path).notes
    path = tmp_path / "tokenizer_config.json"
    assert note.startswith(f"requests with messages will be refused: {path}: the chat template ")
    assert fault in note
