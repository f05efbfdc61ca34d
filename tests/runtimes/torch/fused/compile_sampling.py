"""Compiles the kernels that draw tokens as compile_kernels.py does the others; prints JSON.

Run by test_drawing.py in a process of its own.
"""

from __future__ import annotations

import json
import sys

import torch

from specpipe.runtimes.torch.fused.drawing import Drawing, Mode, Settings, Text
from specpipe.speculative.noise import Purpose
from tests.runtimes.torch.fused import compile_kernels

_META = torch.device("meta")
_TYPES = {torch.int64: "*i64", torch.float64: "*fp64"}

MODES = [
    Mode(rejects=True, has_top_k=True, has_top_p=True),
    Mode(rejects=False, has_top_k=False, has_top_p=True),
    Mode(rejects=False, has_top_k=False, has_top_p=False),
]
"""They have every step of `narrow`, and both forms of what has two."""


def launches_of(model: str) -> list[compile_kernels.Launch]:
    """What rounds of five draft tokens launch behind their heads, each kernel in each form once."""
    decoder = compile_kernels.recording_decoder(model)
    is_unused = torch.empty(decoder.config.vocab_size, dtype=torch.uint8, device=_META)
    settings = Settings(_META)
    integers = torch.empty(128, dtype=torch.int32, device=_META)
    text = Text(integers, integers, first=96)
    draft, target = (
        Drawing(decoder, settings, text, is_unused, num_rows=num_rows) for num_rows in (5, 6)
    )
    for mode in MODES:
        target.draw(mode, Purpose.RECOVERED, first_row=0, num_rows=6)
        draft.propose(0)
        target.accept(draft, mode, integers, 5)
    forms: dict[object, compile_kernels.Launch] = {}
    for launch in decoder.launches:
        forms.setdefault((launch.kernel.__name__, tuple(launch.constants.items())), launch)
    return list(forms.values())


if __name__ == "__main__":
    model, capability = sys.argv[1:]
    compile_kernels._TYPES.update(_TYPES)
    print(
        json.dumps(
            [
                compile_kernels.facts(launch.kernel.__name__, launch, int(capability))
                for launch in launches_of(model)
            ]
        )
    )
