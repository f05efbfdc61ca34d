"""Engine folders that TensorRT-LLM's packaging reads as its own, and the stand-in can run."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specpipe.build.stages.convert import convert
from specpipe.build.stages.package import models_folder
from specpipe.checkpoints.unified import load_unified
from specpipe.roles import Role
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.pair_file import PairFile
from specpipe.runtimes.repository_layout import link_folder
from specpipe.runtimes.torch.build import BuildTorchEngine
from specpipe.triton import repository
from specpipe.triton.server.installation import TritonBinary, find_tritonserver
from tests.runtimes.tensorrt_llm.engines.folders import pair_options, write_engine

CHECKPOINTS = Path(__file__).parents[3] / "models" / "python-code"
MAX_SEQ_LEN, MAX_DRAFT_LEN, MAX_BATCH_SIZE = 512, 8, 8


def write_runnable_engine(folder: Path, role: Role, **changes: Any) -> Path:
    """An engine of the quickstart pair; `changes` are to its config.json."""
    checkpoint = folder.with_name(f"{folder.name}-checkpoint")
    checkpoint.mkdir(parents=True)
    convert(CHECKPOINTS / role, checkpoint)
    max_draft_len = MAX_DRAFT_LEN if role == "target" else 0
    limits = {"max_seq_len": MAX_SEQ_LEN + max_draft_len, "max_draft_len": max_draft_len}
    vocab_size = load_unified(checkpoint).config.vocab_size
    write_engine(
        folder, role, vocab_size=vocab_size, max_batch_size=MAX_BATCH_SIZE, **limits, **changes
    )
    write_torch_engine(
        folder, checkpoint, role, dtype="float32", max_batch_size=MAX_BATCH_SIZE, **limits
    )
    return folder


def write_torch_engine(folder: Path, checkpoint: Path, role: Role, **options: Any) -> None:
    """Puts into an engine's folder what the stand-in runs in its place."""
    (folder / "torch").mkdir()
    BuildTorchEngine(
        role=role, checkpoint=checkpoint, max_num_tokens=256, device="cpu", **options
    ).run(folder / "torch")


def write_built_engine(folder: Path, config: Mapping[str, Any], command_line: list[str]) -> None:
    """Makes runnable what the stand-in for trtllm-build builds, whose FAKE_EDIT may call this."""
    checkpoint = command_line[command_line.index("--checkpoint_dir") + 1]
    build, model = config["build_config"], config["pretrained_config"]
    write_torch_engine(
        folder,
        Path(checkpoint),
        "target" if build["max_draft_len"] else "draft",
        dtype=model["dtype"],
        max_batch_size=build["max_batch_size"],
        max_draft_len=build["max_draft_len"],
        # trtllm-build adds the draft tokens, beyond what the torch runtime takes positions for.
        max_seq_len=min(build["max_seq_len"], model["max_position_embeddings"]),
    )


def write_repository(
    out: Path, *, acceptance: str = "exact", adaptive: bool = False, **options: Any
) -> Path:
    """The repository as packaging writes it, around two such engines."""
    changes = {"gather_generation_logits": acceptance == "logits"}
    engines: dict[str, Path] = {
        f"{role}_engine": write_runnable_engine(
            out.with_name(f"{out.name}-{role}"),
            role,  # type: ignore[arg-type]
            **changes,
        )
        for role in ("draft", "target")
    }
    planned = pair_options(acceptance=acceptance)
    pair: PairOptions = replace(
        planned,
        num_draft_tokens=MAX_DRAFT_LEN,
        adaptive=adaptive,
        max_batch_size=MAX_BATCH_SIZE,
        max_seq_len=MAX_SEQ_LEN,
        **options,
    )
    out.mkdir()
    repository.write(
        out,
        models=models_folder(),
        tokenizer=CHECKPOINTS / "target",
        pair=PairFile("tensorrt_llm", pair),
        **engines,
    )
    return out


def triton_with_stand_in(folder: Path) -> TritonBinary | None:
    """This machine's Triton with the stand-in among its backends, which are gathered in `folder`.

    None where Triton has its backends in a place of its own.
    """
    binary = find_tritonserver()
    if binary.backends is None:
        return None
    # Not links: Triton wants the library of a Python-based backend to lie in `python` itself.
    link_folder(binary.backends / "python", folder / "python")
    if binary.python_stub is not None:
        shutil.copy(binary.python_stub, folder / "python")
    (folder / "tensorrtllm").symlink_to(Path(__file__).parent)
    return replace(binary, backends=folder, python_stub=None)
