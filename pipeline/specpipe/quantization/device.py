"""Where torch computes."""

from __future__ import annotations

from typing import Literal

import torch

from specpipe.errors import RuntimeUnavailable


def choose_device(wanted: Literal["auto", "cpu", "cuda"]) -> str:
    """Returns "cpu" or "cuda"; RuntimeUnavailable where a GPU that is asked for is missing."""
    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise RuntimeUnavailable(
            "engine.device is cuda, but torch sees no GPU here; set engine.device to cpu or auto"
        )
    return ("cuda" if has_gpu else "cpu") if wanted == "auto" else wanted
