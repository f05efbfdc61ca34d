"""The target's own logits, from its engine or, where that was changed, from its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from specpipe.config.sections import PipelineConfig  # noqa: E402
from specpipe.evaluate.verification.block_shapes import measure_block_difference  # noqa: E402
from specpipe.evaluate.verification.scorer import ScoredText, open_scorer, rows_of, torch_engine  # noqa: E402

Copy = Callable[..., PipelineConfig]

TEXTS = [
    ScoredText(prompt=(5, 900, 77, 12), output=tuple(range(100, 130)), max_tokens=40),
    ScoredText(prompt=tuple(range(300, 600)), output=(8, 9, 10), max_tokens=40),
    ScoredText(prompt=(5,), output=(), max_tokens=40),
]


def change_weights(engine: Path) -> None:
    """Doubles what one matrix says, in a file of its own."""
    from safetensors.torch import load_file, save_file

    path = engine / "model.safetensors"
    tensors = load_file(path)
    name = next(n for n, t in tensors.items() if t.ndim == 2 and "layers.1." in n)
    tensors[name] = tensors[name] * 2.0
    path.unlink()
    save_file(tensors, path)


def test_rows_are_those_of_transformers(copied: Copy) -> None:
    transformers = pytest.importorskip("transformers")
    config = copied()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        config.base_dir / config.target.checkpoint, dtype=torch.float32
    )
    with open_scorer(config) as scorer:
        assert scorer.dtype == "float32"
        for text in TEXTS:
            rows = rows_of(scorer, text)
            with torch.no_grad():
                logits = model(torch.tensor([[*text.prompt, *text.output]])).logits[0]
            expected = logits[len(text.prompt) - 1 :].double().numpy()
            used = np.isfinite(rows)
            assert rows.shape == (len(text.output) + 1, 4096)
            np.testing.assert_allclose(rows[used], expected[used], atol=2e-4)


def test_block_shapes_differ_by_little_in_float32_and_more_in_bfloat16(copied: Copy) -> None:
    config = copied()
    with open_scorer(config) as scorer:
        single = measure_block_difference(scorer, TEXTS, [2, 5])
    with open_scorer(config, dtype="bfloat16") as scorer:
        assert scorer.dtype == "bfloat16"
        half = measure_block_difference(scorer, TEXTS, [2, 5])
    assert 0.0 < single.value < 1e-4
    assert 1e-3 < half.value < 1.0
    # 31 + 4 rows, each in two block sizes and together, 99 tokens beside the best one.
    assert single.num_compared == 35 * 3 * 99


def test_no_text_to_measure_on_is_no_difference(copied: Copy) -> None:
    with open_scorer(copied()) as scorer:
        found = measure_block_difference(scorer, [TEXTS[2]], [2])
    assert (found.value, found.num_compared) == (0.0, 0)


def test_the_engine_is_used_as_long_as_it_is_what_was_built(copied: Copy, tmp_path: Path) -> None:
    config = copied()
    engine = config.artifacts_dir / "target" / "engine"
    assert torch_engine(config, "target", tmp_path) == engine
    with open_scorer(config) as scorer:
        right = rows_of(scorer, TEXTS[0])
    change_weights(engine)
    assert torch_engine(config, "target", tmp_path) == tmp_path / "target" / "engine"
    with open_scorer(config) as scorer:
        np.testing.assert_array_equal(rows_of(scorer, TEXTS[0]), right)
    assert [p.name for p in config.artifacts_dir.iterdir() if p.name.startswith(".scorer")] == []


def test_a_checkpoint_that_was_not_converted_is_converted(copied: Copy, tmp_path: Path) -> None:
    """As with a backend that reads Hugging Face checkpoints as they are."""
    config = copied()
    with open_scorer(config) as scorer:
        right = rows_of(scorer, TEXTS[0])
    for folder in ("checkpoint", "engine"):
        path = config.artifacts_dir / "target" / folder / "config.json"
        path.write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with open_scorer(config, dtype="float32") as scorer:
        np.testing.assert_array_equal(rows_of(scorer, TEXTS[0]), right)
