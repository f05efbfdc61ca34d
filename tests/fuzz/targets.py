"""What is fuzzed: for each kind of input the code that reads it, called as users and servers do.

A target takes bytes and returns where they are accepted. `TARGETS` has them by name, `SEEDS` what
they start from beside the corpus.
"""

from __future__ import annotations

import asyncio
import atexit
import base64
import contextlib
import dataclasses
import hashlib
import http.client
import io
import json
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import yaml

from specpipe.build import execution, lock, planning
from specpipe.build.load import load_config
from specpipe.build.pairing import check_pair
from specpipe.checkpoints import source
from specpipe.checkpoints.checkpoint import open_checkpoint, read_safetensors_header
from specpipe.checkpoints.limits import FileLimits
from specpipe.checkpoints.plain_weights import open_weights
from specpipe.config.limits import Limits
from specpipe.errors import (
    FAULT,
    CheckpointError,
    RequestError,
    ServerError,
    SignatureError,
    SpecpipeError,
)
from specpipe.evaluate.endpoints.base import Question
from specpipe.evaluate.endpoints.openai import OpenAI
from specpipe.evaluate.endpoints.triton import Triton
from specpipe.gateway.body import parse_body, validate
from specpipe.gateway.chat_inputs import chat_asks
from specpipe.gateway.chat_schema import ChatRequest
from specpipe.gateway.completion_schema import CompletionRequest
from specpipe.gateway.completions import completion_asks
from specpipe.gateway.models import ServedModel
from specpipe.machine.gpus import Gpu
from specpipe.machine.manifest import FileRecord, Manifest
from specpipe.quantization.prequantized import read_prequantized
from specpipe.release.comparison import compare
from specpipe.release.documents import PROVENANCE, read_documents
from specpipe.release.release_file import read_release
from specpipe.release.trust.keys import fingerprint, public_pem
from specpipe.release.trust.publishers import Trust, read_trust
from specpipe.release.trust.verification import verify
from specpipe.runtimes import requirements
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.pair_file import PairFile, read_pair
from specpipe.speculative.request import Request
from specpipe.text.chat_template import ChatTemplate
from specpipe.text.tokenizer import Tokenizer
from specpipe.text.tools.hermes import HermesDialect
from specpipe.text.tools.llama import LlamaDialect
from specpipe.text.tools.mistral import MistralDialect
from specpipe.triton import repository, serving
from specpipe.triton.client import Client
from specpipe.triton.client.grpc_messages import write_request
from specpipe.triton.secret import Signer
from tests.chat_templates import CONVERSATIONS, TEMPLATES
from tests.fuzz.trial import MAX_BYTES, SENTENCE, VALUE, Target, Use
from tests.model_repo.conftest import InferenceRequest, ServerRequest, load, stand_in
from tests.tool_calls import TOOLS, read
from tests.toy import ARCHITECTURES, LLAMA3_SCALING, toy_config, write_toy_checkpoint
from tests.toy_tokenizers import byte_level, space_mark, word_piece, words, write_tokenizer
from tests.triton.echo_pair import EchoPair

ROOT = Path(__file__).parents[2]
TARGETS: dict[str, Target] = {}
SEEDS: dict[str, list[bytes]] = {}

_ROLES = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
_LONG = {"max_position_embeddings": 1 << 17}
_SECRET = "of a start"
# A template may take a fraction of what it may take in service, so that more are tried.
_LIMITS = FileLimits(chat_template_seconds=0.2, chat_template_memory_bytes=64 << 20)


def _target(*seeds: Any, max_echo: int = VALUE) -> Callable[[Use], Use]:
    def add(use: Use) -> Use:
        name = use.__name__
        TARGETS[name], SEEDS[name] = Target(use, max_echo), [_as_bytes(seed) for seed in seeds]
        return use

    return add


def _as_bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    return (value if isinstance(value, str) else json.dumps(value)).encode()


@cache
def _folder() -> Path:
    """A folder of this process with a whole toy checkpoint, `toy`."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    atexit.register(_remove, os.getpid(), folder)
    write_toy_checkpoint(folder / "toy")
    write_tokenizer(folder / "toy", words(), **_ROLES)
    shutil.copytree(folder / "toy", folder / "hub")
    (folder / "hub" / "config.json").write_text(json.dumps(toy_config(**_LONG)))
    (folder / "models").symlink_to(ROOT / "models")
    (folder / "configs").mkdir()
    return folder


def _remove(owner: int, folder: Path) -> None:
    if owner == os.getpid():
        shutil.rmtree(folder)


@cache
def _changed(name: str) -> Path:
    """A copy of the toy in which `name` is to be what is fuzzed."""
    return Path(shutil.copytree(_folder() / "toy", _folder() / f"changed-{name}")) / name


def _use_tokenizer(folder: Path) -> None:
    """Does with a tokenizer what serving does, and checks its pair with itself."""
    tokenizer = Tokenizer.load(folder, _LIMITS)
    ids = tokenizer.encode("w5 w6")
    tokenizer.encode_fragment("w5")
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.append([token_id]) for token_id in ids]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids)
    check_pair(folder, folder, _LIMITS)


# The files of a checkpoint


def _safetensors(header: dict[str, Any], num_bytes: int) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes)


@_target(
    _safetensors({}, 0),
    _safetensors(
        {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
            "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
            "c": {"dtype": "U8", "shape": [], "data_offsets": [32, 33]},
        },
        33,
    ),
)
def safetensors(data: bytes) -> None:
    """What is accepted fills the file exactly; a header is tried with its own length, too."""
    path = _changed("model.safetensors")
    path.write_bytes(data)
    with contextlib.suppress(CheckpointError):
        read_safetensors_header(path)
    end = data.rfind(b"}", 8) + 1
    if end:
        data = struct.pack("<Q", end - 8) + data[8:]
        path.write_bytes(data)
    tensors = read_safetensors_header(path)
    spans = sorted((info.offset, info.offset + info.num_bytes) for info in tensors.values())
    assert sum(stop - start for start, stop in spans) == len(data) - max(end, 8 + len(b"{}"))
    assert all(8 <= start <= stop <= len(data) for start, stop in spans)


@_target(
    {"metadata": {"total_size": 33}, "weight_map": dict.fromkeys("abc", "model.safetensors")},
    {"weight_map": {"a": "model.safetensors", "b": "model-00001-of-00002.safetensors"}},
)
def index(data: bytes) -> None:
    path = _changed("model.safetensors.index.json")
    path.write_bytes(data)
    path.with_name("model.safetensors").write_bytes(SEEDS["safetensors"][1])
    open_checkpoint(path.parent)


_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    {"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3_SCALING},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1, "mscale_all_dim": 2},
    {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0], "long_factor": [2.0]},
)


@_target(
    *(toy_config(family) for family in ARCHITECTURES),
    *(toy_config(rope_parameters=rope) for rope in _ROPES),
    toy_config("qwen2", sliding_window=64, use_sliding_window=True, layer_types=["a", "b"]),
    toy_config(rope_scaling={"type": "dynamic", "factor": 2.0}, rope_theta=1e4),
)
def config(data: bytes) -> None:
    """Through everything that reads one."""
    path = _changed("config.json")
    path.write_bytes(data)
    for use in (_use_tokenizer, open_weights):
        with contextlib.suppress(CheckpointError):
            use(path.parent)
    settings = _folder() / "config.yaml"
    sides = {role: {"checkpoint": str(path.parent)} for role in ("draft", "target")}
    settings.write_text(json.dumps({"name": "x", **sides, "engine": {"device": "cpu"}}))
    planning.plan(load_config(settings))
    planning.check(load_config(settings))


@_target(
    {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
    {
        "quantization": {
            "quant_algo": "W4A16_AWQ",
            "kv_cache_quant_algo": "FP8",
            "group_size": 128,
            "has_zero_point": False,
            "pre_quant_scale": True,
            "exclude_modules": ["lm_head"],
        }
    },
)
def hf_quant_config(data: bytes) -> None:
    path = _changed("hf_quant_config.json")
    path.write_bytes(data)
    read_prequantized(path.parent)


_FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


@_target(
    _AWQ,
    {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True},
    {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": _FP8},
    {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "kv_cache_scheme": None,
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": _FP8, "input_activations": _FP8}
        },
    },
)
def quantization_config(data: bytes) -> None:
    path = _changed("config.json").with_name("config.json")
    text = json.dumps(toy_config(quantization_config="")).replace('""', "%s")
    path.write_bytes(text.encode().replace(b"%s", data))
    read_prequantized(path.parent)


@_target(*(make().to_str() for make in (words, byte_level, space_mark, word_piece)))
def tokenizer(data: bytes) -> None:
    path = _changed("tokenizer.json")
    path.write_bytes(data)
    path.with_name("tokenizer_config.json").write_text("{}")
    path.with_name("config.json").write_text(json.dumps(toy_config(vocab_size=400)))
    _use_tokenizer(path.parent)


@_target(
    {
        **_ROLES,
        "eos_token": {"content": "<eos>", "special": True},
        "add_bos_token": True,
        "add_eos_token": False,
        "additional_special_tokens": ["<turn>"],
        "extra_special_tokens": {"image_token": "<pad>"},
        "added_tokens_decoder": {"0": {"content": "<pad>", "special": True, "lstrip": False}},
        "split_special_tokens": False,
    },
    {**_ROLES, "chat_template": [{"name": "default", "template": "{{ messages }}"}]},
)
def tokenizer_config(data: bytes) -> None:
    path = _changed("tokenizer_config.json")
    path.write_bytes(data)
    _use_tokenizer(path.parent)


@_target({**_ROLES, "additional_special_tokens": ["<turn>", {"content": "w5"}]})
def special_tokens_map(data: bytes) -> None:
    path = _changed("special_tokens_map.json")
    path.write_bytes(data)
    path.with_name("tokenizer_config.json").write_text("{}")
    _use_tokenizer(path.parent)


@_target({"<pad>": 0, "<turn>": 3, "new": 250})
def added_tokens(data: bytes) -> None:
    path = _changed("added_tokens.json")
    path.write_bytes(data)
    _use_tokenizer(path.parent)


@_target({"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0, "suppress_tokens": [7]})
def generation_config(data: bytes) -> None:
    path = _changed("generation_config.json")
    path.write_bytes(data)
    _use_tokenizer(path.parent)


# Chat templates, and what is rendered by one


@_target(*TEMPLATES.values())
def chat_template(data: bytes) -> None:
    template = ChatTemplate(
        data.decode(errors="surrogateescape"),
        file="chat_template.jinja",
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        limits=_LIMITS,
    )
    template.check()
    template.render([{"role": "user", "content": [{"type": "text", "text": "hi"}]}])


# What models write, and which functions they may call


_DIALECTS = (HermesDialect({}), LlamaDialect({}), MistralDialect({}))
_ANSWERS = (
    'So.\n<tool_call>\n{"name": "weather", "arguments": {"days": [1.5]}}\n</tool_call>',
    '<|python_tag|>{"name": "weather", "parameters": {"city": "\\u00e9"}}; {"name": ""}',
    '[TOOL_CALLS] [{"name": "weather", "arguments": {}, "id": "012345678"}]',
    '[TOOL_CALLS]world.time[CALL_ID]012345678[ARGS]{"a": "b"}[TOOL_CALLS]weather{}',
)


@_target(*_ANSWERS)
def answer(data: bytes) -> None:
    text = data.decode(errors="replace")[:1024]
    for dialect in _DIALECTS:
        whole = read(dialect.parser(TOOLS), [text])
        half = len(text) // 2
        assert read(dialect.parser(TOOLS), [text[:half], text[half:]]) == whole
        json.dumps(whole, ensure_ascii=False).encode()


@_target(TOOLS)
def tools(data: bytes) -> None:
    try:
        offered = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(offered, list):
        for dialect in _DIALECTS:
            dialect.grammar(offered, is_parallel=True).encode()


# The YAML


_CONFIGS = [path.read_bytes() for path in sorted((ROOT / "configs").glob("*.yaml"))]


@_target(*_CONFIGS, *map(yaml.safe_load, _CONFIGS), max_echo=SENTENCE)
def configuration(data: bytes) -> None:
    """Goes as far as is possible without writing; paths of the user's own stand whole."""
    path = _folder() / "configs" / "fuzzed.yaml"
    path.write_bytes(data)
    with mock.patch.object(source, "_fetch", lambda *_: _folder() / "hub"):
        settings = load_config(path)
        assert settings.artifacts_dir.is_absolute()
        execution.preview(planning.plan(settings))
        planning.check(settings)


# The files of a repository


@cache
def _models() -> dict[str, Any]:
    """The hand-written models of one repository, which serves an EchoPair."""
    version = _folder() / "served" / "1"
    version.mkdir(parents=True)
    template = TEMPLATES["chatml"]
    write_tokenizer(version / "tokenizer", byte_level(), chat_template=template)
    limits = Limits(chat_template_seconds=0.5)
    served = limits.resolved(max_seq_len=512, longest_token_bytes=2, is_bytewise=True)
    (version / "limits.json").write_text(served.model_dump_json())
    (version / "pair.json").write_text(PairFile("torch", PairOptions(max_seq_len=512)).to_json())
    module = stand_in()
    sys.modules[module.__name__] = module  # only while they are imported: other tests have none
    try:
        models = {name: load(name) for name in ("preprocessing", "speculative", "postprocessing")}
    finally:
        del sys.modules[module.__name__]
    parameters = {
        "tokenizer_dir": "tokenizer",
        "limits_file": "limits.json",
        "pair_file": "pair.json",
        "draft_engine_dir": "draft",
        "target_engine_dir": "target",
        "cancels": "speculative",
    }
    arguments = {
        "model_name": "speculative",
        "model_config": json.dumps(
            {"parameters": {key: {"string_value": value} for key, value in parameters.items()}}
        ),
        "model_repository": str(version.parent),
        "model_version": "1",
    }

    def load_pair(_: object, pair: PairFile, detokenizer: Any, guides: Any) -> EchoPair:
        return EchoPair(pair.options, detokenizer)

    with (
        mock.patch.object(repository, "load_pair", load_pair),
        mock.patch.dict(os.environ, SPECPIPE_SECRET=_SECRET),
    ):
        for model in models.values():
            model.initialize(arguments)
    atexit.register(models["speculative"].finalize)
    return models


_PAIR = PairFile("torch", PairOptions(unused_token_ids=((250, 256),), schedule=((4, 2), (8, 0))))


@_target(_PAIR.to_json())
def pair_file(data: bytes) -> None:
    """What is read again is the same."""
    path = _folder() / "repository" / "speculative" / "1" / "pair.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    for name in ("ensemble", "speculative"):
        (path.parents[2] / name).mkdir(exist_ok=True)
    pair = read_pair(path.parents[2])
    path.write_text(pair.to_json())
    assert read_pair(path.parents[2]) == pair


_LOCK = {
    "format": 1,
    "checkpoints": {"draft": {"source": "a folder", "files": {"config.json": "0f"}}},
    "versions": {"specpipe": "0.2.0"},
    "gpus": {},
}


@_target(_LOCK, {**_LOCK, "gpus": lock.UNKNOWN})
def build_lock(data: bytes) -> None:
    """Each difference is one short line; there may be many."""
    path = _folder() / "x.lock"
    path.write_bytes(data)
    locked = lock.read(path)
    lines = lock.changes(locked, _LOCK)
    with contextlib.suppress(SpecpipeError):
        lines += lock.check(path, locked, _LOCK)
    assert all(len(line) < 300 and line.isprintable() for line in lines)


# Signed versions, and whose are trusted


_VERSION = {
    "release.json": json.dumps(
        {
            "format": 1,
            "pair": "x",
            "number": 1,
            "digest": "0" * 64,
            "requires": {"runtime": "torch", "libraries": {}},
            "published_at": "2026-11-29T12:00:00+00:00",
            "specpipe": "0",
        }
    ).encode(),
    "model_repo/config.pbtxt": b"",
}


@cache
def _signed() -> tuple[Path, Any, Trust]:
    """A version without its signature, the key that signs it, and a trust file with that."""
    from cryptography.hazmat.primitives.asymmetric import ec

    folder = _folder() / "version"
    for name, content in _VERSION.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    key = ec.generate_private_key(ec.SECP256R1())
    trust = Trust(_folder() / "trust.json", ()).with_key(public_pem(key.public_key()), name="ci")
    return folder, key, trust


_SHA256 = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(_VERSION.items())}
_STATEMENT = {
    "_type": "https://in-toto.io/Statement/v1",
    "subject": [
        {
            "name": "version",
            "digest": {
                "sha256": hashlib.sha256(bytes.fromhex("".join(_SHA256.values()))).hexdigest()
            },
        }
    ],
    "predicateType": "https://model_signing/signature/v1.0",
    "predicate": {
        "serialization": {
            "method": "files",
            "hash_type": "sha256",
            "allow_symlinks": False,
            "ignore_paths": ["model.sig"],
        },
        "resources": [
            {"name": name, "algorithm": "sha256", "digest": digest}
            for name, digest in _SHA256.items()
        ],
    },
}


def _bundle(statement: bytes, signature: bytes, hint: str) -> dict[str, Any]:
    return {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": {"publicKey": {"hint": hint}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(statement).decode(),
            "payloadType": "application/vnd.in-toto+json",
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }


@_target(_STATEMENT, _bundle(json.dumps(_STATEMENT).encode(), b"0" * 70, "0" * 64))
def model_signature(data: bytes) -> None:
    """As a `model.sig`, then as the statement in one, signed by a publisher who is trusted."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    folder, key, trust = _signed()
    path = folder / "model.sig"
    path.write_bytes(data.replace(b"0" * 64, fingerprint(public_pem(key.public_key())).encode()))
    with contextlib.suppress(SignatureError):
        verify(folder, trust)
    pae = b"DSSEv1 28 application/vnd.in-toto+json %d %s" % (len(data), data)
    signed = key.sign(pae, ec.ECDSA(hashes.SHA256()))
    hint = fingerprint(public_pem(key.public_key()))
    path.write_text(json.dumps(_bundle(data, signed, hint)))
    assert set(verify(folder, trust).files) == set(_VERSION)


@_target(
    {"publishers": []},
    {
        "publishers": [
            {
                "name": "ci",
                "pairs": ["python-*"],
                "keys": [
                    {
                        "pem": "PEM",
                        "added": "2026-11-29T12:00:00Z",
                        "expires": "2027-01-01T00:00:00+01:00",
                        "revoked": {
                            "at": "2026-12-01T00:00:00Z",
                            "reason": "lost",
                            "still_trusted": ["0" * 64],
                        },
                    }
                ],
            }
        ]
    },
)
def trust_file(data: bytes) -> None:
    path = _folder() / "trust.json"
    pem = json.dumps(public_pem(_signed()[1].public_key()))[1:-1]
    path.write_bytes(data.replace(b"PEM", pem.encode()))
    trust = read_trust(path)
    trust.write()
    assert read_trust(path) == trust


_RELEASE = {
    "format": 1,
    "pair": "pair",
    "number": 7,
    "digest": "ab" * 32,
    "requires": {
        "runtime": "tensorrt_llm",
        "libraries": {"tensorrt_llm": "1.2.1", "torch": ""},
        "engines": {"target": {"compute_capabilities": ["9.0"], "gpu_ids": [0, 1]}},
        "driver": "570.124.06",
    },
    "published_at": "2026-11-29T04:00:00+00:00",
    "specpipe": "0.2.0",
    "previous": 6,
    "notes": ["no licence file found in the draft's checkpoint draft"],
}
_GPUS = (Gpu("NVIDIA L4", 24 << 30, 89, "550.1"),)


@_target(_RELEASE)
def release_file(data: bytes) -> None:
    """Whatever a version needs, each fault is one short line; what is read again is the same."""
    path = _folder() / "version" / "release.json"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    release = read_release(path.parent)
    release.write(path.parent)
    assert read_release(path.parent) == release
    for gpus in ((), _GPUS):
        faults = list(requirements.faults(release.requires, gpus))
        assert all(len(line) < 500 and line.isprintable() for line in faults)


_PROVENANCE = {
    "predicate": {
        "buildDefinition": {
            "externalParameters": {"config": {"name": "x", "engine": {"max_batch_size": 8}}},
            "internalParameters": {"gpus": [{"name": "NVIDIA L4"}]},
            "resolvedDependencies": [
                {"name": "draft/config.json", "digest": {"sha256": "0f" * 32}},
                {"name": "torch", "uri": "pkg:pypi/torch@2.13.0%2Bcpu"},
            ],
        }
    }
}
_NIGHT = {
    "format": 1,
    "kind": "nightly",
    "pair": "x",
    "config": "x.yaml",
    "made_at": "2026-11-29T03:00:09+00:00",
    "outcome": "good",
    "asked": {"prompts": "9b", "num_draft_tokens": 3, "served_by": "Triton", "machine": "one"},
    "acceptance": {
        "num_draft_tokens": 12,
        "num_accepted_tokens": 4,
        "prompts": [
            {
                "prompt": "a",
                "kind": "code",
                "num_draft_tokens": 12,
                "num_accepted_tokens": 4,
                "judged_at": [4, 2],
                "accepted_at": [2, 2],
            }
        ],
    },
    "speed_ups": [
        {
            "concurrency": 1,
            "ratio": 1.3,
            "low": 1.2,
            "high": None,
            "num_answers": 8,
            "num_failed": 0,
        }
    ],
}


def _compare_version(name: str, data: bytes) -> None:
    """A table of two versions has no long line, and values that are JSON."""
    folder = _folder() / f"version-{Path(name).stem}"
    for path, seed in ((PROVENANCE, _PROVENANCE), ("results/nightly.json", _NIGHT)):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data if path == name else _as_bytes(seed))
    manifest = Manifest("package", (), {}, {}, {"a": FileRecord(1, 0, "0f")}, {})
    manifest.write(folder / "model_repo.manifest.json")
    documents = read_documents(folder, "version 2")
    nothing = dataclasses.replace(documents, settings={}, dependencies=(), night=None)
    compared = compare(nothing, documents)
    json.dumps(compared.to_json())
    lines = compared.lines()
    assert len(lines) < 210 and all(len(line) < 500 and line.isprintable() for line in lines)


@_target(_PROVENANCE)
def version_provenance(data: bytes) -> None:
    _compare_version(PROVENANCE, data)


@_target(_NIGHT)
def version_night(data: bytes) -> None:
    _compare_version("results/nightly.json", data)


# Requests


def _arrays(values: dict[str, Any], tensors: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Makes tensors as Triton would let them pass: declared, of their types."""
    arrays = {}
    for tensor in tensors:
        if tensor.name in values:
            value = values[tensor.name]
            is_listed = isinstance(value, list) and tensor.dims != (1,)
            listed = value if is_listed else [value]
            elements = [_element(tensor.numpy_dtype, element) for element in listed]
            arrays[tensor.name] = serving.as_array(tensor, elements)
    return arrays


def _element(dtype: np.dtype[Any], value: Any) -> Any:
    if dtype == np.object_:
        text = value if isinstance(value, str) else json.dumps(value)
        return text.encode(errors="surrogatepass")
    if not isinstance(value, (int, float)):
        return len(str(value))
    if dtype == np.bool_:
        return bool(value)
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return dtype.type(value if abs(value) < 1e300 else np.inf)
    if isinstance(value, float):
        return 0
    return min(max(value, np.iinfo(dtype).min), np.iinfo(dtype).max)


def _request(data: bytes, tensors: Any) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    """Reads a request: its inputs by name, and beside them what is no tensor."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        values = {"text_input": data.decode(errors="replace"), "request": data.decode("latin-1")}
    if not isinstance(values, dict):
        values = {"messages": values, "max_tokens": 3, "text": values, "cancel": values}
    return _arrays(values, tensors), values


def _check_response(response: Any) -> dict[str, Any]:
    error = response.error()
    if error is not None:
        # What is refused and what failed in the words of the server; FAULT covers anything else.
        assert str(error) != FAULT
        raise RequestError(str(error))
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


def _speculate(tensors: dict[str, Any]) -> list[dict[str, Any]]:
    request = ServerRequest(tensors)
    _models()["speculative"].execute([request])
    assert request.sender.closed.wait(20), "no answer"
    return [_check_response(sent) for sent, _ in request.sender.sent if sent is not None]


_SETTINGS: dict[str, Any] = {
    "max_tokens": 3,
    "num_draft_tokens": 1,
    "stream": True,
    "temperature": 0.5,
    "top_k": 2,
    "top_p": 0.5,
    "min_p": 0.1,
    "seed": 7,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": -0.1,
    "min_tokens": 1,
    "bad_words": ["a", "bc"],
    "stop_words": ["d", "e f"],
    "end_id": 3,
    "priority": 1,
    "timeout_s": 9.5,
    "cache_salt": "a",
    "exclude_input_in_output": False,
    "return_log_probs": True,
    "beam_width": 1,
    "embedding_bias_words": ["a", "b"],
    "embedding_bias_weights": [0.5, -0.5],
    "logit_bias_ids": [5, 6],
    "logit_bias_values": [1.5, -100.0],
    "stop_token_ids": [7, 8],
    "ignore_eos": False,
    "num_top_log_probs": 2,
    "return_token_ids": True,
    "skip_special_tokens": False,
    "parameters": {"id": "x"},
    "timeout_us": 0,
}
_CHAT = {
    "messages": CONVERSATIONS["two turns"],
    "max_tokens": 3,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": False,
    "chat_template_kwargs": {"enable_thinking": False},
    "add_generation_prompt": False,
}
_REQUESTS = (
    {"text_input": "abc", **_SETTINGS},
    {"input_ids": [97, 98, 99], "max_tokens": 0, "return_prompt_log_probs": True},
    {"text_input": "abc", "max_tokens": 3, "prediction": "abd"},
    {
        "text_input": "abc",
        "max_tokens": 3,
        "guided_decoding_guide_type": "json_schema",
        "guided_decoding_guide": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
    _CHAT,
    {**_CHAT, "tool_choice": "auto", "continue_final_message": True},
    *({"messages": messages, "max_tokens": 3} for messages in CONVERSATIONS.values()),
)


def _preprocess(data: bytes) -> dict[str, Any]:
    tensors, values = _request(data, serving.PREPROCESSING_INPUTS)
    parameters = values.get("parameters")
    request = ServerRequest(tensors, parameters=parameters if isinstance(parameters, dict) else {})
    if isinstance(values.get("timeout_us"), int):
        request.timeout = lambda: values["timeout_us"] % 2**64  # type: ignore[method-assign]
    (response,) = _models()["preprocessing"].execute([request])
    return _check_response(response)


@_target(*_REQUESTS)
def preprocessing(data: bytes) -> None:
    """What it hands on is read as it was written."""
    made = _preprocess(data)
    read = serving.Generation.from_tensors(
        made, request_id="", signer=Signer(_SECRET), max_seq_len=512
    )
    again = read.to_tensors(Signer(_SECRET))
    assert all(np.array_equal(array, again[name]) for name, array in made.items())


@cache
def _served() -> ServedModel:
    limits = Limits().resolved(max_seq_len=512, longest_token_bytes=2, is_bytewise=True)
    return ServedModel(names=("toy",), tokenizer=Tokenizer.load(_folder() / "toy"), limits=limits)


_FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"const": 1}}}}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


@_target(
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        ],
        "tools": [{"type": "function", "function": _FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "stream_options": {"include_usage": True},
        "logit_bias": {"5": -100},
        "prediction": {"type": "content", "content": "x"},
        "reasoning_effort": "none",
    },
    {
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object"}},
        },
        "top_logprobs": 2,
        "logprobs": True,
        "n": 2,
        "seed": -1,
    },
)
def openai_chat(data: bytes) -> None:
    """From the body to what is sent to Triton."""
    parsed = parse_body(data, _served().limits)
    body = validate(ChatRequest, parsed, is_lenient=len(data) % 2 == 0)
    for ask in chat_asks(body, _served(), shows_special=False):
        write_request("ensemble", ask.inputs)


@_target(
    {
        "prompt": ["x y", "z"],
        "stop": ["a"],
        "logprobs": 1,
        "echo": True,
        "max_tokens": 0,
        "top_p": 0,
        "stop_token_ids": [3],
        "structured_outputs": {"choice": ["a", "b"]},
    },
    {"prompt": [[1, 2], [3]], "temperature": 0.5, "guided_grammar": 'start: "a"', "n": 3},
)
def openai_completion(data: bytes) -> None:
    """The same of the other kind."""
    parsed = parse_body(data, _served().limits)
    body = validate(CompletionRequest, parsed, is_lenient=len(data) % 2 == 0)
    for ask in asyncio.run(completion_asks(body, _served())):
        write_request("ensemble", ask.inputs)


@_target(*_REQUESTS)
def ensemble(data: bytes) -> None:
    """A request goes through the three models as Triton hands it on; the last response ends it."""
    responses = _speculate(_preprocess(data))
    for response in responses:
        _postprocess(response["text"], response.get("stream_id"), cancelled=False)
    assert [("finish_reason" in response) for response in responses[-2:]].count(True) == 1
    assert "finish_reason" in responses[-1]


def _postprocess(text: Any, stream_id: Any, *, cancelled: bool) -> None:
    tensors = {"text": text} if stream_id is None else {"text": text, "stream_id": stream_id}
    request = ServerRequest(tensors)
    request.cancelled = cancelled
    (response,) = _models()["postprocessing"].execute([request])
    assert _check_response(response)["text_output"].tolist() == text.tolist()


@_target({"text": "abc", "stream_id": "0123"})
def postprocessing(data: bytes) -> None:
    tensors, values = _request(data, serving.POSTPROCESSING_INPUTS)
    InferenceRequest.made.clear()
    request = ServerRequest(tensors)
    request.cancelled = bool(values.get("cancelled", True))
    (response,) = _models()["postprocessing"].execute([request])
    _check_response(response)
    for call in InferenceRequest.made:
        _speculate({tensor.name(): tensor.as_numpy() for tensor in call.inputs})


def _generation() -> dict[str, Any]:
    request = Request(request_id="", prompt_token_ids=(70, 71), max_tokens=3)
    tensors = serving.Generation(request=request, stream=True).to_tensors(Signer(_SECRET))
    return {"request": json.loads(tensors["request"].item()), "prompt_token_ids": [70, 71]}


@_target(_generation(), {"cancel": "x"}, {**_generation(), "signature": "0" * 64})
def speculative(data: bytes) -> None:
    """What has no signature gets the right one, so that what comes after it is tried as well."""
    tensors, _ = _request(data, serving.SPECULATIVE_INPUTS)
    for name, parts in (("cancel", ("cancel",)), ("request", ("request", "prompt_token_ids"))):
        if "signature" not in tensors and all(
            part in tensors and tensors[part].size for part in parts
        ):
            signed = [
                array.item(0) if array.dtype == np.object_ else array.tobytes()
                for array in map(tensors.__getitem__, parts)
            ]
            made = Signer(_SECRET).sign(name, *signed)
            tensors["signature"] = serving.as_array(serving.SIGNATURE, [made])
    _speculate(tensors)


# What servers send


class _Socket:
    """A server that answers a POST with these bytes, so many at a time, and a GET by `get`."""

    def __init__(self, get: bytes, post: bytes, most: int) -> None:
        self._get, self._post, self._most = get, post, most

    def sendall(self, data: bytes) -> None:
        if data.startswith((b"GET ", b"POST ")):
            answer = self._get if data.startswith(b"GET ") else self._post
            self._received = io.BufferedReader(_InPieces(answer, self._most))

    def makefile(self, mode: str) -> io.BufferedReader:
        return self._received

    def close(self) -> None: ...


class _InPieces(io.BytesIO):
    def __init__(self, data: bytes, most: int) -> None:
        super().__init__(data)
        self._most = most

    def readinto(self, buffer: Any) -> int:
        return super().readinto(memoryview(buffer)[: self._most])


def _ask(ask: Callable[[], Iterator[Any]], *, get: bytes = b"", post: bytes = b"") -> None:
    """What is made of an answer is the same however it is cut on its way."""
    outcomes: list[list[Any]] = []
    error: Exception | None = None
    for most in (MAX_BYTES, 1 if len(post) < 2000 else 7):
        outcomes.append([])

        def connect(connection: Any, most: int = most) -> None:
            connection.sock = _Socket(get, post, most)

        with mock.patch.object(http.client.HTTPConnection, "connect", connect):
            try:
                outcomes[-1].extend(ask())
            except (RequestError, ServerError) as exc:
                error = exc
                outcomes[-1].append(str(exc))
    assert repr(outcomes[0]) == repr(outcomes[1])
    if error is not None:
        raise error


def _texts(pieces: Iterable[Any]) -> Iterator[Any]:
    for piece in pieces:
        piece.text.encode()  # as whoever prints it will
        yield piece


def _http(body: str, kind: str = "text/event-stream", status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n\r\n{body}".encode()


def _events(*values: Any) -> bytes:
    return _http("".join(f"data: {json.dumps(value)}\n\n" for value in values))


_LAST = {
    "model_name": "ensemble",
    "text_output": "é",
    "finish_reason": "stop",
    "output_ids": [5, 6],
    "output_log_probs": [-0.5, -1.0],
    "output_top_log_prob_ids": [5, 7, 6, 8],
    "output_top_log_probs": [-0.5, -2.0, -1.0, -3.0],
    "prompt_log_probs": -1.5,
    "prompt_top_log_prob_ids": [1, 2],
    "prompt_top_log_probs": [-1.5, -2.5],
    "accepted_prediction_tokens": 1,
    "acceptance_rate": 0.5,
    **dict.fromkeys(("num_input_tokens", "num_output_tokens", "num_steps", "seed_used"), 3),
    **dict.fromkeys(("total_draft_tokens", "total_accepted_draft_tokens"), 2),
    "is_lossless": True,
}


_OUTPUTS = [{"name": "text_output"}, {"name": "finish_reason"}]
_CONFIG = _http(
    json.dumps({"model_transaction_policy": {"decoupled": True}, "output": _OUTPUTS}),
    "application/json",
)


@_target(
    _events({"model_name": "ensemble", "text_output": "a"}, _LAST),
    _events({"error": "in ensemble 'ensemble', max_tokens is missing"}),
    _events({"model_name": "e", "text_output": "a"}, {"finish_reason": "error", "error": "NaN"}),
    _http('data: {"error": "no"}', status="400 Bad Request"),
    max_echo=SENTENCE,
)
def triton_stream(data: bytes) -> None:
    _ask(lambda: _texts(_client().stream("a", max_tokens=3)), get=_CONFIG, post=data)


@_target(
    _http(json.dumps(_LAST), "application/json"),
    _http('{"error": "no"}', status="400 Bad Request"),
    max_echo=SENTENCE,
)
def triton_answer(data: bytes) -> None:
    _ask(lambda: _texts([_client().generate("a", max_tokens=3)]), get=_CONFIG, post=data)


@_target(_CONFIG, max_echo=SENTENCE)
def triton_config(data: bytes) -> None:
    _ask(lambda: iter([_client().is_decoupled]), get=data)


def _client() -> Client:
    return Client("http://127.0.0.1:1")


_USAGE = {"prompt_tokens": 3, "completion_tokens": 2}
_DRAFTED = {"num_spec_steps": 1, "num_draft_tokens": 4, "acceptance_histogram": [0, 1]}


@_target(
    _events(
        {"choices": [{"text": "é", "token_ids": [5], "finish_reason": None}], "usage": _USAGE},
        {"choices": [{"delta": {"content": "b", "reasoning": "c"}, "finish_reason": "stop"}]},
        {"choices": [], "usage": _USAGE, "metrics": {"speculative_decoding": _DRAFTED}},
    ),
    _events({"error": {"message": "no", "code": 400}}),
    _http('{"error": {"message": "unknown key"}}', status="422 Unprocessable"),
    max_echo=SENTENCE,
)
def openai_stream(data: bytes) -> None:
    question = Question(text="a", max_tokens=3)
    server = OpenAI("openai+http://127.0.0.1:1", model="m")
    _ask(lambda: _texts(server.stream(question)), post=data)


_INPUTS = [{"name": name} for name in ("text_input", "max_tokens", "stream", "temperature")]


@_target(*SEEDS["triton_stream"], max_echo=SENTENCE)
def triton_endpoint(data: bytes) -> None:
    """NVIDIA's ensemble, which tells its counts otherwise."""
    metadata = {"inputs": _INPUTS, "outputs": _OUTPUTS}
    server = Triton("http://127.0.0.1:1")
    with mock.patch(
        "specpipe.evaluate.endpoints.triton.fetch", lambda *_, **__: _as_bytes(metadata)
    ):
        _ask(
            lambda: _texts(server.stream(Question(text="a", max_tokens=3))), get=_CONFIG, post=data
        )
