from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specpipe.build.pairing import PairContract, check_pair
from specpipe.checkpoints.parallel_draft import ParallelDraft
from specpipe.errors import CheckpointError, PairingError
from specpipe.runtimes.pair.pair import PairOptions
from tests import toy_tokenizers
from tests.toy_tokenizers import write_words

ROLES = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
QUICKSTART = Path(__file__).parents[2] / "models" / "python-code"


def refusal(draft: Path, target: Path) -> list[str]:
    """The lines of the PairingError, without the folders and the bullets."""
    with pytest.raises(PairingError) as error:
        check_pair(draft, target)
    first, *differences, last = str(error.value).splitlines()
    assert first == f"draft {draft} and target {target} cannot be paired:"
    assert last == "The pair needs one tokenizer: change draft.checkpoint or target.checkpoint"
    return [difference.removeprefix("  - ") for difference in differences]


def write_pair(tmp_path: Path, **draft_config: Any) -> tuple[Path, Path]:
    return write_words(tmp_path / "draft", **draft_config), write_words(tmp_path / "target")


@pytest.mark.parametrize("difference", [64, 128, 200])
def test_case_a1_padding_only_difference_passes(tmp_path: Path, difference: int) -> None:
    draft = write_words(tmp_path / "draft", num_rows=256)
    target = write_words(tmp_path / "target", num_rows=256 + difference)
    assert check_pair(draft, target) == PairContract(
        num_used_token_ids=250,
        draft_vocab_size=256,
        target_vocab_size=256 + difference,
        unused_token_ids=((250, 256 + difference),),
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        end_token_ids=(2,),
        draft_max_seq_len=512,
        target_max_seq_len=512,
        notes=(
            f"vocabularies differ only by padding: 250 used ids, 256 and {256 + difference} rows",
        ),
    )


def test_case_a2_same_size_different_meaning(tmp_path: Path) -> None:
    draft, target = write_pair(tmp_path)
    toy_tokenizers.write_tokenizer(draft, toy_tokenizers.words(swapped=(40, 41)), **ROLES)
    assert refusal(draft, target) == [
        "token id 40 is 'w41' in the draft and 'w40' in the target; 2 of 250 ids differ"
    ]


def test_tokens_that_look_alike_are_told_apart(tmp_path: Path) -> None:
    draft, target = write_pair(tmp_path)
    for folder, name in ((draft, "\u00e9"), (target, "e\u0301")):
        path = folder / "tokenizer.json"
        path.write_text(path.read_text().replace('"w40"', json.dumps(name)))
    assert refusal(draft, target) == [
        "token id 40 is '\u00e9' ('\\xe9') in the draft and 'e\u0301' ('e\\u0301') in the target; "
        "1 of 250 ids differ"
    ]


def write_with_extra(folder: Path, *texts: str) -> None:
    tokenizer = toy_tokenizers.words()
    tokenizer.add_tokens(list(texts))
    toy_tokenizers.write_tokenizer(folder, tokenizer, **ROLES)


def test_what_only_the_draft_knows_is_never_proposed(tmp_path: Path) -> None:
    draft, target = write_pair(tmp_path)
    write_with_extra(draft, "extra", "more")
    contract = check_pair(draft, target)
    assert contract.num_used_token_ids == 250
    assert contract.unused_token_ids == ((250, 256),)
    assert contract.notes == (
        "only the draft knows 2 of its tokens, the first is 250 'extra': they are never proposed",
    )


def test_what_only_the_target_knows_needs_rows_in_the_draft(tmp_path: Path) -> None:
    draft, target = write_pair(tmp_path)
    write_with_extra(target, "extra")
    contract = check_pair(draft, target)
    assert contract.num_used_token_ids == 251
    assert contract.unused_token_ids == ((251, 256),)
    assert contract.notes == (
        "only the target knows 1 of its tokens, the first is 250 'extra': the draft has embedding "
        "rows for them",
    )
    write_words(draft, num_rows=250)
    assert refusal(draft, target) == [
        "the target uses token id 250 'extra', but the draft's config.json has vocab_size 250: "
        "1 ids have no embedding row there"
    ]


def test_one_string_with_two_ids_is_refused(tmp_path: Path) -> None:
    draft, target = write_pair(tmp_path)
    for folder, moved in ((draft, {"w9": 252}), (target, {"w9": 251})):
        backend = json.loads(toy_tokenizers.words().to_str())
        backend["model"]["vocab"] |= moved
        (folder / "tokenizer.json").write_text(json.dumps(backend))
    assert refusal(draft, target) == [
        "'w9' is token id 252 in the draft and 251 in the target; 1 tokens differ in this"
    ]


@pytest.mark.parametrize("key", ["eos_token_id", "pad_token_id", "decoder_start_token_id"])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_an_id_with_a_role_and_no_string_is_in_use(tmp_path: Path, file: str, key: str) -> None:
    draft, target = write_pair(tmp_path)
    path = target / file
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**values, key: 251}))
    contract = check_pair(draft, target)
    assert contract.num_used_token_ids == 251
    assert contract.unused_token_ids == ((250, 251), (252, 256))
    assert (251 in contract.end_token_ids) == (key == "eos_token_id")
    assert f"token id 251 has a role ({file}: {key}) but no string: it is in use" in contract.notes


def test_ids_that_are_only_suppressed_stay_unused(tmp_path: Path) -> None:
    draft, target = write_pair(tmp_path)
    (target / "generation_config.json").write_text('{"suppress_tokens": [251, 300]}')
    assert check_pair(draft, target).unused_token_ids == ((250, 256),)


@pytest.mark.parametrize("role", ["draft", "target"])
@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id"])
@pytest.mark.parametrize("value", [256, [2, 300]])
def test_a_role_beyond_the_rows_is_refused(
    tmp_path: Path, role: str, key: str, value: int | list[int]
) -> None:
    draft, target = write_pair(tmp_path)
    (tmp_path / role / "generation_config.json").write_text(json.dumps({key: value}))
    token_id = value if isinstance(value, int) else 300
    assert refusal(draft, target) == [
        f"the {role}'s generation_config.json: {key} is {token_id}, but its config.json has "
        "vocab_size 256: the id has no embedding row"
    ]


def test_a_role_of_the_target_needs_a_row_in_the_draft(tmp_path: Path) -> None:
    draft, target = write_pair(tmp_path, num_rows=250)
    write_words(target, eos_token_id=[2, 251])
    assert refusal(draft, target) == [
        "the target uses token id 251, but the draft's config.json has vocab_size 250: "
        "1 ids have no embedding row there"
    ]


def test_unused_ids_inside_the_vocabulary_are_ranges(tmp_path: Path) -> None:
    for role in ("draft", "target"):
        folder = tmp_path / role
        backend = json.loads(toy_tokenizers.words().to_str())
        for name in ("w4", "w5", "w100"):
            del backend["model"]["vocab"][name]
        write_words(folder)
        (folder / "tokenizer.json").write_text(json.dumps(backend))
    contract = check_pair(tmp_path / "draft", tmp_path / "target")
    assert contract.num_used_token_ids == 247
    assert contract.unused_token_ids == ((4, 6), (100, 101), (250, 256))


@pytest.mark.parametrize(("unused", "lowest"), [((), 0), (((4, 6),), 0), (((0, 3), (5, 256)), 3)])
def test_the_lowest_used_id(unused: tuple[tuple[int, int], ...], lowest: int) -> None:
    assert PairOptions(unused_token_ids=unused).used_token_id == lowest


def test_special_on_one_side_only(tmp_path: Path) -> None:
    draft, target = write_pair(tmp_path)
    toy_tokenizers.write_tokenizer(
        draft, toy_tokenizers.words(), **ROLES, additional_special_tokens=["w7", "w9"]
    )
    assert refusal(draft, target) == [
        "token id 7 'w7' is special in the draft and plain text in the target; "
        "2 tokens differ in this"
    ]


def test_other_bos_is_refused(tmp_path: Path) -> None:
    draft, target = write_pair(tmp_path)
    toy_tokenizers.write_tokenizer(draft, toy_tokenizers.words(), **ROLES | {"bos_token": "<turn>"})
    assert refusal(draft, target) == ["BOS is 3 '<turn>' in the draft, 1 '<bos>' in the target"]


def test_end_ids_without_a_common_one_are_refused(tmp_path: Path) -> None:
    draft, target = write_pair(tmp_path, eos_token_id=3)
    toy_tokenizers.write_tokenizer(draft, toy_tokenizers.words(), **ROLES | {"eos_token": "<turn>"})
    assert refusal(draft, target) == [
        "the draft ends at 3 '<turn>', the target at 2 '<eos>': no end id in common"
    ]


def test_embedding_rows_below_the_used_ids_are_refused(tmp_path: Path) -> None:
    draft, target = write_pair(tmp_path, num_rows=240)
    assert refusal(draft, target) == [
        "the draft's tokenizer goes up to token id 249 'w249', but its config.json has "
        "vocab_size 240: 10 ids have no embedding row"
    ]


def test_every_difference_has_its_line(tmp_path: Path) -> None:
    draft, target = write_pair(tmp_path, num_rows=100)
    toy_tokenizers.write_tokenizer(
        draft, toy_tokenizers.words(swapped=(8, 9)), **ROLES | {"bos_token": "w20"}
    )
    assert [line.split(" ")[0] for line in refusal(draft, target)] == [
        "token",
        "token",
        "BOS",
        "the",
    ]


def test_harmless_differences_are_notes(tmp_path: Path) -> None:
    draft, target = write_pair(tmp_path, max_position_embeddings=128)
    toy_tokenizers.write_tokenizer(
        draft, toy_tokenizers.words(), bos_token="<bos>", eos_token="<eos>", pad_token="<turn>"
    )
    (target / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    (target / "chat_template.jinja").write_text("{{ messages[0].content }}")
    contract = check_pair(draft, target)
    assert contract.end_token_ids == (2, 3)
    assert (contract.draft_max_seq_len, contract.target_max_seq_len) == (128, 512)
    assert contract.notes == (
        "PAD is 3 '<turn>' in the draft, 0 '<pad>' in the target; the target's is used",
        "the draft ends at 2 '<eos>', the target at 2 '<eos>', 3 '<turn>'; the target's are used",
        "the draft has 128 positions, the target 512: longer texts go on without a draft",
        "only the target has a chat template; it is used",
    )


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 1024),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}, 2048),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            512,
        ),
        ({"rope_scaling": None}, 512),
    ],
)
def test_context_counts_rope_scaling(tmp_path: Path, config: dict[str, Any], length: int) -> None:
    assert check_pair(*write_pair(tmp_path, **config)).draft_max_seq_len == length


def test_a_role_that_one_side_leaves_open_is_a_note(tmp_path: Path) -> None:
    draft, target = write_pair(tmp_path)
    toy_tokenizers.write_tokenizer(draft, toy_tokenizers.words(), eos_token="<eos>")
    assert check_pair(draft, target).notes == (
        "BOS is none in the draft, 1 '<bos>' in the target; the target's is used",
        "PAD is none in the draft, 0 '<pad>' in the target; the target's is used",
    )


@pytest.mark.parametrize(
    ("draft_template", "target_template", "note"),
    [
        ("a", "b", "the chat templates differ; the target's is used"),
        ("a", None, "only the draft has a chat template; requests with messages will be refused"),
    ],
)
def test_chat_template_difference_is_a_note(
    tmp_path: Path, draft_template: str | None, target_template: str | None, note: str
) -> None:
    draft, target = write_pair(tmp_path)
    for folder, template in ((draft, draft_template), (target, target_template)):
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
    assert check_pair(draft, target).notes == (note,)


def test_a_broken_chat_template_is_a_note(tmp_path: Path) -> None:
    draft, target = write_pair(tmp_path)
    for folder in (draft, target):
        (folder / "chat_template.jinja").write_text("{% if %}")
    (note,) = check_pair(draft, target).notes
    assert note.startswith("requests with messages will be refused: ")


@pytest.mark.parametrize(
    ("for_tools", "notes"),
    [
        ("{% if %}", ["requests with tools will be refused: "]),
        ("{{ tools[0].function.name }}", []),
    ],
)
def test_a_template_for_tools_is_tried_with_one(
    tmp_path: Path, for_tools: str, notes: list[str]
) -> None:
    draft, target = write_pair(tmp_path)
    templates = {"default": "{{ messages[0].content }}", "tool_use": for_tools}
    for folder in (draft, target):
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        text = json.dumps({**settings, "chat_template": templates})
        (folder / "tokenizer_config.json").write_text(text)
    found = check_pair(draft, target).notes
    assert [note[: note.index(": ") + 2] for note in found] == notes


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{}", "config.json: vocab_size is None, expected a whole number of at least 1"),
        (
            '{"vocab_size": 256}',
            "config.json: max_position_embeddings is None, expected a whole number of at least 1",
        ),
        (
            '{"vocab_size": true}',
            "config.json: vocab_size is True, expected a whole number of at least 1",
        ),
        (
            '{"vocab_size": 9, "max_position_embeddings": 64, "rope_scaling": {"type": "linear"}}',
            "config.json: factor is None, expected a positive number",
        ),
        (None, "config.json does not exist; download the checkpoint again"),
    ],
)
def test_an_unreadable_side_is_named(tmp_path: Path, config: str | None, message: str) -> None:
    draft, target = write_pair(tmp_path)
    path = draft / "config.json"
    if config is None:
        path.unlink()
    else:
        path.write_text(config)
    with pytest.raises(CheckpointError) as error:
        check_pair(draft, target)
    assert str(error.value).startswith(f"draft: {draft}")
    assert str(error.value).endswith(message)


def test_contract_survives_json(tmp_path: Path) -> None:
    draft, target = write_pair(tmp_path, num_rows=300)
    contract = check_pair(draft, target)
    assert PairContract.from_json(contract.to_json()) == contract


def test_quickstart_pair_passes_without_a_note() -> None:
    contract = check_pair(QUICKSTART / "draft", QUICKSTART / "target")
    assert contract.num_used_token_ids == contract.draft_vocab_size == 4096
    assert (contract.unused_token_ids, contract.end_token_ids, contract.notes) == ((), (0,), ())


def test_a_parallel_draft_may_have_a_row_for_its_mask_alone(tmp_path: Path) -> None:
    draft = write_words(
        tmp_path / "draft", num_rows=264, pard_token=256, specpipe_num_draft_tokens=8
    )
    target = write_words(tmp_path / "target")
    contract = check_pair(draft, target)
    assert contract.parallel == ParallelDraft(256, 8)
    assert contract.unused_token_ids == ((250, 264),)
    assert contract.notes[0] == (
        "the draft proposes up to 8 tokens in one pass, with token id 256 for those that it lacks"
    )
    assert PairContract.from_json(contract.to_json()) == contract


@pytest.mark.parametrize(
    ("mask", "meaning"),
    [(40, "40 'w40', which is text"), (2, "2 '<eos>', which is where texts begin or end")],
)
def test_a_mask_that_a_text_may_have_is_refused(tmp_path: Path, mask: int, meaning: str) -> None:
    assert refusal(*write_pair(tmp_path, pard_token=mask)) == [
        f"the draft's pard_token is {meaning} to the target: expected an id that no text has"
    ]


def test_a_mask_may_be_a_special_token_that_no_role_has(tmp_path: Path) -> None:
    contract = check_pair(*write_pair(tmp_path, pard_token=3))  # <turn>
    assert contract.parallel == ParallelDraft(3)


def test_a_contract_of_an_older_version_is_of_a_draft_that_gives_tokens_one_by_one(
    tmp_path: Path,
) -> None:
    contract = check_pair(*write_pair(tmp_path))
    older = json.loads(contract.to_json())
    del older["parallel"]
    assert PairContract.from_json(json.dumps(older)) == contract
