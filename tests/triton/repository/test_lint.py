"""Each rule of the linter, on a repository that breaks it alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from specpipe.errors import RepositoryError
from specpipe.runtimes import config_pbtxt
from specpipe.triton.repository import lint

Edit = Callable[[pb.ModelConfig], object]


@pytest.fixture
def folder(echo_repository: Callable[..., Path]) -> Path:
    return echo_repository()


def edit(folder: Path, model: str, change: Edit) -> None:
    """Changes one config.pbtxt by its message."""
    path = folder / model / "config.pbtxt"
    config = config_pbtxt.read_config(path)
    change(config)
    path.write_text(text_format.MessageToString(config))


def tensor(tensors: object, name: str) -> object:
    return next(tensor for tensor in tensors if tensor.name == name)  # type: ignore[attr-defined]


def test_what_packaging_writes_has_no_fault(folder: Path) -> None:
    assert lint.lint(folder) == []


def test_every_fault_is_listed_in_one_error(folder: Path) -> None:
    (folder / "speculative" / "1" / "model.py").unlink()
    edit(
        folder,
        "ensemble",
        lambda config: tensor(config.input, "seed").__setattr__("optional", False),
    )
    with pytest.raises(RepositoryError) as caught:
        lint.check(folder)
    assert str(caught.value) == (
        f"the Triton repository {folder} would not serve:\n"
        f"  speculative: {folder}/speculative/1/model.py is missing\n"
        "  ensemble: input 'seed' is required; declare it optional"
    )


def test_an_empty_or_missing_folder(tmp_path: Path) -> None:
    assert lint.lint(tmp_path) == [f"{tmp_path} holds no models"]
    assert lint.lint(tmp_path / "nothing") == [f"{tmp_path / 'nothing'} holds no models"]


def test_placeholders_quoted_or_not_are_all_listed_by_file_and_key(folder: Path) -> None:
    (folder / "postprocessing" / "config.pbtxt").write_text(
        'name: "postprocessing"\n'
        "max_batch_size: ${triton_max_batch_size}\n"
        "model_transaction_policy { decoupled: ${decoupled_mode} }\n"
        'input { name: "text" data_type: ${logits_datatype} dims: [1] }\n'
        "parameters {\n"
        '  key: "tokenizer_dir"\n'
        '  value { string_value: "${tokenizer_dir}" }\n'
        "}\n"
    )
    assert [fault for fault in lint.lint(folder) if "placeholder" in fault] == [
        "postprocessing/config.pbtxt: max_batch_size is the placeholder ${triton_max_batch_size}",
        "postprocessing/config.pbtxt: decoupled is the placeholder ${decoupled_mode}",
        "postprocessing/config.pbtxt: data_type is the placeholder ${logits_datatype}",
        "postprocessing/config.pbtxt: tokenizer_dir is the placeholder ${tokenizer_dir}",
    ]


def test_a_quoted_placeholder_alone_parses_and_is_refused(folder: Path) -> None:
    def leave(config: pb.ModelConfig) -> None:
        config.parameters["tokenizer_dir"].string_value = "${tokenizer_dir}"

    edit(folder, "preprocessing", leave)
    assert (
        "preprocessing/config.pbtxt: tokenizer_dir is the placeholder ${tokenizer_dir}"
        in lint.lint(folder)
    )


def test_a_config_that_does_not_parse_names_file_line_and_column(folder: Path) -> None:
    path = folder / "preprocessing" / "config.pbtxt"
    path.write_text('name: "preprocessing"\nmax_batch_sise: 1\n')
    assert lint.lint(folder)[0].startswith(
        f"preprocessing: {path} is not a model configuration: 2:1 : "
    )


BROKEN_MODELS: list[tuple[str, Edit, str]] = [
    (
        "preprocessing",
        lambda c: setattr(c, "name", "pre"),
        "preprocessing: its config.pbtxt names the model 'pre'",
    ),
    (
        "preprocessing",
        lambda c: setattr(c.parameters["tokenizer_dir"], "string_value", "/opt/tokenizer"),
        "preprocessing: tokenizer_dir '/opt/tokenizer' leads out of the version folder",
    ),
    (
        "preprocessing",
        lambda c: setattr(tensor(c.output, "prompt_token_ids"), "data_type", pb.TYPE_INT64),
        "ensemble: tensor '_prompt_token_ids' is INT64 from preprocessing's output "
        "prompt_token_ids, but INT32 at speculative's input prompt_token_ids",
    ),
    (
        "preprocessing",
        lambda c: setattr(c, "max_batch_size", 0),
        "ensemble: tensor '_request' has rank 1 from preprocessing's output request, but 2 at "
        "speculative's input request",
    ),
    (
        "speculative",
        lambda c: c.input.add(name="draft_logits", data_type=pb.TYPE_FP32, dims=[-1]),
        "ensemble: speculative's input 'draft_logits' is required, but not mapped",
    ),
    (
        "speculative",
        lambda c: setattr(tensor(c.output, "text"), "name", "chunk"),
        "ensemble: speculative has no output 'text'",
    ),
    (
        "postprocessing",
        lambda c: setattr(c.instance_group[0], "count", 2),
        "postprocessing: instance_group has 2 instances; it must have 1, since two would send the "
        "chunks of a request out of order",
    ),
    (
        "postprocessing",
        lambda c: c.ClearField("instance_group"),
        "postprocessing: instance_group has 0 instances; it must have 1, since two would send the "
        "chunks of a request out of order",
    ),
    (
        "postprocessing",
        lambda c: setattr(c.parameters["cancels"], "string_value", "engine"),
        "postprocessing: cancels 'engine' is not a model of the repository",
    ),
    (
        "postprocessing",
        lambda c: setattr(c.model_transaction_policy, "decoupled", True),
        "ensemble: two steps are decoupled (speculative, postprocessing); one may be",
    ),
    (
        "ensemble",
        lambda c: setattr(c.model_transaction_policy, "decoupled", False),
        "ensemble: model_transaction_policy.decoupled is false, but it calls speculative, where it "
        "is true",
    ),
    (
        "ensemble",
        lambda c: setattr(tensor(c.input, "top_k"), "optional", False),
        "ensemble: input 'top_k' is required; declare it optional",
    ),
    (
        "ensemble",
        lambda c: c.input.add(name="top_q", data_type=pb.TYPE_FP32, dims=[1], optional=True),
        "ensemble: input 'top_q' is read by no step",
    ),
    (
        "ensemble",
        lambda c: c.output.add(name="seed", data_type=pb.TYPE_UINT64, dims=[1]),
        "ensemble: output 'seed' bears the name of an input",
    ),
    (
        "ensemble",
        lambda c: c.output.add(name="top_tokens", data_type=pb.TYPE_INT32, dims=[1]),
        "ensemble: tensor 'top_tokens', read by the ensemble's output, has no producer",
    ),
    (
        "ensemble",
        lambda c: setattr(tensor(c.output, "num_steps"), "data_type", pb.TYPE_INT64),
        "ensemble: tensor 'num_steps' is INT32 from speculative's output num_steps, but INT64 at "
        "the ensemble's output",
    ),
    (
        "ensemble",
        lambda c: c.ensemble_scheduling.step[2].output_map.update({"text_output": "num_steps"}),
        "ensemble: tensor 'num_steps' has two producers: speculative's output num_steps and "
        "postprocessing's output text_output",
    ),
    (
        "ensemble",
        lambda c: setattr(c.ensemble_scheduling.step[0], "model_name", "tokenizer"),
        "ensemble: the step 'tokenizer' is not a model of the repository",
    ),
    (
        "ensemble",
        lambda c: c.ensemble_scheduling.step[1].input_map.update({"ids": "_prompt_token_ids"}),
        "ensemble: speculative has no input 'ids'",
    ),
]


@pytest.mark.parametrize(("model", "change", "fault"), BROKEN_MODELS)
def test_a_broken_config_is_found(folder: Path, model: str, change: Edit, fault: str) -> None:
    edit(folder, model, change)
    assert fault in lint.lint(folder)


def test_a_bls_model_that_is_not_decoupled_may_not_call_an_engine_that_is(folder: Path) -> None:
    def call(config: pb.ModelConfig) -> None:
        config.parameters["tensorrt_llm_model_name"].string_value = "speculative"

    edit(folder, "plain", call)
    assert lint.lint(folder) == [
        "plain: model_transaction_policy.decoupled is false, but it calls speculative, where it is "
        "true"
    ]


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("preprocessing/1/tokenizer", "preprocessing: tokenizer_dir 'tokenizer' does not exist in"),
        ("speculative/1/pair.json", "speculative: pair_file 'pair.json' does not exist in"),
        ("speculative/1/draft", "speculative: draft_engine_dir 'draft' does not exist in"),
        ("ensemble/1", "ensemble: the version folder"),
    ],
)
def test_a_missing_file_is_found(folder: Path, path: str, fault: str) -> None:
    (folder / path).rename(folder.parent / "moved")
    assert any(found.startswith(fault) for found in lint.lint(folder))


@pytest.mark.parametrize("model", ["preprocessing", "speculative"])
def test_limits_that_cannot_be_read_are_found(folder: Path, model: str) -> None:
    limits = folder / model / "1" / "limits.json"
    limits.write_text(limits.read_text().replace('"max_words": 256', '"max_words": "many"'))
    (fault,) = lint.lint(folder)
    assert fault.startswith(f"{model}: {limits} holds no limits (")
    edit(folder, model, lambda config: config.parameters.pop("limits_file"))
    assert lint.lint(folder) == [
        f"{model}: it names no limits_file, as older releases wrote it; build again"
    ]


def test_a_repository_of_an_older_release_is_found(folder: Path) -> None:
    """It called the tensor of the prompt's ids as an input of the ensemble is called now."""

    def rename(config: pb.ModelConfig) -> None:
        for declared in (*config.input, *config.output):
            declared.name = declared.name.replace("prompt_token_ids", "input_ids")

    for model in ("preprocessing", "speculative"):
        edit(folder, model, rename)
    faults = lint.lint(folder)
    for model, kind in (("preprocessing", "output"), ("speculative", "input")):
        assert (
            f"{model}: it has no {kind} 'prompt_token_ids', as older releases wrote it; build again"
        ) in faults


def test_a_link_out_of_the_repository_is_found(folder: Path) -> None:
    (folder / "speculative" / "1" / "target" / "weights").symlink_to(folder.parent)
    assert lint.lint(folder) == [
        "speculative: speculative/1/target/weights is a link out of the repository"
    ]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (
            {"num_draft_tokens": 8},
            "speculative: num_draft_tokens is 8, but the target engine was built with "
            "max_draft_len 4: lower it, or build the engine with a higher one",
        ),
        (
            {"max_seq_len": 2048},
            "speculative: max_seq_len is 2048, but the target engine was built with max_seq_len "
            "1024: lower it, or build the engine with a higher one",
        ),
        (
            {"max_batch_size": 16},
            "speculative: max_batch_size is 16, but the draft engine was built with max_batch_size "
            "8: lower it, or build the engine with a higher one",
        ),
    ],
)
def test_more_than_the_engines_allow_is_found(
    echo_repository: Callable[..., Path], options: dict[str, int], fault: str
) -> None:
    assert fault in lint.lint(echo_repository(**options))


def test_speculation_with_an_engine_built_without_it_is_found(folder: Path) -> None:
    path = folder / "speculative" / "1" / "target" / "config.json"
    config = json.loads(path.read_text())
    config["build_config"]["max_draft_len"] = 0
    path.unlink()  # the engine folder of the draft is linked to the same file
    path.write_text(json.dumps(config))
    assert lint.lint(folder) == [
        "speculative: num_draft_tokens is 4, but the target engine was built with max_draft_len 0: "
        "lower it, or build the engine with a higher one"
    ]


def test_a_damaged_engine_config_is_found(folder: Path) -> None:
    path = folder / "speculative" / "1" / "draft" / "config.json"
    path.unlink()
    path.write_text("{")
    assert lint.lint(folder)[0].startswith(
        f"speculative: {path} has no 'build_config' that can be read"
    )
