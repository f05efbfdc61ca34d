"""Toy tokenizers as real checkpoint files: word-level, byte-level, space-mark and word-piece."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

PAD, BOS, EOS, TURN = range(4)
NUM_WORDS = 250


def words(*, swapped: tuple[int, int] | None = None) -> Tokenizer:
    """T250: word-level, ids 0 to 249: <pad>, <bos>, <eos>, <turn>, then the words w4 to w249.

    It adds <bos> when asked for special tokens. `swapped` exchanges the words of two ids.
    """
    names = ["<pad>", "<bos>", "<eos>", "<turn>", *(f"w{i}" for i in range(4, NUM_WORDS))]
    if swapped:
        first, second = swapped
        names[first], names[second] = names[second], names[first]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>", "<turn>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    return tokenizer


def byte_level(*, merges: tuple[tuple[str, str], ...] = ()) -> Tokenizer:
    """256 byte tokens in the order of their characters, then the merges; no special tokens."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet()) + [left + right for left, right in merges]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


SPACE_MARK_PIECES = ("▁Deep", "▁learning", "▁is", "▁fun", "▁", "▁end", "end", "foo", "\n", "bar")


def space_mark(*, pieces: tuple[str, ...] = SPACE_MARK_PIECES) -> Tokenizer:
    """<unk>, <s>, </s>, 256 byte pieces, then pieces with space marks, as SentencePiece's are.

    The decoder strips one leading space; <s> is added when asked for special tokens.
    """
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = [chr(code) for code in range(33, 127)]
    names = ["<unk>", "<s>", "</s>", *bytes_, *pieces, *(c for c in letters if c not in pieces)]
    scores = [0.0] * 259 + [-1.0] * len(pieces) + [-5.0] * (len(names) - 259 - len(pieces))
    tokenizer = Tokenizer(
        models.Unigram(list(zip(names, scores, strict=True)), unk_id=0, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def word_piece() -> Tokenizer:
    """BERT's kind: pieces inside a word begin with ##."""
    names = [
        "[PAD]",
        "[UNK]",
        "[SEP]",
        "un",
        "##believ",
        "##able",
        "do",
        "not",
        ".",
        "'",
        "it",
        "s",
    ]
    tokenizer = Tokenizer(
        models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[SEP]"])
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer, **settings: Any) -> Path:
    """Writes tokenizer.json, and tokenizer_config.json with the settings; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_words(folder: Path, *, num_rows: int = 256, **config: Any) -> Path:
    """Writes the small files of a checkpoint with T250 and `num_rows` embedding rows."""
    write_tokenizer(folder, words(), bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    write_config(folder, num_rows=num_rows, **config)
    return folder


def write_config(folder: Path, *, num_rows: int = 256, **config: Any) -> None:
    """Writes a config.json that holds what pairing reads."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": num_rows,
        "max_position_embeddings": 512,
        "eos_token_id": EOS,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(config))
