"""What two versions do not have in common: inputs, settings, libraries, sizes and what was found.

Each version is turned into facts by name; what has another value in the other one is a difference.
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specpipe.errors import show
from specpipe.machine.columns import aligned
from specpipe.machine.memory import format_bytes
from specpipe.release.documents import Dependency, Documents
from specpipe.release.figures import acceptance_rates

_MAX_LINES = 200  # of a table; a hostile document could have millions
_NONE = "none"
_DIGEST_CHARS = 12  # of a digest or a commit, enough to tell two apart
_MAX_KEYS = 10  # of the path of one setting
_LIBRARY = "pkg:pypi/"


@dataclass(frozen=True)
class Fact:
    """A value as programs get it, and as people read it."""

    value: Any
    text: str


@dataclass(frozen=True)
class Difference:
    """A fact that two versions do not share; None: the one or the other has no such fact."""

    kind: str
    name: str
    before: Fact | None
    after: Fact | None


@dataclass(frozen=True)
class Comparison:
    """Two versions by name, and in what they differ."""

    before: str
    after: str
    differences: tuple[Difference, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "before": self.before,
            "after": self.after,
            "differences": [
                {
                    "kind": one.kind,
                    "name": one.name,
                    "before": one.before and one.before.value,
                    "after": one.after and one.after.value,
                }
                for one in self.differences
            ],
        }

    def lines(self) -> list[str]:
        """Returns a table, or the one line that there is nothing to show."""
        if not self.differences:
            return [f"no difference between {self.before} and {self.after}"]
        rows = [("", "", self.before, self.after)]
        for one in self.differences[:_MAX_LINES]:
            was, now = (_NONE if fact is None else fact.text for fact in (one.before, one.after))
            rows.append((one.kind, show(one.name), was, now))
        more = len(self.differences) - _MAX_LINES
        return aligned(rows, texts=range(4)) + ([f"{more} more"] if more > 0 else [])


def compare(before: Documents, after: Documents) -> Comparison:
    """Returns in what two versions differ, inputs first."""
    found = []
    for (kind, was), (_, now) in zip(_facts(before), _facts(after), strict=True):
        for name in {**was, **now}:
            if was.get(name) != now.get(name):
                found.append(Difference(kind, name, was.get(name), now.get(name)))
    return Comparison(before.name, after.name, tuple(found))


def _facts(documents: Documents) -> Iterator[tuple[str, dict[str, Fact]]]:
    """Yields facts by name, kind by kind, always of the same kinds."""
    for kind, facts in (
        ("input", _inputs(documents.dependencies)),
        ("setting", _settings(documents.settings)),
        ("library", _libraries(documents.dependencies)),
        ("GPU", _gpus(documents)),
        ("size", _sizes(documents.sizes)),
        ("verification", _verification(documents)),
        ("acceptance", _acceptance(documents)),
        ("speed-up", _speed_ups(documents)),
        ("quality", _quality(documents)),
        ("measured", _conditions(documents)),
    ):
        yield kind, dict(facts)


def _plain(value: Any) -> Fact:
    try:
        return Fact(value, show(value if isinstance(value, str) else json.dumps(value)))
    except RecursionError:
        return Fact(None, "what is nested too deeply")


def _inputs(dependencies: Sequence[Dependency]) -> Iterator[tuple[str, Fact]]:
    """Yields commits, files and images, by digest."""
    for one in dependencies:
        for digest in one.digest.values():
            yield one.name, Fact(digest, show(digest[:_DIGEST_CHARS]))


def _libraries(dependencies: Sequence[Dependency]) -> Iterator[tuple[str, Fact]]:
    for one in dependencies:
        if one.uri is not None and one.uri.startswith(_LIBRARY):
            yield one.name, _plain(urllib.parse.unquote(one.uri.rpartition("@")[2]))


def _settings(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Fact]]:
    """Yields settings by their dotted names, as `--set` takes them."""
    for name, value in settings.items():
        if isinstance(value, dict) and value and above.count(".") < _MAX_KEYS:
            yield from _settings(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", _plain(value)


def _gpus(documents: Documents) -> Iterator[tuple[str, Fact]]:
    for number, gpu in enumerate(documents.gpus):
        for name, value in gpu.items():
            yield f"{number} {name}", _plain(value)


def _sizes(sizes: Mapping[str, int]) -> Iterator[tuple[str, Fact]]:
    for name, size in sizes.items():
        yield name, Fact(size, f"{format_bytes(size)} ({size:,} bytes)")


def _verification(documents: Documents) -> Iterator[tuple[str, Fact]]:
    proved = documents.verification
    if proved is None:
        yield "verdict", _plain("not verified")
        return
    reason = proved["reason"]
    yield "verdict", _plain(proved["verdict"] if reason is None else f"failed: {reason}")
    yield "numerical ties", _plain(proved.get("num_ties"))


def _acceptance(documents: Documents) -> Iterator[tuple[str, Fact]]:
    """Yields the rates of greedy answers at the full draft length."""
    for what, rate in acceptance_rates(documents.night).items():
        yield what, Fact(asdict(rate), str(rate))


def _speed_ups(documents: Documents) -> Iterator[tuple[str, Fact]]:
    for gain in () if documents.night is None else documents.night.speed_ups:
        value = {"ratio": gain.ratio, "low": gain.low, "high": gain.high}
        text = _NONE if gain.ratio is None else f"{gain.ratio:.2f}"
        if gain.low is not None and gain.high is not None:
            text += f" ({gain.low:.2f} to {gain.high:.2f})"
        yield f"at concurrency {gain.concurrency}", Fact(value, text)


def _quality(documents: Documents) -> Iterator[tuple[str, Fact]]:
    for model in () if documents.quality is None else documents.quality.models:
        measured = model.divergence
        if measured is None:
            continue
        form = model.role if model.quantized is None else f"{model.role} in {model.quantized.name}"
        for name, value in (
            ("perplexity ratio", measured.perplexity_ratio),
            ("mean KL, nats", measured.mean_kl),
            ("top-1 agreement", measured.top1_agreement),
        ):
            yield f"{form}: {name}", Fact(value, f"{value:.4g}")


def _conditions(documents: Documents) -> Iterator[tuple[str, Fact]]:
    """Yields what figures depend on besides the version: where they differ, compare with care."""
    night = documents.night
    if night is not None and night.asked is not None:
        yield "prompts", Fact(night.asked.prompts, show(night.asked.prompts[:_DIGEST_CHARS]))
        yield "served by", _plain(night.asked.served_by)
        yield "machine", _plain(night.asked.machine)
