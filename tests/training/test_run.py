"""A draft trained from a collection: better, the same each time, and whole whatever happens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specpipe.build.load import load_config
from specpipe.build.pairing import check_pair
from specpipe.checkpoints.parallel_draft import ParallelDraft
from specpipe.errors import CheckpointError, ConfigError, TrainingError
from specpipe.text.tokenizer import Tokenizer
from specpipe.training import run, trainer
from specpipe.training.batches import Batch
from specpipe.training.collection import Collection
from specpipe.training.collection_writer import open_writer
from specpipe.training.models import Student, add_mask, quiet
from specpipe.training.on_policy import write_answers as write_on_policy
from specpipe.training.outcome import Outcome
from specpipe.training.run import train_draft
from specpipe.training.settings import TrainingSettings
from specpipe.training.start import find_start
from tests.training.toy_pair import read_config, write_answers, write_pair

SETTINGS = TrainingSettings(
    num_steps=40,
    batch_tokens=1024,
    learning_rate=0.02,
    evaluate_every=8,  # and not each tenth step, at which the loss is logged
    held_out=0.2,
    num_draft_tokens=3,
)


class Killed(Exception):
    """Stands for a process that ends anywhere."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, pair: Path) -> Path:
    return write_answers(tmp_path_factory.mktemp("answers"), pair, num_top=4)


Train = Callable[..., Outcome]


@pytest.fixture(scope="module")
def train(pair: Path, answers: Path) -> Train:
    def run(
        output: Path,
        settings: TrainingSettings = SETTINGS,
        log: Callable[[str], None] = lambda line: None,
        **options: Any,
    ) -> Outcome:
        return train_draft(
            load_config(options.pop("config", pair)),
            settings,
            answers=options.pop("answers", [answers]),
            output=output,
            log=log,
            **options,
        )

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, train: Train) -> tuple[Path, Outcome]:
    output = tmp_path_factory.mktemp("trained") / "draft"
    return output, train(output)


def files(folder: Path) -> dict[str, bytes]:
    """Everything of a trained draft, but for the report, which tells when it was made."""
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name != "report.html"}


def test_a_trained_draft_is_accepted_more(trained: tuple[Path, Outcome], pair: Path) -> None:
    output, outcome = trained
    assert set(outcome.gains) == {"greedy", "sampled"}
    for gain in outcome.gains.values():
        assert gain.low > 0.2
    assert outcome.gains["greedy"].new > 2
    assert [step for step, _ in outcome.lengths] == [8, 16, 24, 32, 40]
    assert outcome.best_step == max(outcome.lengths, key=lambda entry: entry[1])[0]
    draft = AutoModelForCausalLM.from_pretrained(output)
    assert draft.dtype == torch.float32
    contract = check_pair(output, pair.parent / "target")
    assert contract.draft_vocab_size == 256
    assert not list(output.parent.glob(".*"))
    modes = {path.stat().st_mode for path in output.iterdir()}
    assert len(modes) == 1  # a server may read all of it


def test_its_card_says_what_it_comes_from_and_is_worth(trained: tuple[Path, Outcome]) -> None:
    output, outcome = trained
    card = (output / "README.md").read_text(encoding="utf-8")
    gain = outcome.gains["greedy"]
    row = next(line for line in card.splitlines() if line.startswith("| greedy |"))
    assert f"{gain.old:.3f} | {gain.new:.3f}" in row
    assert f"({gain.low:+.3f} to {gain.high:+.3f})" in row
    assert "CC0-1.0" in card
    assert "32 texts of 40; held out were 8 of 4 files" in card
    digest = outcome.record["target"]["sha256"]["model.safetensors"]
    assert digest[:16] in card
    assert "Acceptance by position" in (output / "report.html").read_text(encoding="utf-8")


def test_what_was_killed_goes_on_to_the_same_bytes(
    tmp_path: Path, train: Train, trained: tuple[Path, Outcome]
) -> None:
    def stop_at_24(line: str) -> None:
        if line.startswith("step 24 of 40: greedy"):
            raise Killed

    output = tmp_path / "draft"
    with pytest.raises(Killed):
        train(output, log=stop_at_24)
    assert not output.exists()
    work = tmp_path / ".draft.training"
    torn = work / "checkpoint-24"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"torn")
    lines: list[str] = []
    train(output, log=lines.append)
    assert [line.partition(": loss ")[0] for line in lines if ": loss " in line] == [
        f"step {step} of 40" for step in (20, 30, 40)
    ]
    assert f"going on from {work / 'checkpoint-16'}" in lines
    assert files(output) == files(trained[0])
    train(output, log=lines.append)
    assert lines[-1] == f"{output} is trained already, with these settings on these answers"


def test_a_training_goes_on_with_its_own_settings_alone(
    tmp_path: Path, train: Train, trained: tuple[Path, Outcome]
) -> None:
    other = replace(SETTINGS, learning_rate=0.5)
    with pytest.raises(ConfigError) as refused:
        train(trained[0], other)
    assert "otherwise (learning_rate was 0.02, is now 0.5): give" in str(refused.value)
    (tmp_path / "draft").mkdir()
    with pytest.raises(ConfigError, match="is there and is no draft that was trained"):
        train(tmp_path / "draft")


def test_a_training_goes_on_with_its_own_answers_alone(
    tmp_path: Path, train: Train, answers: Path, trained: tuple[Path, Outcome]
) -> None:
    """Whatever collection.json says of them, which a kill leaves as it was."""
    cut = tmp_path / "cut"
    shutil.copytree(answers, cut)
    info, shard = cut / "collection.json", cut / "answers-00000.jsonl"
    info.write_text(info.read_text().replace('"is_complete": true', '"is_complete": false'))
    shard.write_bytes(b"".join(shard.read_bytes().splitlines(keepends=True)[:-1]) + b"torn")
    lines: list[str] = []
    with pytest.raises(ConfigError) as refused:
        train(trained[0], log=lines.append, answers=[cut])
    assert "answers.1.num_answers was 40, is now 39; answers.1.sha256 was " in str(refused.value)
    assert lines == [
        f"{cut} is not complete: trained is on the 39 answers so far; the `draft collect` that "
        "began it goes on with it"
    ]


def test_a_collection_that_is_being_written_is_refused(
    tmp_path: Path, train: Train, answers: Path
) -> None:
    shutil.copytree(answers, tmp_path / "answers")
    info = Collection.open(answers).info
    with (
        open_writer(
            tmp_path / "answers", replace(info, num_answers=0, num_tokens=0, is_complete=False)
        ),
        pytest.raises(ConfigError, match="answers is being collected by another process: wait"),
    ):
        train(tmp_path / "draft", answers=[tmp_path / "answers", tmp_path / "answers"])


def test_a_full_disk_leaves_the_state_before(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = trainer.DraftTrainer._save

    def fill(self: trainer.DraftTrainer, output_dir: str | None = None, state: Any = None) -> None:
        save(self, output_dir, state)
        if self.state.global_step == 2:
            raise OSError(28, "No space left on device", f"{output_dir}/model.safetensors")

    monkeypatch.setattr(trainer.DraftTrainer, "_save", fill)
    settings = replace(SETTINGS, num_steps=2, evaluate_every=1)
    with pytest.raises(TrainingError) as failed:
        train(tmp_path / "draft", settings)
    assert "the state of step 2 cannot be written" in str(failed.value)
    assert "No space left on device" in str(failed.value)
    work = tmp_path / ".draft.training"
    assert [p.name for p in work.glob("checkpoint-*")] == ["checkpoint-1"]
    monkeypatch.undo()
    assert train(tmp_path / "draft", settings).lengths[-1][0] == 2


def test_patience_ends_a_training_where_it_ends_unbroken(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is learned, so no evaluation is better than the first.
    settings = replace(
        SETTINGS, num_steps=20, evaluate_every=2, patience=2, learning_rate=1e-12, held_out=0.1
    )

    def stop_at_6(line: str) -> None:
        if line.startswith("step 6 of 20: greedy"):
            raise Killed

    def kill(*arguments: Any) -> None:
        raise Killed

    with pytest.raises(Killed):
        train(tmp_path / "draft", settings, log=stop_at_6)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(run, "_write", kill)
        train(tmp_path / "draft", settings)
    outcome = train(tmp_path / "draft", settings)
    assert [step for step, _ in outcome.lengths] == [2, 4, 6]
    assert outcome.best_step == 2


def test_a_full_gpu_ends_in_a_sentence(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*arguments: Any, **options: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(Student, "forward", fill)
    with pytest.raises(TrainingError, match=r"^step 1 does not fit .*2\.00 GiB.* --batch-tokens"):
        train(tmp_path / "draft")


def test_a_loss_that_is_no_number_ends_in_a_sentence(tmp_path: Path, train: Train) -> None:
    settings = replace(SETTINGS, learning_rate=1e38, warmup=0.0)
    with pytest.raises(TrainingError, match=r"^the loss of step \d+ is (nan|inf), .* lower"):
        train(tmp_path / "draft", settings)
    assert not list(tmp_path.iterdir())


def test_answers_of_another_tokenizer_are_refused(tmp_path: Path, train: Train, pair: Path) -> None:
    other = write_answers(tmp_path / "other", pair, tokenizer_digest="ab")
    with pytest.raises(ConfigError, match="was collected with another tokenizer than that of"):
        train(tmp_path / "draft", answers=[other])


def test_answers_with_ids_that_the_pair_does_not_have_are_refused(
    tmp_path: Path, train: Train, answers: Path
) -> None:
    shutil.copytree(answers, tmp_path / "answers")
    path = tmp_path / "answers" / "answers-00000.jsonl"
    lines = path.read_text().splitlines()
    first = {**json.loads(lines[0]), "token_ids": [9, 70000], "top_log_probs": []}
    path.write_text("\n".join([json.dumps(first), *lines[1:], ""]))
    with pytest.raises(ConfigError, match="has token id 70000, which the target .* does not have"):
        train(tmp_path / "draft", answers=[tmp_path / "answers"])
    assert [entry.name for entry in tmp_path.iterdir()] == ["answers"]


def test_weights_that_overflow_are_no_draft(tmp_path: Path, train: Train) -> None:
    settings = replace(SETTINGS, learning_rate=1e38, warmup=0.0, num_steps=1)
    with pytest.raises(TrainingError, match="after step 1 .* holds what is no finite number: low"):
        train(tmp_path / "draft", settings)
    assert not list(tmp_path.iterdir())


def test_a_link_to_nowhere_is_no_place_for_a_draft(tmp_path: Path, train: Train) -> None:
    (tmp_path / "draft").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="give an --output that does not exist"):
        train(tmp_path / "draft")


def test_a_draft_that_starts_with_random_weights_has_the_shape_that_is_given(
    tmp_path: Path, train: Train, pair: Path
) -> None:
    narrow = tmp_path / "shape.json"
    values = {**read_config(pair.parent / "draft"), "num_hidden_layers": 1}
    values["vocab_size"] = 264  # more rows than the target has
    narrow.write_text(json.dumps(values))
    settings = replace(SETTINGS, num_steps=2, from_log_probs=True, loss="total-variation")
    outcome = train(tmp_path / "draft", settings, shape=narrow)
    assert read_config(tmp_path / "draft")["num_hidden_layers"] == 1
    # The figures before are those of the config's draft.
    assert outcome.gains["greedy"].old == pytest.approx(
        Outcome.read(tmp_path / "draft").gains["greedy"].old
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": None}, "has model_type 'llama', not 'None'"),
        ({"model_type": "bert"}, "has model_type 'llama', not 'bert'"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, expected a whole number of at lea"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected at most 512"),
        ({"hidden_act": "nosuch"}, "hidden_act 'nosuch' is not supported"),
        ({"max_position_embeddings": "x"}, "max_position_embeddings is 'x', expected a whole"),
        ({"dtype": "nosuch"}, "dtype 'nosuch' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantiz"),
    ],
)
def test_a_shape_is_read_as_a_checkpoint_is(
    change: dict[str, Any], message: str, tmp_path: Path, pair: Path
) -> None:
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps({**read_config(pair.parent / "draft"), **change}))
    with pytest.raises(CheckpointError) as caught:
        find_start(load_config(pair), None, shape)
    assert str(caught.value).startswith(f"{shape}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("num_layers", "message"), [(1, "holds 9 tensors for which"), (3, "lacks 9 tensors of its")]
)
@pytest.mark.parametrize("role", ["draft", "target"])
def test_weights_that_a_config_does_not_fit_are_not_trained(
    role: str, num_layers: int, message: str, tmp_path: Path
) -> None:
    config = write_pair(tmp_path)
    path = tmp_path / role / "config.json"
    path.write_text(json.dumps({**read_config(path.parent), "num_hidden_layers": num_layers}))
    with pytest.raises(CheckpointError, match=message):
        find_start(load_config(config), None, None)


def test_a_parallel_draft_learns_by_its_mask(tmp_path: Path, train: Train) -> None:
    mask = 250  # the first row above the ids, for which the draft has none yet
    config = write_pair(tmp_path / "pair", draft_rows=mask)
    output = tmp_path / "draft"
    settings = replace(SETTINGS, parallel=3, on_policy=0.1, loss="mixed-kl")
    outcome = train(output, settings, config=config)
    assert outcome.gains["greedy"].low > 0
    written = read_config(output)
    assert (written["pard_token"], written["specpipe_num_draft_tokens"]) == (mask, 3)
    assert written["vocab_size"] == 256
    assert check_pair(output, config.parent / "target").unused_token_ids[-1] == (250, 256)
    after = load_file(output / "model.safetensors")
    # What the head would give the mask and the padding is in no softmax, so nothing moves it.
    spare = after["lm_head.weight"][mask:]
    assert torch.equal(spare, spare[:1].expand_as(spare))
    assert not torch.equal(
        after["model.embed_tokens.weight"][mask], after["model.embed_tokens.weight"][mask + 1]
    )


def test_texts_longer_than_a_parallel_drafts_window_are_refused(
    tmp_path: Path, train: Train
) -> None:
    config = write_pair(tmp_path / "pair")
    path = config.parent / "draft" / "config.json"
    values = {**read_config(path.parent), "sliding_window": 32}
    values |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    path.write_text(json.dumps(values))
    settings = replace(SETTINGS, num_steps=1, parallel=3)
    with pytest.raises(ConfigError, match="--max-seq-len 64: .* at most 32 tokens of a text"):
        train(tmp_path / "draft", settings, config=config)
    train(tmp_path / "draft", replace(settings, max_seq_len=32), config=config)


def test_the_mask_is_a_spare_row_where_there_is_one_and_no_id_in_use(pair: Path) -> None:
    contract = check_pair(pair.parent / "draft", pair.parent / "target")
    draft = AutoModelForCausalLM.from_pretrained(pair.parent / "draft")
    used = draft.get_input_embeddings().weight[:250].clone()
    for asked, mask in ((None, 250), (253, 253), (None, 253)):  # the last one: its own by now
        assert add_mask(draft, contract, num_draft_tokens=3, mask=asked) == mask
    weight = draft.get_input_embeddings().weight
    assert weight.shape[0] == 256
    assert torch.equal(weight[:250], used)
    assert torch.allclose(weight[253], used.mean(0))
    for asked, message in (
        (9, "9 is an id that texts have"),
        (256, "256 would leave rows without"),
    ):
        with pytest.raises(ConfigError, match=f"--mask-token {message}"):
            add_mask(draft, contract, num_draft_tokens=3, mask=asked)


def test_the_mask_may_be_the_padding_which_no_text_has(
    tmp_path: Path, train: Train, pair: Path
) -> None:
    tokenizer = Tokenizer.load(pair.parent / "target")
    mask = tokenizer.pad_token_id
    assert mask in tokenizer.spare_token_ids
    assert tokenizer.spare_token_ids.isdisjoint({tokenizer.bos_token_id, tokenizer.eos_token_id})
    train(tmp_path / "draft", replace(SETTINGS, parallel=3, mask_token=mask, num_steps=2))
    contract = check_pair(tmp_path / "draft", pair.parent / "target")
    assert contract.parallel == ParallelDraft(mask, 3)
    # In no softmax, so nothing moves what the head would give it; other rows are moved.
    before, after = (
        load_file(folder / "model.safetensors")["lm_head.weight"]
        for folder in (pair.parent / "draft", tmp_path / "draft")
    )
    assert torch.allclose(after[mask], before[:250].mean(0))
    assert not torch.equal(after[9], before[9])


def test_what_a_draft_writes_ends_where_it_ends_and_has_the_targets_ids_alone(
    trained: tuple[Path, Outcome],
) -> None:
    draft = AutoModelForCausalLM.from_pretrained(trained[0])
    token_ids = torch.tensor([[1, 9, 11, 0, 0, 0, 0], [1, 9, 12, 13, 14, 15, 16]])
    answers = torch.tensor([2, 4])
    batch = Batch(0, token_ids, answers, starts=answers * 0, ends=torch.tensor([4, 6]))
    allowed = range(4, 30)

    def write(seed: int, end_ids: list[int]) -> Batch:
        with quiet():
            return write_on_policy(draft, batch, allowed=allowed, end_ids=end_ids, seed=seed)

    state = torch.get_rng_state()
    written = write(0, [])
    draft.generation_config.repetition_penalty = 9.0  # as a chat model's says of its own answers
    assert torch.equal(torch.get_rng_state(), state)
    assert written.token_ids[0, :2].tolist() == [1, 9]
    assert written.token_ids[1, :4].tolist() == [1, 9, 12, 13]
    assert written.ends.tolist() == [4, 6]
    assert set(written.token_ids[0, 2:5].tolist()) <= set(allowed)
    assert torch.equal(write(0, []).token_ids, written.token_ids)
    assert not torch.equal(write(1, []).token_ids, written.token_ids)
    ended = write(0, [int(written.token_ids[0, 2])])
    assert ended.ends.tolist()[0] == 2


def test_texts_held_out_are_not_trained_on(trained: tuple[Path, Outcome]) -> None:
    data = trained[1].data
    assert data["num_held_out_groups"] == 4
    assert data["num_training"] + data["num_held_out"] == data["num_texts"] == 40


def test_what_a_log_of_requests_asks_is_held_out(
    tmp_path: Path, train: Train, pair: Path, answers: Path
) -> None:
    tokenizer = Tokenizer.load(pair.parent / "target")
    prompts = [answer.prompt_token_ids[1:] for answer in Collection.open(answers).answers()]
    log = tmp_path / "requests.jsonl"
    with log.open("w") as file:
        for token_ids in prompts:
            request = {"model": "m", "prompt": tokenizer.decode(token_ids), "temperature": 0.7}
            file.write(f"{json.dumps(request)}\n")
    with pytest.raises(ConfigError, match=r"none is left to train on: 8 are held out, 32 are near"):
        train(tmp_path / "draft", never=[str(log)])


@pytest.mark.slow
def test_a_killed_process_goes_on_to_the_same_bytes(
    tmp_path: Path, pair: Path, answers: Path, trained: tuple[Path, Outcome]
) -> None:
    import signal
    import subprocess
    import sys

    command = [
        *(sys.executable, "-m", "specpipe", "draft", "train", "--config", str(pair)),
        *("--answers", str(answers), "--output", str(tmp_path / "draft"), "--steps", "40"),
        *("--batch-tokens", "1024", "--learning-rate", "0.02", "--evaluate-every", "8"),
        *("--held-out-share", "0.2", "--device", "cpu"),
    ]
    generator = np.random.default_rng()
    for _ in range(3):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        wanted = f"step {8 * generator.integers(1, 5)} of 40: greedy"
        for line in process.stderr:
            if line.startswith(wanted):
                process.send_signal(signal.SIGKILL)
                break
        process.wait()
        process.stderr.close()
    subprocess.run(command, check=True, capture_output=True)
    assert files(tmp_path / "draft") == files(trained[0])
    shutil.rmtree(tmp_path / "draft")
