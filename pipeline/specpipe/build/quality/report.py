"""What quantization costs, as `report.json` and as a table, and what of it is too much."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpipe.machine.columns import aligned
from specpipe.machine.memory import format_bytes
from specpipe.roles import Role

if TYPE_CHECKING:
    from specpipe.config.sections import QualityConfig
    from specpipe.speculative.metrics import AcceptanceCounts

REPORT_JSON, REPORT_TEXT = "report.json", "report.txt"
PLAIN_FORM = "plain"
"""What a form that is not quantized is called."""


@dataclass(frozen=True)
class Divergence:
    """How a quantized model differs from its plain form; over all positions of all texts alike.

    num_positions     predicted tokens: every one of a text but the first
    plain_perplexity  exp of the mean negative log-probability that the plain form gives them
    mean_kl           mean D(plain ‖ quantized), in nats: what a token costs more to predict with
                      the quantized form, were the plain one right. The other direction would count
                      little where the quantized form no longer finds what the plain one finds
                      likely, which is the loss that matters.
    top1_agreement    the part of the positions at which both find the same token likeliest
    """

    num_positions: int
    plain_perplexity: float
    perplexity: float
    mean_kl: float
    top1_agreement: float

    @property
    def perplexity_ratio(self) -> float:
        return self.perplexity / self.plain_perplexity


@dataclass(frozen=True)
class ModelForm:
    """One form of a model.

    name  "plain", or its format, with "+ fp8 KV" where the KV cache is quantized too
    """

    name: str
    weights_bytes: int
    kv_cache_bytes_per_token: int


@dataclass(frozen=True)
class ModelQuality:
    """Both forms of a model; only one of a model that is not quantized.

    texts  where the texts are from that it was calibrated and measured on, and how many there are
    """

    role: Role
    plain: ModelForm
    quantized: ModelForm | None = None
    divergence: Divergence | None = None
    texts: str | None = None

    @property
    def forms(self) -> tuple[ModelForm, ...]:
        return (self.plain,) if self.quantized is None else (self.plain, self.quantized)


@dataclass(frozen=True)
class PairingAcceptance:
    """What one pairing of forms drafted and accepted.

    standard_error  of the rate, were the prompts drawn at random; None for fewer than two
    """

    draft: str
    target: str
    num_draft_tokens: int
    num_accepted_tokens: int
    standard_error: float | None = None

    @classmethod
    def of(cls, draft: str, target: str, prompts: Sequence[AcceptanceCounts]) -> PairingAcceptance:
        """Returns the sum over the prompts; the error is that of a ratio of two sums."""
        drafted = sum(counts.num_draft_tokens for counts in prompts)
        accepted = sum(counts.num_accepted_tokens for counts in prompts)
        error = None
        if drafted and len(prompts) > 1:
            rate = accepted / drafted
            squares = sum(
                (counts.num_accepted_tokens - rate * counts.num_draft_tokens) ** 2
                for counts in prompts
            )
            error = math.sqrt(squares * len(prompts) / (len(prompts) - 1)) / drafted
        return cls(draft, target, drafted, accepted, error)

    @property
    def rate(self) -> float | None:
        """Accepted over drafted tokens; None when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None


@dataclass(frozen=True)
class QualityReport:
    """What quantization costs a pair, as measured.

    engines     device and dtype that both models computed in
    acceptance  of every pairing of forms, draft by draft: the plain pair first, the pair as
                configured last
    warnings    what the numbers do not show, a sentence each
    """

    models: tuple[ModelQuality, ...]
    engines: str
    num_draft_tokens: int = 0
    num_prompts: int = 0
    acceptance: tuple[PairingAcceptance, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def acceptance_ratio(self) -> float | None:
        """The rate of the pair as configured over that of the plain pair; None where that is 0."""
        if not self.acceptance:
            return None
        before, after = self.acceptance[0].rate, self.acceptance[-1].rate
        return None if not before or after is None else after / before

    def to_json(self) -> str:
        values: dict[str, Any] = asdict(self)
        for shown, model in zip(values["models"], self.models, strict=True):
            if model.divergence is not None:
                shown["divergence"]["perplexity_ratio"] = model.divergence.perplexity_ratio
        for shown, pairing in zip(values["acceptance"], self.acceptance, strict=True):
            shown["acceptance_rate"] = pairing.rate
        values["acceptance_ratio"] = self.acceptance_ratio
        return json.dumps(values, indent=2) + "\n"

    @classmethod
    def read(cls, path: Path) -> QualityReport:
        """Returns the report that `to_json` wrote."""

        values: dict[str, Any] = json.loads(path.read_bytes())
        del values["acceptance_ratio"]
        models = []
        for model in values.pop("models"):
            measured = model["divergence"]
            if measured is not None:
                del measured["perplexity_ratio"]
                model["divergence"] = Divergence(**measured)
            model["plain"] = ModelForm(**model["plain"])
            model["quantized"] = model["quantized"] and ModelForm(**model["quantized"])
            models.append(ModelQuality(**model))
        pairings = []
        for pairing in values.pop("acceptance"):
            del pairing["acceptance_rate"]
            pairings.append(PairingAcceptance(**pairing))
        warnings = tuple(values.pop("warnings"))
        return cls(models=tuple(models), acceptance=tuple(pairings), warnings=warnings, **values)


def limit_faults(report: QualityReport, limits: QualityConfig) -> Iterator[str]:
    """Yields what costs more than the config allows: the figure, its limit and the setting."""
    for model in report.models:
        measured = model.divergence
        if measured is None:
            continue
        who = f"the {model.role} in {model.quantized.name if model.quantized else PLAIN_FORM}"
        if limits.max_mean_kl is not None and measured.mean_kl > limits.max_mean_kl:
            yield (
                f"{who} has a mean KL of {measured.mean_kl:.4g} nats to its plain form; "
                f"quality.max_mean_kl is {limits.max_mean_kl:g}"
            )
        if (
            limits.min_top1_agreement is not None
            and measured.top1_agreement < limits.min_top1_agreement
        ):
            yield (
                f"{who} agrees with its plain form on the likeliest token at "
                f"{measured.top1_agreement:.4g} of the positions; quality.min_top1_agreement is "
                f"{limits.min_top1_agreement:g}"
            )
        if (
            limits.max_perplexity_ratio is not None
            and measured.perplexity_ratio > limits.max_perplexity_ratio
        ):
            yield (
                f"{who} has {measured.perplexity_ratio:.4g} times the perplexity of its plain "
                f"form; quality.max_perplexity_ratio is {limits.max_perplexity_ratio:g}"
            )
    ratio = report.acceptance_ratio
    if (
        limits.min_acceptance_ratio is not None
        and ratio is not None
        and ratio < limits.min_acceptance_ratio
    ):
        yield (
            f"the acceptance rate is {ratio:.4g} times that of the plain pair; "
            f"quality.min_acceptance_ratio is {limits.min_acceptance_ratio:g}"
        )


def to_text(report: QualityReport) -> str:
    """Returns the report as tables, for people."""
    tables = [_models_table(report)]
    if report.acceptance:
        tables.append(_acceptance_table(report))
    texts: dict[str, list[Role]] = {}
    for model in report.models:
        if model.texts is not None:
            texts.setdefault(model.texts, []).append(model.role)
    notes = [f"texts of {' and '.join(roles)}: {source}" for source, roles in texts.items()]
    notes.append(f"measured with the torch runtime: {report.engines}")
    notes += [f"warning: {warning}" for warning in report.warnings]
    return "\n\n".join([*tables, "\n".join(notes)]) + "\n"


def _models_table(report: QualityReport) -> str:
    header = (
        "model",
        "format",
        "weights",
        "KV/token",
        "perplexity",
        "mean KL, nats",
        "top-1 agreement",
    )
    rows: list[Sequence[str]] = [header]
    for model in report.models:
        measured = model.divergence
        for form in model.forms:
            sizes = format_bytes(form.weights_bytes), format_bytes(form.kv_cache_bytes_per_token)
            if measured is None:
                figures: tuple[str, ...] = ("-", "-", "-")
            elif form is model.plain:
                figures = (f"{measured.plain_perplexity:.3f}", "-", "-")
            else:
                figures = (
                    f"{measured.perplexity:.3f}",
                    f"{measured.mean_kl:.5f}",
                    f"{measured.top1_agreement:.2%}",
                )
            rows.append((model.role, form.name, *sizes, *figures))
    return "\n".join(aligned(rows, texts=(0, 1)))


def _acceptance_table(report: QualityReport) -> str:
    targets = list(dict.fromkeys(pairing.target for pairing in report.acceptance))
    rates: Mapping[tuple[str, str], PairingAcceptance] = {
        (pairing.draft, pairing.target): pairing for pairing in report.acceptance
    }
    rows: list[Sequence[str]] = [("acceptance rate", *(f"target {name}" for name in targets))]
    for draft in dict.fromkeys(pairing.draft for pairing in report.acceptance):
        rows.append((f"draft {draft}", *(_rate(rates[draft, target]) for target in targets)))
    lines = aligned(rows)
    prompts = f"{report.num_prompts} prompts, greedy, K = {report.num_draft_tokens}"
    ratio = report.acceptance_ratio
    lines.append(f"{prompts}; as configured / plain: {'-' if ratio is None else f'{ratio:.3f}'}")
    return "\n".join(lines)


def _rate(pairing: PairingAcceptance) -> str:
    if pairing.rate is None:
        return "-"
    error = "" if pairing.standard_error is None else f" ± {pairing.standard_error:.3f}"
    counts = f"{pairing.num_accepted_tokens}/{pairing.num_draft_tokens}"
    return f"{pairing.rate:.3f}{error} ({counts})"
