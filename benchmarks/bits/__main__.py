"""Asks a pair on a GPU many things at once, and checks that nobody notices.

    python -m benchmarks.bits
    python -m benchmarks.bits --pair 7b+0.4b --number 300 --streams 32 --seed 7
    python -m benchmarks.bits --seed 7 --only 12,17,40
    python -m benchmarks.bits --number 500 --shortage --prefixes

Requests join, leave and are cancelled at random; draft lengths from 0 to 8 and adaptive ones,
greedy, seeded and unseeded sampling, log-probabilities, penalties, guides and stop strings meet in
one pair. What each greedy or seeded one is told (token ids, text, float32 log-probabilities) must
be, bit for bit, what it is told alone and without draft tokens. Unseeded ones must be sound. At the
end the pair must have all of its room again. With --shortage it has KV memory for half of what so
many requests want, so some give way to others and are computed anew; with --prefixes most prompts
begin as others do, and what is cached of that is reused, but for lone runs.

The seed decides who is asked what, and before which step; what an adaptive request drafts depends
on times. For a fault there is a line about the request and one for each that was told something in
the same steps; --only runs a part of the requests, at the same steps, to find out whom it takes.

Exit code 1 if there was one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.bits.asked import Asked, ask, only
from benchmarks.bits.pairs import MODELS, fused_pair, source_material
from benchmarks.bits.trial import try_pair
from benchmarks.command import require_device, run_command
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.torch.fused_sizes import PAGE, pages_of, spare_positions
from specpipe.text.tokenizer import Tokenizer


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    require_device(arguments.device, interprets=True)
    options = PairOptions(
        num_draft_tokens=arguments.num_draft_tokens,
        adaptive=not arguments.fixed,
        prompt_lookup=not arguments.fixed,
        max_batch_size=arguments.streams,
        max_seq_len=arguments.max_prompt_tokens + arguments.max_tokens,
        max_num_tokens=arguments.max_num_tokens,
    )
    device = torch.device(arguments.device)
    tokenizer = Tokenizer.load(MODELS / "target")
    start = time.perf_counter()
    material = source_material(
        tokenizer,
        num_questions=max(arguments.number // 2, 1),
        max_prompt_tokens=arguments.max_prompt_tokens,
        max_tokens=arguments.max_tokens,
        max_num_draft_tokens=arguments.num_draft_tokens,
        num_prefixes=arguments.prefixes,
    )
    asked = ask(arguments.seed, arguments.number, material)
    kv_cache_tokens = None
    if arguments.shortage is not None:
        kv_cache_tokens = _tokens(asked, options, arguments.shortage)
        print(f"KV caches of {kv_cache_tokens} tokens")
    pair = fused_pair(
        arguments.pair,
        options,
        tokenizer,
        device=device,
        dtype=getattr(torch, arguments.dtype),
        kv_cache_tokens=kv_cache_tokens,
        draft=arguments.draft,
    )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    print(
        f"{arguments.pair or 'small pair'}, {arguments.dtype}, {arguments.streams} streams, seed "
        f"{arguments.seed}; {name}, torch {torch.__version__}: ready after "
        f"{time.perf_counter() - start:.1f} s",
        flush=True,
    )
    if arguments.only is not None:
        asked = only(asked, arguments.only)
    start = time.perf_counter()
    outcome = try_pair(pair, asked, vocab_size=material.vocab_size, max_waiting=arguments.waiting)
    seconds = time.perf_counter() - start
    print(f"{len(outcome.faults)} of {len(asked)} requests are wrong, after {seconds:.1f} s")
    print(outcome.report(arguments.most_shown))
    if arguments.json is not None:
        faults = [{"request": f.request_id, "what": f.what} for f, _ in outcome.faults]
        found = {**outcome.counts(), "faults": faults, "of_pair": outcome.of_pair}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(not outcome.is_right)


def _tokens(asked: Sequence[Asked], options: PairOptions, share: float) -> int:
    """Returns a share of the tokens that those that run at once have at their ends, on average."""
    lengths = [len(a.request.prompt_token_ids) + a.request.max_tokens for a in asked]
    wanted = options.max_batch_size * sum(lengths) / len(lengths)
    alone = options.max_seq_len + spare_positions(options.num_draft_tokens)
    return PAGE * max(round(share * wanted / PAGE), pages_of(alone))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--pair", metavar="TARGET+DRAFT", help="sizes as inflate.py has them; default: small"
    )
    parser.add_argument(
        "--draft",
        type=Path,
        default=MODELS / "draft",
        help="a checkpoint folder, of a parallel draft, too; default: the small pair's",
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--number", type=int, default=300, help="of requests; default: 300")
    parser.add_argument("--seed", type=int, default=23)
    parser.add_argument("--streams", type=int, default=32, help="that run at most; default: 32")
    parser.add_argument("--waiting", type=int, default=16, help="that wait at most; default: 16")
    parser.add_argument("--num-draft-tokens", type=int, default=8, help="at most; default: 8")
    parser.add_argument(
        "--shortage",
        type=float,
        nargs="?",
        const=0.5,
        metavar="SHARE",
        help="of the KV memory that so many requests want; alone: 0.5",
    )
    parser.add_argument(
        "--prefixes",
        type=int,
        nargs="?",
        const=4,
        default=0,
        metavar="NUMBER",
        help="of texts that most prompts begin with; alone: 4",
    )
    parser.add_argument("--fixed", action="store_true", help="draft lengths do not adapt")
    parser.add_argument("--max-prompt-tokens", type=int, default=600)
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer; default: 64")
    parser.add_argument("--max-num-tokens", type=int, default=256, help="of a prompt, in a step")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), metavar="IDS", help="ask only these requests"
    )
    parser.add_argument("--most-shown", type=int, default=20, help="faults in full; default: 20")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write counts and faults")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_command(main)
