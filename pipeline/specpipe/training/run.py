"""A training from its config to a checkpoint folder: prepared, run, measured, described.

OUTPUT             an ordinary Hugging Face checkpoint, with README.md, report.html, training.json
.OUTPUT.training/  beside it while the training is not done: settings.json and checkpoint-STEP/,
                   from which the same command goes on
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from specpipe.checkpoints.files import copy_file, is_there
from specpipe.checkpoints.licences import find_licences
from specpipe.checkpoints.parallel_draft import MASK_KEY
from specpipe.config.sections import PipelineConfig
from specpipe.errors import ConfigError, TrainingError, show, to_sentence
from specpipe.evaluate.prompts import as_messages, digest
from specpipe.evaluate.report.page import PAGE_NAME, render
from specpipe.machine.own_json import read_object, write_object
from specpipe.progress import NOTHING, logged_phase, shown
from specpipe.text.files import TOKENIZER_FILES
from specpipe.text.tokenizer import Tokenizer
from specpipe.training.acceptance import Measured
from specpipe.training.batches import Batch, Batches
from specpipe.training.card import model_card
from specpipe.training.collection import (
    Answer,
    Collection,
    open_collections,
    read_answers,
    tokenizer_digest,
)
from specpipe.training.collection_writer import kept_from_writers
from specpipe.training.curves import training_page
from specpipe.training.losses import LOSSES
from specpipe.training.measure import ReadTarget
from specpipe.training.models import (
    ListedScores,
    SharedIds,
    Student,
    Target,
    add_mask,
    load_model,
    moved,
    quiet,
    random_model,
    remove_mask,
    round_weights,
    save_draft,
    stored_dtype,
)
from specpipe.training.outcome import RECORD_NAME, Outcome
from specpipe.training.request_lines import iterate_asked
from specpipe.training.settings import TrainingSettings, setting_differences
from specpipe.training.start import Start, find_start
from specpipe.training.texts import Parts, divide
from specpipe.training.trainer import DraftTrainer, Training, last_checkpoint, make_trainer

Log = Callable[[str], None]


def train_draft(
    config: PipelineConfig,
    settings: TrainingSettings,
    *,
    answers: Sequence[Path],
    output: Path,
    checkpoint: str | None = None,
    shape: Path | None = None,
    never: Sequence[str] = (),
    log: Log,
) -> Outcome:
    """Trains the draft of a pair on what its target answered, and writes it into a new folder.

    checkpoint  whose weights are trained instead of the config's draft; shape: a config.json for
                random ones
    never       sets of prompts that are not trained on

    The same command goes on where it was interrupted. Raises ConfigError for answers, settings or
    folders that do not fit, PairingError and CheckpointError for checkpoints, TrainingError where
    a loss is no number, or the disk or a GPU's memory is full.
    """
    is_main = is_main_process()
    log = log if is_main else _ignore
    start = find_start(config, checkpoint, shape)
    collections = open_collections(answers)
    tokenizer = Tokenizer.load(start.target.path)
    if collections[0].info.tokenizer_digest != tokenizer_digest(tokenizer):
        raise ConfigError(
            f"{collections[0].folder} was collected with another tokenizer than that of the target "
            f"{start.target.name}: collect answers of this target"
        )
    max_seq_len = start.fitting_length(settings.max_seq_len)
    settings = replace(settings, max_seq_len=max_seq_len)
    with ExitStack() as held:
        if not is_main:
            held.enter_context(shown(NOTHING))
        reading = held.enter_context(ExitStack())
        reading.enter_context(kept_from_writers(collections if is_main else ()))
        record = _record(start, settings, collections, never)
        _warn_of_incomplete(collections, record, log)
        if (done := _done(output, record)) is not None:
            log(f"{output} is trained already, with these settings on these answers")
            return done
        work = output.with_name(f".{output.name}.training")
        held.enter_context(_locked(work, is_main))
        if is_main:
            _check_work(work, record)
        parts = divide(
            _of_pair(read_answers(collections), start, tokenizer),
            max_seq_len=max_seq_len,
            share=settings.held_out,
            most_held_out=settings.held_out_tokens,
            never=list(_prompt_ids(never, tokenizer)),
            needs_log_probs=settings.from_log_probs,
        )
        reading.close()
        log(_counted(parts))
        with quiet():
            training = _prepare(start, settings, parts, tokenizer, work, log)
            trainer = make_trainer(training)
            with logged_phase("measuring the draft of the config", log):
                before = _measure_base(training, start)
            resumed = _resumed(trainer, work, is_main, log)
            with logged_phase("training", log):
                _train(trainer, resumed)
            after = _measure_rounded(training, start)
            outcome = Outcome.of(
                before,
                after,
                trainer.state.log_history,
                record={**record, "mask": training.mask},
                data=_data(parts, collections),
                best_step=trainer.state.best_global_step or trainer.state.global_step,
            )
            if is_main:
                _write(training, outcome, start, output)
    return outcome


def is_main_process() -> bool:
    """Returns whether this is the first of the processes that train together, or the only one."""
    return int(os.environ.get("RANK", "0")) == 0


def _ignore(line: str) -> None: ...


def _record(
    start: Start,
    settings: TrainingSettings,
    collections: Sequence[Collection],
    never: Sequence[str],
) -> dict[str, Any]:
    """Returns all that decides the bytes of a trained draft, but for versions of libraries."""
    return {
        "format": 1,
        **start.to_json(),
        "settings": settings.to_json(),
        "answers": [
            {"prompts": c.info.prompts, "settings": c.info.settings, **asdict(c.contents())}
            for c in collections
        ],
        "never": [digest(list(iterate_asked(name))) for name in never],
        "num_processes": int(os.environ.get("WORLD_SIZE", "1")),
    }


def _warn_of_incomplete(
    collections: Sequence[Collection], record: dict[str, Any], log: Log
) -> None:
    for collection, facts in zip(collections, record["answers"], strict=True):
        if not collection.info.is_complete:
            log(
                f"{collection.folder} is not complete: trained is on the {facts['num_answers']:,} "
                "answers so far; the `draft collect` that began it goes on with it"
            )


def _done(output: Path, record: dict[str, Any]) -> Outcome | None:
    """Returns what came of a training that is done; ConfigError where something else is there."""
    if not os.path.lexists(output):
        return None
    try:
        outcome = Outcome.read(output)
    except (OSError, ValueError, TypeError, KeyError) as exc:
        raise ConfigError(
            f"{output} is there and is no draft that was trained, as its {RECORD_NAME} cannot be "
            "read: give an --output that does not exist"
        ) from exc
    known = {key: value for key, value in outcome.record.items() if key != "mask"}
    if differences := setting_differences(known, record):
        raise ConfigError(
            f"{output} was trained otherwise ({'; '.join(differences)}): give another --output"
        )
    return outcome


def _check_work(work: Path, record: dict[str, Any]) -> None:
    """Takes up a training that was interrupted, or begins one."""
    path = work / "settings.json"
    try:
        before = read_object(path)
    except FileNotFoundError:
        write_object(path, record)
        return
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path} cannot be read ({exc}): remove {work} to begin again") from exc
    if differences := setting_differences(before, record):
        raise ConfigError(
            f"{work} holds a training that is not done, with other settings "
            f"({'; '.join(differences)}): give another --output, or remove that folder"
        )


@contextmanager
def _locked(work: Path, is_main: bool) -> Iterator[None]:
    """Keeps a second training out of the folder; removes one in which nothing was begun."""
    if not is_main:
        yield
        return
    work.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(work / "lock", timeout=0):
            try:
                yield
            finally:
                if not any(work.glob("checkpoint-*")):
                    shutil.rmtree(work, ignore_errors=True)
    except Timeout:
        raise ConfigError(f"another training writes to {work}: wait for it, or stop it") from None


def _of_pair(answers: Iterable[Answer], start: Start, tokenizer: Tokenizer) -> Iterator[Answer]:
    """Yields answers; ConfigError for one with an id that the pair does not have."""
    num_rows = start.contract.target_vocab_size
    for answer in answers:
        ids = {*answer.prompt_token_ids, *answer.token_ids}
        unknown = [token_id for token_id in ids if not tokenizer.is_used(token_id)]
        unknown += [i for row in answer.top_log_probs for i, _ in row if i >= num_rows]
        if unknown:
            raise ConfigError(
                f"answer {show(answer.id)} has token id {min(unknown)}, which the target "
                f"{start.target.name} does not have: collect answers of this target"
            )
        yield answer


def _prompt_ids(never: Sequence[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yields prompts as they may be asked: a text alone, and as a user's message."""
    for name in never:
        prompts = list(iterate_asked(name))
        yield from (tokenizer.encode(prompt.text) for prompt in prompts if prompt.text is not None)
        if tokenizer.chat_template is not None:
            for prompt in as_messages(prompts):
                messages = [dict(message) for message in prompt.messages or ()]
                yield tokenizer.encode_messages(messages)


def _counted(parts: Parts) -> str:
    groups = {text.group for text in parts.held_out}
    return (
        f"{parts.num_texts} answers: {len(parts.training)} to train on, {len(parts.held_out)} of "
        f"{len(groups)} groups to measure on; left out: {parts.num_near} as nearly held out, "
        f"{parts.num_too_long} as too long"
    )


def _prepare(
    start: Start,
    settings: TrainingSettings,
    parts: Parts,
    tokenizer: Tokenizer,
    work: Path,
    log: Log,
) -> Training:
    """Loads draft and target, and lays out the steps."""
    device = _device(settings)
    if start.shape is None:
        draft = load_model(start.folder, torch.float32, role="draft")
    else:
        draft = random_model(start.shape, settings.seed, ids_of=start.base.path)
    mask = None
    if settings.parallel is None:
        remove_mask(draft)
    else:
        mask = add_mask(
            draft,
            start.contract,
            num_draft_tokens=settings.parallel,
            mask=settings.mask_token,
            spare=tokenizer.spare_token_ids,
        )
        _check_window(draft, settings)
    if settings.gradient_checkpointing:
        draft.gradient_checkpointing_enable({"use_reentrant": False})
    shared = SharedIds.of(start.contract, mask=mask)
    batches = Batches(
        parts.training,
        num_steps=settings.num_steps,
        num_epochs=settings.num_epochs,
        per_step=settings.accumulate * int(os.environ.get("WORLD_SIZE", "1")),
        batch_tokens=settings.batch_tokens,
        seed=settings.seed,
        padding=shared.ids[0],
        on_prompts=settings.on_prompts,
        with_log_probs=settings.from_log_probs,
    )
    return Training(
        settings=settings,
        student=Student(draft.to(device), shared, LOSSES[settings.loss]),
        shared=shared,
        read_target=_listed(shared, device)
        if settings.from_log_probs
        else _live(start, settings, shared),
        batches=batches,
        held_out=parts.held_out,
        mask=mask,
        end_ids=sorted(tokenizer.end_token_ids),
        folder=work,
        log=log,
    )


def _check_window(draft: Any, settings: TrainingSettings) -> None:
    """Raises ConfigError for texts of which a row of a parallel draft would see too much."""
    window = getattr(draft.config, "sliding_window", None)
    if window is not None and (settings.max_seq_len or 0) > window:
        raise ConfigError(
            f"--max-seq-len {settings.max_seq_len}: a parallel draft is trained on at most "
            f"{window} tokens of a text, the sliding window of its attention"
        )


def _device(settings: TrainingSettings) -> torch.device:
    number = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", number) if settings.device == "cuda" else torch.device("cpu")


def _live(start: Start, settings: TrainingSettings, shared: SharedIds) -> ReadTarget:
    model = load_model(start.target.path, getattr(torch, settings.dtype), role="target")
    target = Target(model.to(_device(settings)), shared)
    return lambda batch, rows: target.read(batch.token_ids, rows)


def _listed(shared: SharedIds, device: torch.device) -> ReadTarget:
    def read(batch: Batch, rows: Tensor) -> ListedScores:
        assert batch.listed_ids is not None and batch.log_probs is not None
        lists = (batch.listed_ids, batch.log_probs)
        return ListedScores(shared, *(moved(of.flatten(0, 1)[rows], device) for of in lists))

    return read


def _measure_base(training: Training, start: Start) -> Measured:
    """Measures the config's draft, as parallel where its config.json says so."""
    draft = load_model(start.base.path, torch.float32, role="draft").to(_device(training.settings))
    return training.measure(draft, getattr(draft.config, MASK_KEY, None))


def _measure_rounded(training: Training, start: Start) -> Measured:
    """Measures the trained draft as it is written: its weights rounded to the dtype of the base."""
    draft = training.student.draft
    round_weights(draft, stored_dtype(start.base.path))
    return training.measure(draft, training.mask)


def _resumed(trainer: DraftTrainer, work: Path, is_main: bool, log: Log) -> str | None:
    """Returns the checkpoint to go on from, the same one in every process."""
    if is_main:
        last_checkpoint(work)
    trainer.accelerator.wait_for_everyone()
    found = last_checkpoint(work)
    if found is None:
        return None
    log(f"going on from {found}")
    return str(found)


def _train(trainer: DraftTrainer, resumed: str | None) -> None:
    try:
        trainer.train(resume_from_checkpoint=resumed)
    except torch.cuda.OutOfMemoryError as exc:
        raise TrainingError(
            f"step {trainer.state.global_step + 1} does not fit in the GPU's memory "
            f"({to_sentence(exc)}): give a smaller --batch-tokens and so much more --accumulate, "
            "or --gradient-checkpointing"
        ) from exc


def _write(training: Training, outcome: Outcome, start: Start, output: Path) -> None:
    """Writes the checkpoint beside its place and moves it there when it is whole."""
    staged = training.folder / "result"
    shutil.rmtree(staged, ignore_errors=True)
    try:
        save_draft(training.student.draft, staged, stored_dtype(start.base.path))
        for path in staged.glob("*.safetensors"):  # which safetensors writes for its user alone
            path.chmod((staged / "config.json").stat().st_mode)
        for name in TOKENIZER_FILES:
            if name != "config.json" and is_there(start.base.path / name):
                copy_file(start.base.path / name, staged / name)
        licences = find_licences("draft", start.base.name, start.base.path)
        for name, path in licences.files.items():
            if name != "README.md":
                copy_file(path, staged / name)
        card = model_card(outcome, licences, name=output.name)
        (staged / "README.md").write_text(card, encoding="utf-8")
        page = training_page(outcome, name=output.name, made_at=datetime.now(timezone.utc))
        (staged / PAGE_NAME).write_text(render(page), encoding="utf-8")
        outcome.write(staged)
        staged.rename(output)
    except Exception as exc:  # safetensors has exceptions of its own
        shutil.rmtree(staged, ignore_errors=True)
        raise TrainingError(
            f"the trained draft cannot be written to {output}: {to_sentence(exc)}; make room and "
            "run the same command, which goes on from the last step"
        ) from exc
    shutil.rmtree(training.folder)


def _data(parts: Parts, collections: Sequence[Collection]) -> dict[str, Any]:
    return {
        "num_texts": parts.num_texts,
        "num_training": len(parts.training),
        "num_held_out": len(parts.held_out),
        "num_held_out_groups": len({text.group for text in parts.held_out}),
        "num_near": parts.num_near,
        "num_too_long": parts.num_too_long,
        "collections": [
            {
                "answered_by": dict(c.info.answered_by),
                "prompts": dict(c.info.prompts),
                "licences": dict(c.info.licences),
                "settings": dict(c.info.settings),
            }
            for c in collections
        ],
    }
