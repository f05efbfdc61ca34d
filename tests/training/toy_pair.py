"""A target whose next word follows from the word before it, a draft that knows nothing, answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specpipe.text.tokenizer import Tokenizer
from specpipe.training.collection import Answer, CollectionInfo, tokenizer_digest
from specpipe.training.collection_writer import open_writer
from tests.toy import toy_config, toy_tensors, write_tensors, write_toy_checkpoint
from tests.toy_tokenizers import NUM_WORDS, words, write_tokenizer

VOCAB_SIZE = 256
NUM_GROUPS = 20
_ROLES = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
_SUCCESSORS = np.random.default_rng(5).permutation(np.arange(4, NUM_WORDS))


def successor(token_id: int) -> int:
    """Returns the word that follows most likely."""
    return int(_SUCCESSORS[token_id - 4])


def write_pair(folder: Path, *, draft_rows: int = VOCAB_SIZE) -> Path:
    """Writes draft/, target/ and pair.yaml; returns the latter."""
    config = toy_config(dtype="float32")
    tensors = toy_tensors(config)
    for name in tensors:
        # Without what its layers add, the target's head reads the embedding of the last word.
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros_like(tensors[name])
    embedding = np.random.default_rng(3).standard_normal((VOCAB_SIZE, 32)).astype(np.float32)
    head = np.zeros_like(embedding)
    for token_id in range(4, NUM_WORDS):
        head[successor(token_id)] = 0.25 * embedding[token_id]
    tensors["model.embed_tokens.weight"] = embedding.view(np.uint32)
    tensors["lm_head.weight"] = head.view(np.uint32)
    write_toy_checkpoint(folder / "target", dtype="float32")
    (folder / "target" / "model.safetensors").unlink()
    write_tensors(folder / "target" / "model.safetensors", tensors, dtype="F32")
    write_toy_checkpoint(folder / "draft", seed=1, dtype="float32", vocab_size=draft_rows)
    for role in ("draft", "target"):
        write_tokenizer(folder / role, words(), **_ROLES)
    (folder / "pair.yaml").write_text(
        "name: toy\n"
        "draft: {checkpoint: draft}\n"
        "target: {checkpoint: target}\n"
        "speculation: {num_draft_tokens: 3}\n"
        "engine: {runtime: torch, max_seq_len: 64, device: cpu}\n"
    )
    return folder / "pair.yaml"


def target_probs() -> npt.NDArray[np.float64]:
    """Returns the chance of each next word after each word, [V, V], as the target has it."""
    embedding = np.random.default_rng(3).standard_normal((VOCAB_SIZE, 32)).astype(np.float32)
    norm = toy_tensors(toy_config(dtype="float32"))["model.norm.weight"].view(np.float32)
    hidden = embedding / np.sqrt((embedding**2).mean(-1, keepdims=True) + 1e-5) * norm
    logits = np.full((VOCAB_SIZE, VOCAB_SIZE), 0.0)
    for token_id in range(4, NUM_WORDS):
        logits[:, successor(token_id)] = 0.25 * hidden @ embedding[token_id]
    logits[:, NUM_WORDS:] = -np.inf
    exp = np.exp(logits - logits.max(-1, keepdims=True))
    probs: npt.NDArray[np.float64] = exp / exp.sum(-1, keepdims=True)
    return probs


def write_answers(folder: Path, pair: Path, *, num_top: int = 0, **info: Any) -> Path:
    """Writes a collection of greedy and sampled answers to two prompts of each group."""
    probs = target_probs()
    generator = np.random.default_rng(11)
    tokenizer = Tokenizer.load(pair.parent / "target")
    fields: dict[str, Any] = {
        "answered_by": {"pair": "toy"},
        "tokenizer_digest": tokenizer_digest(tokenizer),
        "settings": {"temperatures": [0.0, 1.0]},
        "prompts": {"source": "toy.jsonl", "digest": "ab"},
        "licences": {"prompts": "CC0-1.0"},
    }
    with open_writer(folder, CollectionInfo(**{**fields, **info})) as writer:
        for group in range(NUM_GROUPS):
            for number, temperature in enumerate((0.0, 1.0)):
                prompt = (1, *map(int, generator.integers(4, NUM_WORDS, size=3)))
                token_ids: list[int] = []
                last = prompt[-1]
                for _ in range(24):
                    chances = probs[last]
                    greedy = int(chances.argmax())
                    last = int(generator.choice(VOCAB_SIZE, p=chances)) if temperature else greedy
                    token_ids.append(last)
                rows = [probs[before] for before in (prompt[-1], *token_ids[:-1])]
                writer.add(
                    Answer(
                        id=f"{group}-{number}",
                        prompt_token_ids=prompt,
                        token_ids=tuple(token_ids),
                        finish_reason="length",
                        sampling={"temperature": temperature},
                        group=f"file{group}.py",
                        top_log_probs=tuple(_likeliest(row, num_top) for row in rows)
                        if num_top
                        else (),
                    )
                )
        writer.save(is_complete=True)
    return folder


def _likeliest(probs: npt.NDArray[np.float64], count: int) -> tuple[tuple[int, float], ...]:
    order = np.argsort(-probs)[:count]
    return tuple((int(i), float(np.log(probs[i]))) for i in order)


def read_config(folder: Path) -> dict[str, Any]:
    """Returns config.json of a checkpoint."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config
