"""The small text files of a checkpoint folder: read, checked, and made into a tokenizer's parts.

transformers 4.57 (`PreTrainedTokenizerFast`: `added_tokens_decoder`, `additional_special_tokens`,
`special_tokens_map.json`, templates by name) and 5 (`TokenizersBackend`: `extra_special_tokens`,
`chat_template.jinja`) spell the same things differently; both are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from specpipe.checkpoints.files import TEMPLATES_NAME, is_there, quoted, read_json, read_text
from specpipe.checkpoints.limits import FILE_LIMITS, FileLimits
from specpipe.errors import CheckpointError, show
from specpipe.text.chat_template import ChatTemplate

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    f"{TEMPLATES_NAME}/tool_use.jinja",
    "config.json",
    "generation_config.json",
)
"""What is read of a folder; only the first must be there."""

_MAX_TOKEN_ID = 2**31 - 1  # ids travel as INT32

_CONVERT = (
    'python -c "from transformers import AutoTokenizer; '
    "AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')\""
)


@dataclass(frozen=True)
class TokenizerParts:
    """What the files of one folder say.

    roles  where an id is given a role, such as "config.json: eos_token_id", whether or not it has
           a string; ids that a file only suppresses have none
    """

    backend: tokenizers.Tokenizer
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    end_token_ids: frozenset[int]
    chat_template: ChatTemplate | None
    roles: Mapping[int, str] = field(default_factory=dict)


def load_parts(folder: Path, limits: FileLimits = FILE_LIMITS) -> TokenizerParts:
    """Reads the `TOKENIZER_FILES`; CheckpointError names the file at fault."""
    backend = _load_backend(folder, limits)
    settings, older, config, generation = (
        read_json(folder / name, default={}, limits=limits)
        for name in (
            "tokenizer_config.json",
            "special_tokens_map.json",
            "config.json",
            "generation_config.json",
        )
    )
    role_ids = [
        *_role_ids(config, folder / "config.json", limits),
        *_role_ids(generation, folder / "generation_config.json", limits),
        *_role_ids(settings, folder / "tokenizer_config.json", limits),
    ]
    try:
        named = _named_tokens(settings, older)
        extra = [*_extra_special_tokens(settings), *_extra_special_tokens(older)]
        special = [*named.values(), *extra]
        declaring, declared = _declared_tokens(folder, settings, special, limits)
        chat_template = _chat_template(folder, settings, named, limits)
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'} is not as transformers writes it "
            f"({quoted(exc)}); download it again"
        ) from exc
    num_tokens = len(declared) + len(extra)
    limits.check("max_vocab_size", num_tokens, f"{declaring} has {num_tokens} tokens")
    with _naming_faults(declaring):
        _add_tokens(backend, declaring, declared, special)
    if not isinstance(named_end := settings.get("eos_token") or "", str | Mapping):
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: eos_token is {quoted(named_end)}, expected a "
            "token's text; several ids that end a text are eos_token_id in generation_config.json"
        )
    if "eos_token" in named and backend.token_to_id(named["eos_token"]) is None:
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: eos_token is {quoted(named['eos_token'])}, which "
            "has no id in tokenizer.json; take both files from one download"
        )

    def id_of(role: str) -> int | None:
        token = named.get(f"{role}_token")
        token_id = None if token is None else backend.token_to_id(token)
        if token_id is not None:
            return token_id
        return next(
            iter(_token_ids(config, f"{role}_token_id", folder / "config.json", limits)), None
        )

    bos, eos = id_of("bos"), id_of("eos")
    with _naming_faults(folder / "tokenizer_config.json"):
        _set_ends(backend, settings, named, bos, eos)
    if settings.get("split_special_tokens"):
        backend.encode_special_tokens = True
    ends = {eos, *(token_id for token_id, _, key in role_ids if key == "eos_token_id")}
    # Where the two files do not name the same end, a model may be taught either.
    ends.update(
        backend.token_to_id(text)
        for file in (settings, older)
        if (text := _token_text(file.get("eos_token"))) is not None
    )
    return TokenizerParts(
        backend=backend,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=id_of("pad"),
        end_token_ids=frozenset(token_id for token_id in ends if token_id is not None),
        chat_template=chat_template,
        roles={token_id: f"{file}: {show(key)}" for token_id, file, key in reversed(role_ids)},
    )


def added_ends(
    backend: tokenizers.Tokenizer, bos: int | None, eos: int | None
) -> tuple[bool, bool]:
    """Returns whether the post-processor adds BOS before a text, and EOS after it."""
    added = backend.encode("", add_special_tokens=True).ids
    adds_bos = bool(added) and added[0] == bos
    return adds_bos, len(added) > adds_bos and added[-1] == eos


def _load_backend(folder: Path, limits: FileLimits) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    if not is_there(path):
        other_kinds = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")
        other_file = next((name for name in other_kinds if (folder / name).is_file()), None)
        if other_file is None:
            raise CheckpointError(
                f"{folder} has no tokenizer; copy the model's tokenizer.json and "
                "tokenizer_config.json into it"
            )
        raise CheckpointError(
            f"{folder} has {other_file} but no tokenizer.json, which specpipe reads; make one, "
            "with transformers, sentencepiece and tiktoken installed: "
            f"{_CONVERT.format(folder=folder)}"
        )
    text = read_text(path, limits, "max_tokenizer_bytes")
    with _naming_faults(path):
        backend = tokenizers.Tokenizer.from_str(text)
        backend.no_truncation()  # the file keeps what its last user had set
        backend.no_padding()
        if isinstance(backend.model, tokenizers.models.BPE):
            backend.model.dropout = None  # by which training spells a text anew each time
        backend.encode("")  # what adds special tokens to a text is first tried by doing so
    num_ids = backend.get_vocab_size()
    limits.check("max_vocab_size", num_ids, f"{path} has {num_ids} ids")
    return backend


def is_library_fault(exc: BaseException) -> bool:
    """Returns whether an exception may come from the tokenizers library.

    It raises nothing narrower than Exception. A panic of its Rust code is not even that, and its
    class cannot be imported.
    """
    return isinstance(exc, Exception) or type(exc).__name__ == "PanicException"


@contextmanager
def _naming_faults(path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as exc:
        if not is_library_fault(exc):
            raise
        raise CheckpointError(
            f"{path} is not a tokenizer that tokenizers {tokenizers.__version__} reads: {show(exc)}"
        ) from exc


def _token_text(value: Any) -> str | None:
    """Returns a token, which stands in the files as a string or as an object with its content."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _named_tokens(settings: Mapping[str, Any], older: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tokens that have a name, which templates may call them by.

    As transformers has it, special_tokens_map.json comes first unless tokenizer_config.json has the
    added tokens, and a model may name tokens of its own: under a key that ends so, or as an object.
    """
    named: dict[str, str] = {}
    for file in (older, settings) if "added_tokens_decoder" in settings else (settings, older):
        own = file.get("extra_special_tokens")
        values = {name: value for name, value in file.items() if name.endswith("_token")}
        for name, value in {**values, **(own if isinstance(own, Mapping) else {})}.items():
            if (text := _token_text(value)) is not None:
                named[name] = text
    return named


def _extra_special_tokens(settings: Mapping[str, Any]) -> list[str]:
    values: list[Any] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        listed = settings.get(key) or []
        values += listed.values() if isinstance(listed, Mapping) else listed
    return [text for value in values if (text := _token_text(value))]


def _declared_tokens(
    folder: Path, settings: Mapping[str, Any], special: Collection[str], limits: FileLimits
) -> tuple[Path, dict[int, AddedToken]]:
    """Returns the file that declares added tokens, and these by id.

    added_tokens.json is the older one: transformers reads it where the other declares none.
    """
    path = folder / "added_tokens.json"
    if "added_tokens_decoder" not in settings and is_there(path):
        ids = read_json(path, limits=limits)
        if not all(isinstance(token_id, int) for token_id in ids.values()):
            raise CheckpointError(f"{path} must give each token an id; download it again")
        return path, {
            token_id: AddedToken(text, normalized=text not in special, special=text in special)
            for text, token_id in ids.items()
        }
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return folder / "tokenizer_config.json", {
        int(key): AddedToken(
            entry["content"], **{flag: entry[flag] for flag in flags if flag in entry}
        )
        for key, entry in (settings.get("added_tokens_decoder") or {}).items()
    }


def _add_tokens(
    backend: tokenizers.Tokenizer,
    path: Path,
    declared: Mapping[int, AddedToken],
    special: Iterable[str],
) -> None:
    """Adds what the file at `path` declares, and makes special what is named in a role.

    A named token without an id is left out: no embedding row belongs to it.
    """
    backend.add_tokens([declared[token_id] for token_id in sorted(declared)])
    for token_id, token in sorted(declared.items()):
        own_id = backend.token_to_id(token.content)
        if own_id != token_id:
            raise CheckpointError(
                f"{path.parent}: {path.name} gives {quoted(token.content)} the id "
                f"{quoted(token_id)}, tokenizer.json {own_id}; take both files from one download"
            )
    already_special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    backend.add_tokens(
        [
            AddedToken(text, normalized=False, special=True)
            for text in dict.fromkeys(special)
            if text not in already_special and backend.token_to_id(text) is not None
        ]
    )


def _role_ids(
    values: Mapping[str, Any], path: Path, limits: FileLimits
) -> list[tuple[int, str, str]]:
    """Returns each id that a file gives a role, with the file's name and the key."""
    return [
        (token_id, path.name, key)
        for key in values
        if key.endswith("_token_id")
        for token_id in _token_ids(values, key, path, limits)
    ]


def _token_ids(config: Mapping[str, Any], key: str, path: Path, limits: FileLimits) -> list[int]:
    """Returns the ids under a key that may hold none, one or several; −1 means none."""
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    limits.check("max_end_token_ids", len(ids), f"{path}: {show(key)} has {len(ids)} ids")
    for token_id in ids:
        if type(token_id) is not int or not -1 <= token_id <= _MAX_TOKEN_ID:
            raise CheckpointError(
                f"{path}: {show(key)} is {quoted(value)}; it must be token ids, which "
                f"{quoted(token_id)} is not"
            )
    return [token_id for token_id in ids if token_id != -1]


def _set_ends(
    backend: tokenizers.Tokenizer,
    settings: Mapping[str, Any],
    named: Mapping[str, str],
    bos: int | None,
    eos: int | None,
) -> None:
    """Replaces the post-processor where `add_bos_token` or `add_eos_token` ask for another."""
    added = added_ends(backend, bos, eos)
    asked_for = tuple(
        is_added if settings.get(f"add_{name}") is None else bool(settings[f"add_{name}"])
        for name, is_added in zip(("bos_token", "eos_token"), added, strict=True)
    )
    if asked_for == added:
        return
    before = [named["bos_token"]] if asked_for[0] and "bos_token" in named else []
    after = [named["eos_token"]] if asked_for[1] and "eos_token" in named else []
    backend.post_processor = TemplateProcessing(
        single=[*before, "$A", *after],
        special_tokens=[(token, backend.token_to_id(token)) for token in {*before, *after}],
    )


def _chat_template(
    folder: Path, settings: Mapping[str, Any], named: Mapping[str, str], limits: FileLimits
) -> ChatTemplate | None:
    """Returns the chat template: where there are several, the one named `default`, with the one
    named `tool_use` for requests that have tools, as transformers (5) chooses.
    """
    tool_use = None
    path = folder / "chat_template.jinja"
    if is_there(path):
        source: Any = read_text(path, limits, "max_chat_template_bytes")
        if is_there(for_tools := folder / TEMPLATES_NAME / "tool_use.jinja"):
            tool_use = read_text(for_tools, limits, "max_chat_template_bytes")
    else:
        path = folder / "tokenizer_config.json"
        source = settings.get("chat_template")
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}
        if isinstance(source, Mapping):
            source, tool_use = source.get("default"), source.get("tool_use")
        if source is None:
            return None
        if not isinstance(source, str) or not isinstance(tool_use, str | None):
            raise TypeError("chat_template")

    def template(source: str, with_tools: ChatTemplate | None = None) -> ChatTemplate:
        return ChatTemplate(
            source, file=str(path), special_tokens=named, limits=limits, with_tools=with_tools
        )

    return template(source, None if tool_use is None else template(tool_use))
