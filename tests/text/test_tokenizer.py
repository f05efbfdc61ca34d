from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from specpipe.errors import CheckpointError, RequestError
from specpipe.text.chat_arguments import ChatArguments
from specpipe.text.tokenizer import Tokenizer
from tests import toy_tokenizers

QUICKSTART = Path(__file__).parents[2] / "models" / "python-code"
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}"


def chat_backend(*, adds_bos: bool) -> Backend:
    """<b>, <e>, hi, <pad> and user are the ids 0 to 4."""
    names = ("<b>", "<e>", "hi", "<pad>", "user")
    backend = Backend(
        models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<b>", "<e>", "<pad>"])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<b> $A", special_tokens=[("<b>", 0)]
        )
    return backend


def write_chat(folder: Path, *, adds_bos: bool = True, **settings: Any) -> Path:
    settings = {
        "bos_token": "<b>",
        "eos_token": "<e>",
        "pad_token": "<pad>",
        "chat_template": TEMPLATE,
        **settings,
    }
    return toy_tokenizers.write_tokenizer(folder, chat_backend(adds_bos=adds_bos), **settings)


USER_HI = [{"role": "user", "content": "hi"}]


def test_case_a13_exactly_one_bos(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_chat(tmp_path))
    assert tokenizer.encode_messages(USER_HI) == [0, 4, 2]
    assert tokenizer.encode("hi") == [0, 2]
    assert tokenizer.encode("<b>user hi") == [0, 4, 2]


def test_bos_is_added_where_the_template_leaves_it_to_the_tokenizer(tmp_path: Path) -> None:
    template = TEMPLATE.replace("{{ bos_token }}", "")
    tokenizer = Tokenizer.load(write_chat(tmp_path, chat_template=template))
    assert tokenizer.encode_messages(USER_HI) == [0, 4, 2]


def test_no_bos_where_the_tokenizer_adds_none(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_chat(tmp_path, adds_bos=False))
    assert tokenizer.encode("hi") == [2]
    assert tokenizer.encode("<b>hi") == [0, 2]
    assert tokenizer.encode_messages(USER_HI) == [0, 4, 2]


@pytest.mark.parametrize(
    ("adds_bos", "settings", "expected"),
    [
        (True, {"add_bos_token": False}, [2]),
        (False, {"add_bos_token": True}, [0, 2]),
        (True, {"add_eos_token": True}, [0, 2, 1]),
        (True, {"add_bos_token": True, "add_eos_token": False}, [0, 2]),
        (False, {"add_bos_token": None}, [2]),
    ],
)
def test_add_bos_token_and_add_eos_token_rule(
    tmp_path: Path, adds_bos: bool, settings: dict[str, Any], expected: list[int]
) -> None:
    folder = write_chat(tmp_path, adds_bos=adds_bos, **settings)
    assert Tokenizer.load(folder).encode("hi") == expected


def test_truncation_and_padding_in_the_file_do_not_cut_a_prompt(tmp_path: Path) -> None:
    backend = chat_backend(adds_bos=True)
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    toy_tokenizers.write_tokenizer(tmp_path, backend, bos_token="<b>")
    assert Tokenizer.load(tmp_path).encode("hi hi hi") == [0, 2, 2, 2]


def test_a_text_has_the_same_tokens_every_time(tmp_path: Path) -> None:
    model = models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=0.9)
    encode = Tokenizer.load(toy_tokenizers.write_tokenizer(tmp_path, Backend(model))).encode
    assert [encode("abab") for _ in range(8)] == [[2, 2]] * 8


def test_case_a12_no_bos_in_an_encoded_word(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(
        toy_tokenizers.write_tokenizer(tmp_path, toy_tokenizers.space_mark(), bos_token="<s>")
    )
    names = tokenizer.tokens()

    def encoded(text: str) -> list[str]:
        return [names[token_id] for token_id in tokenizer.encode_fragment(text)]

    assert encoded("\n") == ["\n"]
    assert encoded(" end") == ["▁end"]
    assert encoded("end") == ["end"]
    assert encoded("a,b") == ["a", ",", "b"]
    assert encoded('"') == ['"']
    assert encoded("") == []
    # A prompt still begins as the checkpoint's tokenizer begins it.
    assert [names[i] for i in tokenizer.encode("end")] == ["<s>", "▁end"]


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        pre_tokenizers.Metaspace(prepend_scheme="always"),
        pre_tokenizers.Metaspace(prepend_scheme="first"),
        pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="always")]),
    ],
)
def test_fragments_get_no_space_mark(tmp_path: Path, pre_tokenizer: Any) -> None:
    backend = Backend(models.WordLevel({"▁end": 0, "end": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizer
    tokenizer = Tokenizer.load(toy_tokenizers.write_tokenizer(tmp_path, backend))
    assert tokenizer.encode_fragment("end") == [1]
    assert tokenizer.encode_fragment(" end") == [0]
    assert tokenizer.encode("end") == [0]


def test_end_ids_are_the_union_of_all_sources(tmp_path: Path) -> None:
    write_chat(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 2, "pad_token_id": -1}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.end_token_ids == {1, 2, 3}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 3)


def test_what_an_id_is_used_for(tmp_path: Path) -> None:
    toy_tokenizers.write_words(tmp_path, eos_token_id=251)
    tokenizer = Tokenizer.load(tmp_path)
    used = [i for i in (-1, 0, 249, 250, 251, 252, 2**31 - 1) if tokenizer.is_used(i)]
    assert used == [0, 249, 251]


def test_ids_come_from_config_where_the_tokenizer_names_no_token(tmp_path: Path) -> None:
    toy_tokenizers.write_tokenizer(tmp_path, chat_backend(adds_bos=False))
    (tmp_path / "config.json").write_text(
        '{"bos_token_id": 0, "eos_token_id": [2, 3], "pad_token_id": -1}'
    )
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 2, None)
    assert tokenizer.end_token_ids == {2, 3}


def test_transformers_4_files(tmp_path: Path) -> None:
    write_chat(
        tmp_path,
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token={"__type": "AddedToken", "content": "<b>", "special": True},
        pad_token=None,
        additional_special_tokens=["user"],
        extra_special_tokens={},
        added_tokens_decoder={
            "0": {"content": "<b>", "special": True},
            "5": {"content": "<tool>", "lstrip": False, "normalized": False, "special": False},
            "6": {"content": "<turn>", "special": True},
        },
        chat_template=[
            {"name": "tool_use", "template": "tools"},
            {"name": "default", "template": TEMPLATE},
        ],
    )
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"pad_token": {"content": "<pad>"}, "eos_token": "<e>"})
    )
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.pad_token_id == 3
    assert tokenizer.special_token_ids == {0, 1, 3, 4, 6}
    assert tokenizer.encode("hi <tool> <turn>") == [0, 2, 5, 6]
    assert tokenizer.decode([0, 2, 5, 6, 4]) == "hi <tool>"
    assert tokenizer.encode_messages(USER_HI) == [0, 4, 2]


def test_transformers_5_files(tmp_path: Path) -> None:
    write_chat(
        tmp_path,
        tokenizer_class="TokenizersBackend",
        backend="tokenizers",
        extra_special_tokens=["user"],
        chat_template=None,
    )
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.special_token_ids == {0, 1, 3, 4}
    assert tokenizer.encode_messages(USER_HI) == [0, 4, 2]


@pytest.mark.parametrize("has_added_tokens", [False, True])
def test_the_special_tokens_map_counts_where_transformers_reads_it(
    tmp_path: Path, has_added_tokens: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    settings = {"added_tokens_decoder": {}} if has_added_tokens else {}
    folder = write_chat(tmp_path, eos_token="user", **settings)
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<e>"}')
    tokenizer = Tokenizer.load(folder)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert tokenizer.eos_token_id == reference.eos_token_id
    assert tokenizer.end_token_ids == {1, 4}


def test_a_model_may_name_tokens_of_its_own(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_chat(
        tmp_path,
        user_token="user",
        extra_special_tokens={"sign": "<e>"},
        chat_template="{{ bos_token }}{{ user_token }}{{ sign }}{{ messages[0].content }}",
    )
    tokenizer = Tokenizer.load(folder)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    token_ids = tokenizer.encode_messages(USER_HI)
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "<b> user <e> hi"
    assert token_ids == reference.apply_chat_template(USER_HI)["input_ids"]
    assert tokenizer.decode(token_ids) == reference.decode(token_ids, skip_special_tokens=True)


def test_a_token_in_a_role_is_special_and_one_without_an_id_is_left_out(tmp_path: Path) -> None:
    folder = write_chat(tmp_path, eos_token="user", pad_token="[PAD]")
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.eos_token_id == 4
    assert tokenizer.decode([2, 4, 2]) == "hi hi"
    assert tokenizer.pad_token_id is None
    assert sorted(tokenizer.tokens()) == [0, 1, 2, 3, 4]


def test_added_tokens_json_counts_where_transformers_reads_it(tmp_path: Path) -> None:
    folder = write_chat(tmp_path, additional_special_tokens=["<turn>"])
    (folder / "added_tokens.json").write_text('{"<tool>": 5, "<turn>": 6}')
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("hi <tool> <turn>") == [0, 2, 5, 6]
    assert tokenizer.decode([2, 5, 6]) == "hi <tool>"
    (folder / "added_tokens.json").write_text('{"<tool>": 7}')
    with pytest.raises(CheckpointError, match="added_tokens.json gives '<tool>' the id 7, tokeni"):
        Tokenizer.load(folder)
    # The newer file wins, as in transformers.
    write_chat(tmp_path, added_tokens_decoder={})
    assert sorted(Tokenizer.load(folder).tokens()) == [0, 1, 2, 3, 4]


DIALECT = (
    "{% for m in messages %}\n"
    "  {% if loop.index > 2 %}{% break %}{% endif %}\n"
    "  {% generation %}{{ m.content | tojson }}{% endgeneration %}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt and not tools and not documents %}{{ eos_token }}{% endif %}"
)


def test_template_dialect(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_chat(tmp_path, chat_template=DIALECT))
    assert tokenizer.chat_template is not None
    messages = [{"role": "user", "content": text} for text in ("<é>", "b", "c")]
    assert tokenizer.chat_template.render(messages) == '"<é>""b"<e>'


def test_template_is_sandboxed(tmp_path: Path) -> None:
    template = "{{ ''.__class__.__mro__ }}"
    tokenizer = Tokenizer.load(write_chat(tmp_path, chat_template=template))
    with pytest.raises(RequestError, match="unsafe"):
        tokenizer.encode_messages(USER_HI)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], 'messages must be a list such as [{"role": "user", "content": "hi"}]'),
        ({"role": "user"}, 'messages must be a list such as [{"role": "user", "content": "hi"}]'),
        ([*USER_HI, "hi"], 'messages[1] must be an object with a "role"'),
        (
            [{"role": "user", "content": 3}],
            "messages[0].content must be a text, a list of text parts, or null",
        ),
        (
            [*USER_HI, {"role": "user", "content": [{"type": "text", "text": None}]}],
            'messages[1].content[0] must have a "text"',
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0] is a part of type 'image_url': this model takes text parts "
            "alone",
        ),
        (
            [{"role": "user", "content": ["hi"]}],
            "messages[0].content[0] is a part without a type: this model takes text parts alone",
        ),
        (
            [{"role": "system", "content": "x"}],
            "messages: the chat template refuses them: no system messages",
        ),
    ],
)
def test_refused_messages(tmp_path: Path, messages: Any, message: str) -> None:
    template = (
        "{% if messages[0].role == 'system' %}"
        "{{ raise_exception('no system messages') }}{% endif %}"
    )
    tokenizer = Tokenizer.load(write_chat(tmp_path, chat_template=template))
    with pytest.raises(RequestError) as error:
        tokenizer.encode_messages(messages)
    assert str(error.value) == message


@pytest.mark.parametrize("body", ["{{ 1 // 0 }}", "{% for i in range(10**9) %}{% endfor %}"])
def test_whatever_a_template_raises_refuses_the_messages(tmp_path: Path, body: str) -> None:
    tokenizer = Tokenizer.load(write_chat(tmp_path, chat_template=body))
    with pytest.raises(RequestError, match="^messages: the chat template refuses them: "):
        tokenizer.encode_messages(USER_HI)


def test_messages_need_a_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_chat(tmp_path, chat_template=None))
    with pytest.raises(
        RequestError,
        match="has no chat template; send text_input instead, or to .*/v1/completions a prompt",
    ):
        tokenizer.encode_messages(USER_HI)


def test_what_a_template_makes_too_long_is_not_encoded(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message['content'] * 100 }}{% endfor %}"
    tokenizer = Tokenizer.load(write_chat(tmp_path, chat_template=template))
    assert len(tokenizer.encode_messages(USER_HI, max_bytes=200)) > 0
    with pytest.raises(RequestError) as caught:
        tokenizer.encode_messages(USER_HI, max_bytes=199)
    assert str(caught.value) == (
        "messages: the chat template cannot render them: the prompt has more than 199 bytes "
        "(serving.limits.max_prompt_bytes)"
    )


def test_text_that_cannot_be_encoded_is_a_request_error(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(toy_tokenizers.write_words(tmp_path))
    with pytest.raises(RequestError, match="the tokenizer cannot encode 'w4 unheard'"):
        tokenizer.encode("w4 unheard")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no tokenizer; copy the model's tokenizer.json"):
        Tokenizer.load(tmp_path)
    with pytest.raises(CheckpointError, match="missing is not a folder"):
        Tokenizer.load(tmp_path / "missing")


def test_sentencepiece_alone_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e")
    with pytest.raises(CheckpointError) as error:
        Tokenizer.load(tmp_path)
    assert str(error.value) == (
        f"{tmp_path} has tokenizer.model but no tokenizer.json, which specpipe reads; make one, "
        "with transformers, sentencepiece and tiktoken installed: "
        'python -c "from transformers import AutoTokenizer; '
        f"AutoTokenizer.from_pretrained('{tmp_path}').save_pretrained('{tmp_path}')\""
    )


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        ("tokenizer.json", '{"version": "1.0"}', "is not a tokenizer that tokenizers "),
        ("tokenizer_config.json", "{", "cannot be read: "),
        ("tokenizer_config.json", "[]", "expected a JSON object"),
        ("tokenizer_config.json", '{"chat_template": 3}', "is not as transformers writes it"),
        (
            "tokenizer_config.json",
            '{"eos_token": ["<e>", "user"]}',
            "eos_token is ['<e>', 'user'],",
        ),
        ("tokenizer_config.json", '{"eos_token": 2}', "eos_token is 2, expected a token's text"),
        ("tokenizer_config.json", '{"chat_template": [{}]}', "is not as transformers writes it"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"9": {"content": "<b>"}}}',
            "tokenizer_config.json gives '<b>' the id 9, tokenizer.json 0",
        ),
        ("config.json", '{"eos_token_id": "2"}', "eos_token_id is '2'; it must be token ids"),
        ("generation_config.json", '{"eos_token_id": [true]}', "eos_token_id is [True]"),
        ("generation_config.json", '{"pad_token_id": -5}', "pad_token_id is -5; it must be token"),
        ("generation_config.json", '{"eos_token_id": [2, 2.0]}', "which 2.0 is not"),
        ("config.json", f'{{"eos_token_id": [{2**70}]}}', f"which {2**70} is not"),
        (
            "config.json",
            json.dumps({"bos_token_id": [*range(250), None]}),
            "19, 20, 21, 2…; it must be token ids, which None is not",
        ),
        (
            "tokenizer_config.json",
            '{"eos_token": "<end>"}',
            "eos_token is '<end>', which has no id",
        ),
        ("chat_template.jinja", b"\xff", "cannot be read"),
    ],
)
def test_broken_files_are_named(
    tmp_path: Path, file: str, content: str | bytes, message: str
) -> None:
    write_chat(tmp_path)
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError) as error:
        Tokenizer.load(tmp_path)
    assert message in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_a_template_that_does_not_compile_is_named(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_chat(tmp_path, chat_template="a\n{% if %}"))
    assert tokenizer.chat_template is not None
    with pytest.raises(CheckpointError, match="tokenizer_config.json: .* compile: line 2"):
        tokenizer.chat_template.check()
    with pytest.raises(RequestError, match="^messages: the chat template does not compile: line 2"):
        tokenizer.encode_messages(USER_HI)


def test_quickstart_tokenizer_round_trips() -> None:
    tokenizer = Tokenizer.load(QUICKSTART / "target")
    text = 'def f(x: int) -> str:\n\treturn f"{x} é 🌶"\n'
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id) == (0, 1)
    assert tokenizer.end_token_ids == {0}


def test_same_ids_and_text_as_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folders = {
        "quickstart": QUICKSTART / "target",
        "words": toy_tokenizers.write_words(tmp_path / "words"),
        "space_mark": toy_tokenizers.write_tokenizer(
            tmp_path / "space_mark",
            toy_tokenizers.space_mark(),
            bos_token="<s>",
            eos_token="</s>",
            add_bos_token=True,
        ),
        "chat": write_chat(tmp_path / "chat"),
    }
    texts = {
        "quickstart": ["def f(n):\n    return 🌶", "<|endoftext|>import os", "  x"],
        "words": ["w4 w249 <turn> w7"],
        "space_mark": ["Deep learning is fun", "", " end", "é🌶 foo"],
        "chat": ["hi", "user hi <e> hi"],
    }
    for name, folder in folders.items():
        reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        tokenizer = Tokenizer.load(folder)
        for text in texts[name]:
            token_ids = reference(text)["input_ids"]
            assert tokenizer.encode(text) == token_ids
            assert tokenizer.decode(token_ids) == reference.decode(
                token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        assert tokenizer.special_token_ids >= set(reference.all_special_ids)


def test_what_transformers_saves_is_read_back(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    is_4 = transformers.__version__.startswith("4.")
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=chat_backend(adds_bos=True),
        bos_token="<b>",
        eos_token="<e>",
        pad_token="<pad>",
        **{"additional_special_tokens" if is_4 else "extra_special_tokens": ["user"]},
        chat_template={"default": TEMPLATE, "tool_use": "tools"},
    )
    reference.save_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.special_token_ids == set(reference.all_special_ids)
    assert tokenizer.encode_messages(USER_HI) == reference.apply_chat_template(
        USER_HI, add_generation_prompt=True, return_dict=False
    )


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_template_of_its_own_is_rendered_where_there_are_tools(
    tmp_path: Path, is_saved: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    templates = {"default": TEMPLATE, "tool_use": "{{ tools[0].function.name }}: " + TEMPLATE}
    folder = write_chat(
        tmp_path,
        chat_template=[{"name": name, "template": text} for name, text in templates.items()],
    )
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    if is_saved:  # as files beside each other, and no longer in tokenizer_config.json
        folder = tmp_path / "saved"
        reference.save_pretrained(folder)
        assert (folder / "additional_chat_templates").is_dir()
    template = Tokenizer.load(folder).chat_template
    assert template is not None
    tools = [{"type": "function", "function": {"name": "f"}}]
    for given in ([], tools):
        expected = reference.apply_chat_template(
            USER_HI, tools=given or None, tokenize=False, add_generation_prompt=True
        )
        assert template.render(USER_HI, ChatArguments(tools=given)) == expected
    assert expected.startswith("f: ")


def test_templates_render_as_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_chat(tmp_path, chat_template=DIALECT)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    template = Tokenizer.load(folder).chat_template
    assert template is not None
    messages = [{"role": "user", "content": text} for text in ("<é>", "b", "c")]
    assert template.render(messages) == reference.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )


def test_the_committed_prompts_fit_the_quickstart_pair() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "prompts.jsonl"
    prompts = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert Counter(prompt["kind"] for prompt in prompts) == {
        "code_head": 8,
        "code_middle": 8,
        "short": 6,
        "chat": 4,
        "long": 6,
    }
    assert len({prompt["name"] for prompt in prompts}) == 32
    tokenizer = Tokenizer.load(QUICKSTART / "target")
    assert all(1 <= len(tokenizer.encode(prompt["prompt"])) <= 700 for prompt in prompts)
