"""Compiles the kernels that draw tokens as compile_kernels.py does the others; prints JSON.

Run by test_drawing.py in a process of its own.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch

from specpipe.runtimes.torch.fused.drawing import Drawing, Settings
from specpipe.runtimes.torch.fused.streams import Members, Streams
from specpipe.runtimes.torch.round_sizes import Form
from tests.runtimes.torch.fused import compile_kernels

_META = torch.device("meta")
_TYPES = {torch.int64: "*i64", torch.float64: "*fp64"}


def launches_of(model: str) -> list[compile_kernels.Launch]:
    """What a round launches behind its heads, each kernel in each form once."""
    decoder = compile_kernels.recording_decoder(model)
    is_unused = torch.empty(decoder.config.vocab_size, dtype=torch.uint8, device=_META)
    settings = Settings(2, _META)
    integers = torch.empty(2, dtype=torch.int32, device=_META)
    texts = torch.empty(2, 128, dtype=torch.int32, device=_META)
    streams = Streams(history=texts, last=integers, draft_slots=integers)
    members = Members(integers, integers, integers, most=5)
    draft, target = (Drawing(decoder, settings, streams, is_unused) for _ in range(2))
    draft.draw_draft(members, Form.CUT_TWICE, 0)
    target.draw(members, Form.CUT_TWICE)
    for is_parallel in (False, True):
        target.accept(draft, replace(members, is_parallel=is_parallel), texts)
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
