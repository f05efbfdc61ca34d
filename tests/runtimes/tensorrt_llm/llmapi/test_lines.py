"""Each release line's stand-in for the LLM API takes what is written for it, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import ValidationError

from specpipe.build import execution, planning, repositories
from specpipe.build.load import load_config
from specpipe.config.sections import PipelineConfig
from specpipe.errors import ConfigError
from specpipe.runtimes.pair_file import PairFile
from specpipe.runtimes.runtime import load_runtime
from specpipe.runtimes.tensorrt_llm.llmapi.llm_pair import LlmPair
from specpipe.speculative.request import Chunk, Request
from specpipe.triton.repository import lint
from tests.quiet import Quiet
from tests.runtimes.table_engine import ids, run
from tests.runtimes.tensorrt_llm.llmapi.test_model_yaml import PAIR, config_of
from tests.runtimes.torch.engines import load_engine
from tests.speculative.table import WordDetokenizer
from tests.tensorrt_llm_stand_ins.llm_api import installed
from tests.tensorrt_llm_stand_ins.llm_api_lines import DIFFERENCES, VERSIONS, line
from tests.toy import write_toy_checkpoint

ROOT = Path(__file__).parents[4]
TWO_ENGINES, ONE_ENGINE = ("1.0", "1.1", "1.2"), ("1.3", "1.4")


@pytest.fixture(params=VERSIONS)
def fake(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    with installed(VERSIONS[request.param]) as module:
        yield module


@pytest.mark.parametrize("name", DIFFERENCES)
def test_each_difference_has_its_source(name: str) -> None:
    """A file, with its commit or the number of its stored text, or a pull request."""
    assert re.search(r"\.py|PR #|\.md@|SpecSampler", DIFFERENCES[name].source)
    assert re.search(r"id \d{8,}|@[0-9a-f]{8}|PR #\d{4,}|\(1\.[01]\)", DIFFERENCES[name].source)


@pytest.fixture(scope="module")
def target_alone(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """What the quickstart target says with no draft token drafted."""
    engine = load_engine(PAIR / "target", tmp_path_factory.mktemp("alone"))
    sequence = engine.allocate(prompt_length=len(PROMPT), max_tokens=len(PROMPT) + 20)
    feed, alone = list(PROMPT), []
    for _ in range(20):
        feed = [int(engine.forward([(sequence, feed)], [1]).argmax())]
        alone += feed
    return alone


PROMPT = (40, 41, 42, 43, 44)
MASK = 1  # of the quickstart's special tokens the one that no text has


@contextmanager
def loaded(repository: Path) -> Iterator[LlmPair]:
    version = repository / "speculative" / "1"
    pair = load_runtime("tensorrt_llm").load_pair(
        version / "draft",
        version / "target",
        PairFile.read(version / "pair.json").options,
        lambda prompt, **_: WordDetokenizer(),
    )
    assert isinstance(pair, LlmPair)
    try:
        yield pair
    finally:
        pair.close()


def answer(pair: LlmPair) -> list[Chunk]:
    return run(pair, [Request(request_id="r", prompt_token_ids=PROMPT, max_tokens=20)])["r"]


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
def test_what_is_packaged_for_a_line_is_served_by_it(
    tmp_path: Path, fake: ModuleType, target_alone: list[int], num_draft_tokens: int
) -> None:
    config = config_of(
        tmp_path,
        f"engine.tensorrt_llm.version={fake.__version__}",
        f"speculation.num_draft_tokens={num_draft_tokens}",
        "engine.tensorrt_llm.kv_cache_free_gpu_mem_fraction=0.5",
        "engine.tensorrt_llm.enable_block_reuse=false",
    )
    execution.run(planning.plan(config), Quiet())
    repository = repositories.built_repository(config)
    assert lint.lint(repository) == []
    with loaded(repository) as pair:
        chunks = answer(pair)
        assert pair._llm.arguments["kv_cache_config"].enable_block_reuse is False
    assert ids(chunks) == target_alone
    last = chunks[-1].statistics
    assert last is not None
    assert (last.total_draft_tokens > 0) == (num_draft_tokens > 0)


@pytest.mark.parametrize("name", ONE_ENGINE)
def test_a_draft_that_proposes_in_one_pass_is_served(
    tmp_path: Path, target_alone: list[int], name: str
) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(PAIR / "draft", draft)
    said = json.loads((draft / "config.json").read_text()) | {"pard_token": MASK}
    (draft / "config.json").write_text(json.dumps(said))
    version = f"engine.tensorrt_llm.version={VERSIONS[name]}"
    config = config_of(tmp_path, version, "speculation.num_draft_tokens=3", draft=draft)
    execution.run(planning.plan(config), Quiet())
    repository = repositories.built_repository(config)
    assert lint.lint(repository) == []
    with installed(VERSIONS[name]), loaded(repository) as pair:
        chunks = answer(pair)
        assert type(pair._llm.arguments["speculative_config"]).__name__ == "PARDDecodingConfig"
    assert ids(chunks) == target_alone
    last = chunks[-1].statistics
    assert last is not None and last.total_draft_tokens > 0


def test_all_settings_of_one_engine_are_arguments_of_it(tmp_path: Path) -> None:
    """As TensorRT-LLM reads them, from the file itself."""
    config = config_of(
        tmp_path,
        f"engine.tensorrt_llm.version={VERSIONS['1.4']}",
        "engine.tensorrt_llm.acceptance=logits",
        "engine.tensorrt_llm.enable_penalty=true",
        "speculation.schedule=[{from_batch_size: 3, num_draft_tokens: 1}]",
    )
    execution.run(planning.plan(config), Quiet())
    assert [r.reasons for r in execution.preview(planning.plan(config))] == [()] * 4
    repository = repositories.built_repository(config)
    with installed(VERSIONS["1.4"]), loaded(repository) as pair:
        given = pair._llm.arguments["speculative_config"]
    assert given.model_dump(exclude_none=True) == {
        "max_draft_len": 4,
        "speculative_model": str(repository / "speculative" / "1" / "draft"),
        "use_rejection_sampling": True,
        "enable_penalty": True,
        "draft_len_schedule": {2: 4, 8: 1},
    }
    assert given.levels() == ((1, 4), (3, 1), (9, 0))


def committed(name: str, folder: Path, version: str) -> PipelineConfig:
    """A config of configs/ for the quickstart pair, on one GPU."""
    overrides: dict[str, object] = {
        "output_dir": folder,
        "engine.max_seq_len": 512,
        "engine.tensorrt_llm.target_gpu_ids": "null",
        "engine.tensorrt_llm.version": version,
    }
    for role in ("draft", "target"):
        overrides |= {f"{role}.checkpoint": PAIR / role, f"{role}.tp_size": 1}
    if name.endswith("fp8"):
        overrides["target.quantization.calibration"] = "{num_samples: 2, max_seq_len: 16}"
    return load_config(
        ROOT / "configs" / f"{name}.yaml", tuple(f"{k}={v}" for k, v in overrides.items())
    )


@pytest.mark.parametrize(
    ("name", "taken_by"),
    [("llama-pytorch-1.4", tuple(VERSIONS)), ("llama-pytorch-1.4-fp8", ONE_ENGINE)],
)
def test_a_committed_config_is_served_by_the_lines_that_take_it(
    name: str, taken_by: tuple[str, ...], tmp_path: Path, target_alone: list[int]
) -> None:
    """The other lines would not count what a schedule drafts."""
    for one in VERSIONS:
        if one not in taken_by:
            with pytest.raises(ConfigError, match=r"speculation\.schedule is .*1\.3\.0rc23"):
                committed(name, tmp_path, VERSIONS[one])
            continue
        config = committed(name, tmp_path, VERSIONS[one])
        execution.run(planning.plan(config), Quiet())
        repository = repositories.built_repository(config)
        assert lint.lint(repository) == []
        with installed(VERSIONS[one]), loaded(repository) as pair:
            token_ids = ids(answer(pair))
        if name == "llama-pytorch-1.4":
            assert token_ids == target_alone
        assert len(token_ids) == 20


def drafting(fake: ModuleType, folder: Path, **fields: Any) -> Any:
    draft = {fake.llmapi.HERE.draft_names[0]: str(folder)}
    return fake.llmapi.DraftTargetDecodingConfig(**{"max_draft_len": 4, **draft, **fields})


@pytest.mark.parametrize(
    ("fields", "taken_by"),
    [
        ({"max_draft_len": "many"}, ()),
        ({"max_draft_length": 4}, ()),
        ({"max_draft_len": 0}, TWO_ENGINES),
        ({"decoding_type": "DraftTarget"}, ()),
        ({"decoding_type": "Draft_Target"}, ("1.2", *ONE_ENGINE)),
        ({"acceptance_window": 8}, ("1.2",)),
        ({"acceptance_rate_window_size": 8}, ONE_ENGINE),
        ({"use_rejection_sampling": False}, ONE_ENGINE),
        ({"use_rejection_sampling": "perhaps"}, ()),
        ({"enable_penalty": True}, ONE_ENGINE),
        ({"spec_dec_variant": 1}, ("1.4",)),
        ({"draft_len_schedule": {1: 4, 8: 2}}, ("1.2", *ONE_ENGINE)),
        ({"draft_len_schedule": {4: 4, 8: 2}}, ONE_ENGINE),
        ({"draft_len_schedule": {1: 2, 8: 4}}, ()),
        ({"draft_len_schedule": {1: 4, 8: 5}}, ()),
    ],
)
def test_fields_of_the_draft_by_line(
    tmp_path: Path, fake: ModuleType, fields: dict[str, Any], taken_by: tuple[str, ...]
) -> None:
    if fake.__version__ in {VERSIONS[name] for name in taken_by}:
        drafting(fake, tmp_path, **fields)
    else:
        with pytest.raises(ValidationError):
            drafting(fake, tmp_path, **fields)


def test_a_draft_that_proposes_in_one_pass_by_line(tmp_path: Path, fake: ModuleType) -> None:
    assert hasattr(fake.llmapi, "PARDDecodingConfig") == (fake.__version__ >= "1.3")
    if fake.__version__ < "1.3":
        return
    draft = {"max_draft_len": 8, "speculative_model": str(tmp_path)}
    fake.llmapi.PARDDecodingConfig(**draft, mask_token_id=7, draft_len_schedule={4: 8, 8: 2})
    with pytest.raises(ValidationError):
        fake.llmapi.PARDDecodingConfig(**draft, pard_token=7)
    with pytest.raises(ValidationError):
        fake.llmapi.DraftTargetDecodingConfig(**draft, mask_token_id=7)


LIMITS = {"max_batch_size": 2, "max_seq_len": 64, "max_num_tokens": 64}


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_batch_size": "many"},
        {"no_such_argument": 1},
        {"speculative_config": 3},
        {"kv_cache_config": {"reuse": True}},
        {"backend": "cpp"},
    ],
)
def test_arguments_that_no_line_takes(
    tmp_path: Path, fake: ModuleType, arguments: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError, match=f"for TorchLlmArgs\n{next(iter(arguments))}"):
        fake.LLM(tmp_path, **{**LIMITS, **arguments})


def test_engines_are_no_backend_of_the_last_lines(tmp_path: Path, fake: ModuleType) -> None:
    assert ("tensorrt" in fake.llmapi.HERE.backends) == (fake.__version__ < "1.3")


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "qwen2", "phi3", "gemma2"])
def test_targets_that_a_line_drafts_for(tmp_path: Path, fake: ModuleType, family: str) -> None:
    """Those that the rules of refusals.py let pass, and no more."""
    target = write_toy_checkpoint(tmp_path / "target", family=family)
    takes = family != "gemma2" and (
        family in ("llama", "qwen3") or not fake.llmapi.HERE.is_one_engine
    )
    if not takes:
        with pytest.raises((AttributeError, ValueError), match="ForCausalLM"):
            fake.LLM(target, **LIMITS, speculative_config=drafting(fake, target))
        return
    fake.LLM(target, **LIMITS, speculative_config=drafting(fake, target)).shutdown()


@pytest.mark.parametrize("name", ONE_ENGINE)
def test_a_draft_with_another_dtype_of_kv_cache(tmp_path: Path, name: str) -> None:
    target = write_toy_checkpoint(tmp_path / "target")
    draft = write_toy_checkpoint(tmp_path / "draft")
    (draft / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}})
    )
    with (
        installed(VERSIONS[name]) as fake,
        pytest.raises(ValueError, match="KV cache would be overwritten"),
    ):
        fake.LLM(target, **LIMITS, speculative_config=drafting(fake, draft))


def test_the_lines_are_told_apart() -> None:
    """A table in which two columns were alike would stand in for nothing."""
    columns = [repr(vars(line(version))) for version in VERSIONS.values()]
    assert len(set(columns)) == len(columns)
