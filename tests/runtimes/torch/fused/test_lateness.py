from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specpipe.runtimes.pair.pair import LateWork
from specpipe.runtimes.torch.fused import attention, lateness
from specpipe.runtimes.torch.fused.lateness import Lateness, note_recording, preparing


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lateness, "_late", lateness._Late())
    monkeypatch.setattr(lateness, "triton", SimpleNamespace())  # as versions before 3.4


def test_what_is_recorded_counts_from_when_a_pair_is_ready(
    caplog: pytest.LogCaptureFixture,
) -> None:
    note_recording("of nobody")
    with preparing():
        note_recording("early")
        first = Lateness()
    assert (first(), caplog.text) == (LateWork(), "")
    note_recording(("rows", 3))
    second = Lateness()
    assert (first(), second()) == (LateWork(num_recordings=1), LateWork())
    assert "launch ('rows', 3) was recorded after the pair was ready" in caplog.text


def test_only_own_kernels_count_and_a_hook_of_others_is_still_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []
    runtime = SimpleNamespace(jit_post_compile_hook=lambda **facts: told.append(facts))
    knobs = SimpleNamespace(runtime=runtime)
    monkeypatch.setattr(lateness, "triton", SimpleNamespace(knobs=knobs))
    work = Lateness()
    Lateness()  # a second pair hooks in no second time
    for module in (attention.__name__, "torch._inductor"):
        facts = {"fn": SimpleNamespace(module=module, name="k"), "key": module}
        runtime.jit_post_compile_hook(**facts)
        assert told.pop() == facts
    assert work() == LateWork(num_compilations=1)
    with preparing():
        runtime.jit_post_compile_hook(fn=SimpleNamespace(module=attention.__name__, name="k"))
    assert work() == LateWork(num_compilations=1)
