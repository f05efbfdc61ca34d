"""What `specpipe quickstart --runtime` sets, by what a machine has."""

from __future__ import annotations

import importlib.util

import pytest

from specpipe.build.quickstart import settings_here
from specpipe.errors import RuntimeUnavailable
from specpipe.machine.libraries import with_extras
from specpipe.runtimes.tensorrt import library
from tests.fake_nvml import Device, be

pytest.importorskip("torch")
pytest.importorskip("scipy")


def test_torch_runs_anywhere() -> None:
    assert settings_here("torch") == {"name": "python-code-torch", "engine.runtime": "torch"}


@pytest.mark.parametrize(
    ("installed", "device", "chosen"),
    [
        ({"tensorrt_rtx", "tensorrt"}, Device("NVIDIA L4", (8, 9)), "tensorrt_rtx"),
        ({"tensorrt_rtx", "tensorrt"}, Device(), "tensorrt"),
        ({"tensorrt"}, Device("NVIDIA L4", (8, 9)), "tensorrt"),
    ],
    ids=["RTX", "H100", "one library"],
)
def test_tensorrt_takes_the_library_that_the_gpu_runs(
    monkeypatch: pytest.MonkeyPatch, installed: set[str], device: Device, chosen: str
) -> None:
    monkeypatch.setattr(library, "is_installed", lambda name: name in installed)
    be(monkeypatch, device)
    assert settings_here("tensorrt") == {
        "name": "python-code-tensorrt",
        "engine.runtime": "tensorrt",
        "engine.library": chosen,
    }


def test_the_verification_needs_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "scipy" else find_spec(name)
    )
    with pytest.raises(RuntimeUnavailable) as caught:
        settings_here("torch")
    assert str(caught.value) == f"the verification needs 'scipy': {with_extras('evaluate')}"
