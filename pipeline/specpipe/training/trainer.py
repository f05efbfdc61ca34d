"""transformers' Trainer, for a draft that is to say what its target says.

What is drawn for a step is drawn by the number of its batch, and what is measured decides nothing
of the next, so that a training that goes on from a checkpoint is the unbroken one.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import SequentialSampler
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from specpipe.errors import TrainingError, to_sentence
from specpipe.progress import Count, count
from specpipe.training.acceptance import Measured
from specpipe.training.batches import Batch, Batches
from specpipe.training.measure import ReadTarget, measure, rows_of, scored_rows
from specpipe.training.models import SharedIds, Student, draft_inputs, moved
from specpipe.training.on_policy import write_answers
from specpipe.training.parallel import RowInputs
from specpipe.training.settings import TrainingSettings
from specpipe.training.texts import Text

_METRIC = "acceptance_length"
_WEIGHTS = "model.safetensors"
_LOGGED_EVERY = 10  # steps
_MOST_LINES = 20  # of losses, in all


@dataclass(frozen=True)
class Training:
    """What a trainer works with.

    mask      of a parallel draft; None: the draft proposes one token a pass
    end_ids   those that end a text
    folder    of the checkpoints
    """

    settings: TrainingSettings
    student: Student
    shared: SharedIds
    read_target: ReadTarget
    batches: Batches
    held_out: Sequence[Text]
    mask: int | None
    end_ids: Sequence[int]
    folder: Path
    log: Callable[[str], None]

    def measure(self, draft: Any, mask: int | None) -> Measured:
        """Returns what was counted of a draft on the held-out answers."""
        return measure(
            draft,
            self.shared,
            self.held_out,
            self.read_target,
            num_draft_tokens=self.settings.num_draft_tokens,
            mask=mask,
            batch_tokens=self.settings.batch_tokens,
            with_log_probs=self.settings.from_log_probs,
        )


def last_checkpoint(folder: Path) -> Path | None:
    """Returns the latest whole checkpoint; what a kill left of another is removed.

    The trainer's state is the last file that is written of one.
    """
    whole = []
    for path in folder.glob("checkpoint-*"):
        try:
            whole.append(
                (json.loads((path / "trainer_state.json").read_bytes())["global_step"], path)
            )
        except (OSError, ValueError, KeyError):
            shutil.rmtree(path)
    return max(whole)[1] if whole else None


def make_trainer(training: Training) -> DraftTrainer:
    """Returns the trainer of a training, whose `train` takes what `last_checkpoint` returns."""
    settings = training.settings
    is_cpu = settings.device == "cpu"
    if not is_cpu:
        # cuBLAS has several streams' workspaces otherwise, whose order decides bits (NVIDIA's
        # cuBLAS documentation, "Results Reproducibility").
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Else whatever is allocated is filled first, to show what reads memory before it writes.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    arguments = TrainingArguments(
        output_dir=str(training.folder),
        max_steps=training.batches.num_steps,
        per_device_train_batch_size=1,  # a `Batch`
        gradient_accumulation_steps=settings.accumulate,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": settings.final_rate},
        warmup_steps=round(settings.warmup * training.batches.num_steps),
        bf16=settings.dtype == "bfloat16",
        use_cpu=is_cpu,
        seed=settings.seed,
        eval_strategy="steps",
        eval_steps=settings.evaluate_every,
        save_strategy="steps",
        save_steps=settings.evaluate_every,
        save_total_limit=2,  # the last one, and the best
        load_best_model_at_end=True,
        metric_for_best_model=_METRIC,
        greater_is_better=True,
        logging_steps=_LOGGED_EVERY,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # waits for the GPU; `compute_loss` raises for those
        dataloader_pin_memory=False,  # `moved` does that
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
        log_level="error",
    )
    # Without a launcher, all GPUs here would be given parts of a batch that cannot be parted.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    callbacks: list[TrainerCallback] = [_Steps(training.log)]
    if settings.patience is not None:
        callbacks.append(_Patience(settings.patience))
    trainer = DraftTrainer(training, arguments, callbacks)
    trainer.remove_callback(PrinterCallback)
    return trainer


class DraftTrainer(Trainer):
    """Trains `Student`, and measures its acceptance on the held-out answers."""

    def __init__(
        self, training: Training, arguments: TrainingArguments, callbacks: list[TrainerCallback]
    ) -> None:
        self._training = training
        super().__init__(
            model=training.student,
            args=arguments,
            train_dataset=training.batches,
            eval_dataset=training.held_out,
            data_collator=_only,
            callbacks=callbacks,
        )

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Returns the mean loss of the rows of a batch, each weighted by the chance that it counts.

        A proposal of a parallel draft counts where all before it stand. The Trainer averages over
        the batches of a step, each of which is weighted by its rows.
        """
        batch: Batch = inputs["batch"]
        settings, training = self._training.settings, self._training
        if self._is_on_policy(batch):
            batch = write_answers(
                training.student.draft,
                batch,
                allowed=training.shared.ids,
                end_ids=training.end_ids,
                seed=_seed(settings.seed, batch.number),
            )
        rows = rows_of(
            batch,
            mask=training.mask,
            num_draft_tokens=settings.parallel or 1,
            keep=settings.keep,
            seed=_seed(settings.seed, batch.number),
        )
        selected, at_target = scored_rows(rows, batch)
        is_parallel = training.mask is not None
        losses, overlaps = model(
            draft_inputs(rows, training.student.draft.device, is_parallel=is_parallel),
            selected,
            training.read_target(batch, at_target),
            with_overlap=is_parallel,
        )
        if overlaps is None:
            loss = losses.mean()
        else:
            weights = chances(rows, selected, overlaps)
            loss = (weights * losses).sum() / weights.sum()
        if not math.isfinite(loss.item()):
            raise TrainingError(
                f"the loss of step {self.state.global_step + 1} is {loss.item()}, from which "
                "nothing can be learned: lower --learning-rate, or start from undamaged checkpoints"
            )
        loss = loss * training.batches.weight(batch.number)
        return (loss, None) if return_outputs else loss

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        """Measures the held-out acceptance, which decides which checkpoint is the best."""
        training = self._training
        self._check_weights()
        measured = training.measure(training.student.draft, training.mask)
        metrics: dict[str, Any] = {f"eval_{_METRIC}": measured.acceptance_length}
        self.log({**metrics, "eval_kinds": measured.to_json()})  # type: ignore[dict-item]
        training.log(
            f"step {self.state.global_step} of {self.state.max_steps}: "
            + ", ".join(
                f"{kind} {figures['acceptance_length']:.3f} tokens a step"
                for kind, figures in measured.to_json().items()
            )
        )
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def _check_weights(self) -> None:
        for name, weight in self._training.student.draft.named_parameters():
            if not weight.isfinite().all():
                raise TrainingError(
                    f"after step {self.state.global_step} {name} holds what is no finite number: "
                    "lower --learning-rate or --weight-decay"
                )

    def _is_on_policy(self, batch: Batch) -> bool:
        """Returns whether a step is one whose answers the draft writes, the same on every GPU."""
        settings = self._training.settings
        if not settings.on_policy:
            return False
        step = batch.number // (settings.accumulate * self.args.world_size)
        draw = np.random.default_rng((settings.seed, step, 1)).random()
        return bool(draw < settings.on_policy)

    def _get_train_sampler(self, *arguments: Any) -> SequentialSampler:
        return SequentialSampler(self._training.batches)

    def _save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        try:
            super()._save_checkpoint(*arguments, **options)
        except Exception as exc:  # safetensors has exceptions of its own, torch RuntimeError
            last_checkpoint(self._training.folder)  # removes what was begun
            raise TrainingError(
                f"the state of step {self.state.global_step} cannot be written to "
                f"{self._training.folder}: {to_sentence(exc)}; make room there and run the same "
                "command, which goes on from the state before"
            ) from exc

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        from safetensors.torch import save_model

        assert output_dir is not None
        folder = Path(output_dir)
        folder.mkdir(exist_ok=True)
        save_model(self._training.student.draft, str(folder / _WEIGHTS))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._load(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self._load(Path(self.state.best_model_checkpoint))

    def _load(self, folder: Path) -> None:
        from safetensors.torch import load_model

        load_model(self._training.student.draft, folder / _WEIGHTS)


def chances(rows: RowInputs, selected: Tensor, overlaps: Tensor) -> Tensor:
    """Returns of each of N scored rows the chance that all draft tokens before its own stand.

    overlaps [N]: Σ min(p, q) of each row, the chance that its own does; of anchors, 1 comes back.
    """
    num_rows = rows.depths.shape[1]
    place = selected.new_zeros(rows.depths.numel())
    place[selected] = torch.arange(len(selected))
    previous = selected // num_rows * num_rows + rows.previous_rows.flatten()[selected]
    depths = rows.depths.flatten()[selected]
    before, depths = (moved(values, overlaps.device) for values in (place[previous], depths))
    result = torch.ones_like(overlaps)
    for depth in range(1, int(rows.depths.max()) + 1):
        result = torch.where(depths == depth, result[before] * overlaps[before], result)
    return result


class _Steps(TrainerCallback):
    """Counts steps for whoever shows them; the last one is measured and saved, too.

    The loss is told at fixed steps, of which the first is one.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._shown = count(state.max_steps, "updates")
        self._count: Count = self._shown.__enter__()
        self._count.advance(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._count.advance()
        if state.global_step >= state.max_steps:
            control.should_evaluate = control.should_save = True
        # A logged loss is the mean since the one before, of which a saved state has nothing.
        control.should_log |= control.should_save

    def on_log(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        every = _LOGGED_EVERY * math.ceil(state.max_steps / (_LOGGED_EVERY * _MOST_LINES))
        loss = others["logs"].get("loss")
        if loss is not None and (state.global_step == 1 or state.global_step % every == 0):
            self._tell(f"step {state.global_step} of {state.max_steps}: loss {loss:.4g}")

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._shown.__exit__(None, None, None)


class _Patience(TrainerCallback):
    """Ends training after so many evaluations without a better one.

    It counts them in the saved state, so what goes on from there ends where the unbroken one does.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_training_stop |= self._is_over(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self._is_over(state):  # gone on from where it ended: the Trainer takes one step more
            control.should_training_stop = True
            control.should_evaluate = control.should_save = control.should_log = False

    def _is_over(self, state: Any) -> bool:
        best = state.best_global_step or 0
        steps = (entry["step"] for entry in state.log_history if f"eval_{_METRIC}" in entry)
        num_later: int = sum(step > best for step in steps)
        return num_later >= self._patience


def _only(batches: list[Batch]) -> dict[str, Batch]:
    """Returns the one batch that is read at a time, in a mapping, as the Trainer needs it."""
    (batch,) = batches
    return {"batch": batch}


def _seed(seed: int, number: int) -> int:
    """Returns a seed of its own for each batch of a training."""
    return int(
        np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0] >> np.uint64(1)
    )
