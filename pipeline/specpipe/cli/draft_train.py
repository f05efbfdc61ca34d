"""`specpipe draft train`: a draft made to say what its target says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import click

from specpipe.cli.options import NumberRange, OutputFolder, json_option, load, pair_options
from specpipe.cli.output import print_json, shown
from specpipe.cli.progress import log

_SHARE = NumberRange(min=0, max=1)


@click.command()
@pair_options
@click.option(
    "--answers",
    "answers",
    required=True,
    multiple=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="A folder that `draft collect` wrote; may be given several times.",
)
@click.option("--output", required=True, type=OutputFolder(), help="Folder for the trained draft.")
@click.option(
    "--from",
    "checkpoint",
    metavar="CHECKPOINT",
    help="Train the weights of this folder or hub id; left out: of the config's draft.",
)
@click.option(
    "--shape",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Train random weights of this config.json.",
)
@click.option(
    "--loss",
    type=click.Choice(["forward-kl", "mixed-kl", "total-variation"]),
    default="forward-kl",
    help="What is made small; mixed-kl is forward where the draft is right, else reverse.",
)
@click.option(
    "--on-policy",
    type=_SHARE,
    default=0.0,
    help="Share of the steps whose answers the present draft writes.",
)
@click.option(
    "--from-log-probs",
    is_flag=True,
    help="Learn from the log-probabilities in the answers instead of running the target.",
)
@click.option("--on-prompts", is_flag=True, help="Learn from places within prompts, too.")
@click.option(
    "--parallel",
    type=click.IntRange(min=2, max=64),
    metavar="K",
    help="Train a parallel draft, which proposes K tokens in one pass.",
)
@click.option(
    "--mask-token",
    type=click.IntRange(min=0),
    metavar="ID",
    help="Its mask, as a special token that no text has; left out: the first row above the ids in "
    "use.",
)
@click.option(
    "--keep",
    type=NumberRange(min=0, max=1, min_open=True),
    default=0.7,
    help="Share of its masks that is kept with each further token.",
)
@click.option("--steps", "num_steps", type=click.IntRange(min=1), help="Instead of --epochs.")
@click.option(
    "--epochs",
    "num_epochs",
    type=NumberRange(min=0, min_open=True),
    default=1.0,
    help="How often each answer is read.",
)
@click.option(
    "--batch-tokens",
    type=click.IntRange(min=1),
    default=8192,
    help="Tokens of a batch, padding included.",
)
@click.option(
    "--accumulate", type=click.IntRange(min=1), default=1, help="Batches of a step on each GPU."
)
@click.option(
    "--max-seq-len",
    type=click.IntRange(min=2),
    help="Tokens of a text that are read; left out: as served.",
)
@click.option(
    "--learning-rate", type=NumberRange(min=0, min_open=True), default=5e-4, help="Its peak."
)
@click.option("--weight-decay", type=NumberRange(min=0), default=0.0, help="Of AdamW.")
@click.option(
    "--warmup", type=_SHARE, default=0.03, help="Share of the steps in which the rate rises."
)
@click.option(
    "--evaluate-every",
    type=click.IntRange(min=1),
    default=200,
    metavar="STEPS",
    help="Steps between two evaluations, each of which is saved.",
)
@click.option(
    "--patience",
    type=click.IntRange(min=1),
    help="Stop after so many evaluations without a better one.",
)
@click.option(
    "--held-out-share",
    "held_out",
    type=NumberRange(min=0, max=1, min_open=True, max_open=True),
    default=0.05,
    help="Share of the groups that is held out.",
)
@click.option(
    "--held-out-tokens",
    type=click.IntRange(min=1),
    default=32768,
    help="Tokens of held-out answers that are measured at most.",
)
@click.option(
    "--held-out",
    "never",
    multiple=True,
    metavar="PROMPTS",
    help="A set of prompts that is never trained on: chat, code, summarization, or a file, which "
    "may be a log of requests; may be given several times.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    help="Where to train; auto: on a GPU where there is one.",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    help="What is computed in; auto: bfloat16 on a GPU.",
)
@click.option(
    "--gradient-checkpointing", is_flag=True, help="Compute activations twice to save memory."
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, help="Of all that is drawn.")
@json_option
def train(
    config_path: Path,
    overrides: Sequence[str],
    answers: Sequence[Path],
    output: Path,
    checkpoint: str | None,
    shape: Path | None,
    never: Sequence[str],
    device: Literal["auto", "cpu", "cuda"],
    dtype: Literal["auto", "float32", "bfloat16"],
    as_json: bool,
    **options: Any,
) -> None:
    """Train the draft of a pair for acceptance, on what its target answers.

    The result is an ordinary checkpoint: name it as draft.checkpoint of the YAML. It is the one of
    the evaluations with the longest accepted steps on held-out answers: those to prompts of whole
    files (groups) that are not trained on. What was interrupted goes on with the same command.

    On several GPUs: `accelerate launch -m specpipe draft train …`.
    """
    from specpipe.machine.libraries import require_installed

    require_installed(
        "specpipe draft train", "torch", "transformers", "accelerate", "matplotlib", extra="train"
    )
    if checkpoint is not None and shape is not None:
        raise click.UsageError("--shape has random weights: leave out --from.")
    if options["parallel"] is None and options["mask_token"] is not None:
        raise click.UsageError("--mask-token has no effect without --parallel.")
    if options["from_log_probs"] and (options["on_policy"] or options["on_prompts"]):
        raise click.UsageError(
            "--from-log-probs knows the target's answers alone: leave out --on-policy and "
            "--on-prompts."
        )
    config = load(config_path, overrides)

    import torch

    from specpipe.training.run import is_main_process, train_draft
    from specpipe.training.settings import TrainingSettings

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--device cuda: there is no GPU here that torch can use.")
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    num_draft_tokens = options["parallel"] or max(config.speculation.num_draft_tokens, 1)
    outcome = train_draft(
        config,
        TrainingSettings(**options, device=device, dtype=dtype, num_draft_tokens=num_draft_tokens),
        answers=answers,
        output=output,
        checkpoint=checkpoint,
        shape=shape,
        never=never,
        log=log,
    )
    if not is_main_process():
        return
    if as_json:
        print_json(outcome.to_json())
        return
    for kind, gain in outcome.gains.items():
        click.echo(f"{kind}: {gain}")
    click.echo(shown(output))
