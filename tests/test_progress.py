"""What long work says of itself: every count ends at its total."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from specpipe import progress
from specpipe.build.stages.convert import convert
from specpipe.build.stages.export import export
from specpipe.config.sections import QuantizationConfig
from specpipe.runtimes.torch.build import BuildTorchEngine
from tests.recorder import Recorded, Recorder

TARGET = Path(__file__).parents[1] / "models" / "python-code" / "target"


def recorded(work: Callable[[], object]) -> list[Recorded]:
    recorder = Recorder()
    with progress.shown(recorder), progress.phase("target"):
        work()
    return recorder.counts


def test_without_a_display_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.phase("x"):
        assert list(progress.counted("abc", 3, "layers")) == ["a", "b", "c"]
    assert capsys.readouterr() == ("", "")


def test_the_display_is_the_former_one_again_after_a_failure() -> None:
    outer = Recorder()
    with progress.shown(outer):
        with pytest.raises(RuntimeError), progress.shown(Recorder()):
            raise RuntimeError
        assert list(progress.counted("ab", 2, "texts")) == ["a", "b"]
    assert outer.counts == [Recorded("", "texts", 2, 2)]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_conversion_and_the_engine_count_their_bytes(tmp_path: Path, tp_size: int) -> None:
    """Whatever the number of ranks: a row is read once."""
    pytest.importorskip("torch")
    unified, engine = tmp_path / "unified", tmp_path / "engine"
    unified.mkdir()
    engine.mkdir()
    attention, mlp = (4 + 2 * 2 + 4) * 64 * 256, 3 * 704 * 256
    layer = attention + mlp + 2 * 256
    num_bytes = 2 * (2 * 4096 * 256 + 6 * layer + 256)  # of bfloat16; the embedding is the head
    converted = recorded(lambda: convert(TARGET, unified, tp_size=tp_size))
    assert converted == [Recorded("target", "bytes", num_bytes, num_bytes)]
    built = recorded(
        lambda: BuildTorchEngine(
            role="target",
            checkpoint=unified,
            max_batch_size=1,
            max_seq_len=64,
            max_draft_len=0,
            max_num_tokens=64,
        ).run(engine)
    )
    size = (engine / "model.safetensors").stat().st_size
    (count,) = built
    assert (count.unit, count.done) == ("bytes", count.total)
    assert 0 <= size - count.done < 16_384  # the header


def test_export_counts_its_bytes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    scheme = QuantizationConfig(format="fp8_pc_pt")
    (count,) = recorded(lambda: export(TARGET, None, tmp_path, scheme))
    assert (count.unit, count.done) == ("bytes", count.total)
    assert 0 <= (tmp_path / "model.safetensors").stat().st_size - count.done < 16_384
