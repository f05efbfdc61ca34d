"""What the door for OpenAI's clients costs: its own processor time, and throughput beside gRPC.

    python benchmarks/gateway.py --config configs/quickstart.yaml
    python benchmarks/gateway.py --config configs/quickstart.yaml --url grpc://127.0.0.1:8001
    python benchmarks/gateway.py --config my.yaml --stand-in

A door of its own (`specpipe gateway`) stands before a Triton that serves the built pair: one that
this script starts, one that runs already (--url), or, where there is no Triton, the pair in a
process that speaks Triton's gRPC protocol (--stand-in: triton_stand_in.py says what that is not).

The same greedy answers are asked for over gRPC, as the door does it, and through the door, in turn
and round by round, by one client process; 1, 8 and 32 at once, streamed and whole. A ratio is that
of the sums over all rounds. The door's processor time is that of /proc/PID/stat, all threads and
both kinds of time, by the chunks that the client received. On a machine with few cores, client,
door, Triton and models share them, and what the door takes is lost to the others.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from command import cpu_name, run_command
from measure import PROMPTS, QUICKSTART, read_prompts

from specpipe.build.load import load_config
from specpipe.build.repositories import built_repository
from specpipe.gateway.triton_upstream import TritonUpstream
from specpipe.triton.server import launcher

_START_TIME_S = 120.0
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass
class Load:
    """What some answers came to; added up over rounds."""

    num_tokens: int = 0
    num_chunks: int = 0
    num_answers: int = 0
    seconds: float = 0.0
    door_cpu_s: float = 0.0

    def add(self, other: Load) -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.seconds


def main() -> None:
    arguments = parse_arguments()
    config = load_config(arguments.config)
    prompts = [prompt.prompt for prompt in read_prompts(arguments.prompts)]
    with contextlib.ExitStack() as running:
        url = arguments.url
        if arguments.stand_in:
            url = running.enter_context(_stand_in(built_repository(config)))
        elif url is None:
            url = running.enter_context(launcher.running(built_repository(config))).grpc_url
        address, process = running.enter_context(_door(arguments.config, url))
        behind = "a stand-in for Triton" if arguments.stand_in else "Triton"
        print(f"{config.name} behind {behind}, {cpu_name()}, {os.cpu_count()} cores")
        bench = Bench(url, address, process.pid, config.name, prompts, arguments.max_tokens)
        found = asyncio.run(bench.run(arguments.streams, arguments.rounds, arguments.answers))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


class Bench:
    """One pair, asked over gRPC and through the door."""

    def __init__(
        self,
        url: str,
        address: tuple[str, int],
        pid: int,
        model: str,
        prompts: list[str],
        max_tokens: int,
    ) -> None:
        self._url, self._address, self._pid, self._model = url, address, pid, model
        self._prompts, self._max_tokens = prompts, max_tokens

    async def run(self, streams: list[int], num_rounds: int, num_answers: int) -> list[Any]:
        """Prints a line for each load, and returns all figures."""
        upstream = TritonUpstream(self._url)
        print(f"{'streams':>7} {'':8} {'gRPC':>9} {'door':>9} {'ratio':>6} {'door’s own time':>16}")
        found = []
        for streamed in (True, False):
            for at_once in streams:
                direct, door = Load(), Load()
                await self._load(self._through_door, at_once, at_once, streamed)  # warms both
                for round_number in range(num_rounds):
                    # Each begins as often as the other.
                    for is_door in (False, True) if round_number % 2 else (True, False):
                        ask = self._through_door if is_door else self._direct
                        before = _cpu_seconds(self._pid)
                        done = await self._load(
                            ask, max(num_answers, at_once), at_once, streamed, upstream
                        )
                        done.door_cpu_s = _cpu_seconds(self._pid) - before
                        (door if is_door else direct).add(done)
                per = door.num_chunks if streamed else door.num_answers
                own_ms = 1e3 * door.door_cpu_s / per
                kind = "streamed" if streamed else "whole"
                print(
                    f"{at_once:7} {kind:8} {direct.rate:7.0f}/s {door.rate:7.0f}/s"
                    f" {door.rate / direct.rate:6.3f} {own_ms:7.3f} ms"
                    f" {'a chunk' if streamed else 'an answer'}",
                    flush=True,
                )
                found.append(
                    {
                        "streams": at_once,
                        "streamed": streamed,
                        "grpc": asdict(direct),
                        "door": asdict(door),
                        "ratio": door.rate / direct.rate,
                        "door_ms": own_ms,
                    }
                )
        await upstream.close()
        return found

    async def _load(
        self,
        ask: Any,
        num_answers: int,
        at_once: int,
        streamed: bool,
        upstream: TritonUpstream | None = None,
    ) -> Load:
        """Asks for some answers, so many at once."""
        load = Load(num_answers=num_answers)
        prompts = iter([self._prompts[i % len(self._prompts)] for i in range(num_answers)])
        start = time.perf_counter()
        await asyncio.gather(*(ask(prompts, streamed, load, upstream) for _ in range(at_once)))
        load.seconds = time.perf_counter() - start
        return load

    async def _direct(
        self, prompts: Iterator[str], streamed: bool, load: Load, upstream: TritonUpstream
    ) -> None:
        for prompt in prompts:
            inputs = {"text_input": prompt, "max_tokens": self._max_tokens, "stream": streamed}
            chunks = [chunk async for chunk in upstream.answer({**inputs, "ignore_eos": True})]
            assert chunks[-1].statistics is not None
            load.num_chunks += len(chunks)
            load.num_tokens += chunks[-1].statistics.num_output_tokens

    async def _through_door(
        self, prompts: Iterator[str], streamed: bool, load: Load, _: object = None
    ) -> None:
        """Speaks HTTP by hand: what a client's library does with a chunk is not the door's."""
        reader, writer = await asyncio.open_connection(*self._address)
        for prompt in prompts:
            asked: dict[str, Any] = {
                "model": self._model,
                "prompt": prompt,
                "max_tokens": self._max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": streamed,
            }
            if streamed:
                asked["stream_options"] = {"include_usage": True}
            body = json.dumps(asked).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: door\r\nContent-Length: {len(body)}\r\n"
            writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            events = await (_read_stream(reader) if streamed else _read_whole(reader))
            load.num_chunks += len(events) - 1  # the last one is the usage
            load.num_tokens += json.loads(events[-1])["usage"]["completion_tokens"]
        writer.close()
        await writer.wait_closed()


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"the door answers {head.decode()}{(await reader.read(500)).decode()}")
    return head.lower()


async def _read_whole(reader: asyncio.StreamReader) -> list[bytes]:
    head = await _read_head(reader)
    length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
    return [b"", await reader.readexactly(length)]


async def _read_stream(reader: asyncio.StreamReader) -> list[bytes]:
    """Returns the events but for `[DONE]`."""
    await _read_head(reader)
    parts = []
    while size := int(await reader.readline(), 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    await reader.readline()
    lines = b"".join(parts).splitlines()
    events = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    return events[:-1]


@contextlib.contextmanager
def _door(config: Path, url: str) -> Iterator[tuple[tuple[str, int], subprocess.Popen[str]]]:
    arguments = ("gateway", "--config", str(config), "--url", url)
    settings = ("--listen", "127.0.0.1:0", "--no-access-log")
    command = [sys.executable, "-m", "specpipe", *arguments, *settings]
    with _child(command, "ready: ") as (process, line):
        host, _, port = line.strip().rpartition("/")[2].rpartition(":")
        yield (host, int(port)), process


@contextlib.contextmanager
def _stand_in(built: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("triton_stand_in.py")
    with _child([sys.executable, str(script), str(built), str(port)], "ready"):
        yield f"grpc://127.0.0.1:{port}"


@contextlib.contextmanager
def _child(command: list[str], sign: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yields a process that has printed a line that begins with the sign, and that line."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    late = threading.Timer(_START_TIME_S, process.kill)
    late.start()
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith(sign)), None)
        if line is None:
            raise SystemExit(f"{' '.join(command)} ended without being ready")
        late.cancel()
        yield process, line
    finally:
        late.cancel()
        process.terminate()
        process.wait()


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process: fields 14 and 15 of /proc/PID/stat (proc(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=QUICKSTART, help="of a built pair")
    parser.add_argument("--url", help="a Triton that serves it already, grpc://HOST:PORT")
    parser.add_argument("--stand-in", action="store_true", help="without Triton")
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=4, help="of each; default: 4")
    parser.add_argument("--answers", type=int, default=32, help="in a round; default: 32")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
