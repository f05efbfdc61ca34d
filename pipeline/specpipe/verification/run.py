"""One verification from beginning to end: what is asked, judged and written.

served (Triton, or in this process)  reference ── the target alone, one request at a time
                                     every K, the target alone in other batches, as served
in this process                      the target as its own draft, a draft that is always wrong
the scorer                           tie or fault; the threshold; the distributions to expect
"""

from __future__ import annotations

import dataclasses
import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specpipe import pipeline, results
from specpipe.config import PipelineConfig
from specpipe.endpoints.base import Endpoint
from specpipe.errors import ConfigError, RepositoryError, RuntimeUnavailable
from specpipe.manifest import Files, compare_files
from specpipe.prompts import Prompt, PromptSet, load_prompts
from specpipe.runtimes.base import Pair
from specpipe.speculative.request import GREEDY, Sampling
from specpipe.triton.server import Log
from specpipe.verification import distribution, exact, record
from specpipe.verification.exact import Asked, Case, Side, SideResult
from specpipe.verification.gate import Gate, GateResult, load_gate, run_gate
from specpipe.verification.outcome import Findings, Options, Verification
from specpipe.verification.scorer import Scorer, Text, measure_block_difference
from specpipe.verification.subject import Subject
from specpipe.verification.verdict import TieThreshold

SEEDED = Sampling(temperature=0.8, top_p=0.95, seed=20_000, is_seeded=True)

FLOAT32_MARGIN = 1e-4

_MAX_AT_ONCE = 32
_NUM_THRESHOLD_TEXTS = 8
_LIBRARIES = ("torch", "scipy", "nvidia-pytriton")


def verify(
    config: PipelineConfig, options: Options, *, report: Log = lambda line: None
) -> Verification:
    """Verifies a built pair and writes the result beside it; `report` hears how it goes on."""
    if options.distance is not None and importlib.util.find_spec("scipy") is None:
        raise RuntimeUnavailable(
            "testing unseeded sampling needs 'scipy': pip install 'specpipe[evaluate]', or leave "
            "it out with --no-sampling"
        )
    repository = pipeline.built_repository(config)
    prompts = load_prompts(options.prompts, limit=options.limit)
    gate = None if options.gate is None else load_gate(options.gate)
    with tempfile.TemporaryDirectory(dir=config.artifacts_dir, prefix=".verify-") as made:
        subject = Subject(
            config,
            repository,
            Path(made),
            is_in_process=options.is_in_process,
            is_float32=options.is_float32,
            max_num_draft_tokens=max(options.num_draft_tokens, default=0),
            report=report,
        )
        run = _Run(subject, options, prompts, gate, report)
        report("hashing the repository")
        files = record.record_repository(config.artifacts_dir)
        findings = run.run()
        if compare_files(repository, files, trust_times=True)[0]:
            raise RepositoryError(
                f"{repository} was changed while it was verified: run `specpipe verify` again"
            )
        path = _write(config, run.settings(), prompts, findings, files, subject.is_artifact)
    return Verification(findings, path)


def _write(
    config: PipelineConfig,
    settings: dict[str, Any],
    prompts: PromptSet,
    findings: Findings,
    files: Files,
    is_artifact: bool,
) -> Path:
    """Writes the artifact's verdict; what other engines than its own came to stands elsewhere."""
    data = {
        **results.header(
            record.KIND, pair=config.name, settings=settings, prompts=prompts, libraries=_LIBRARIES
        ),
        **findings.to_json(distance=settings["distance"]),
    }
    if is_artifact:
        return record.write(config.artifacts_dir, data, files)
    path = config.artifacts_dir / "results" / "verify-float32.json"
    results.write_result(path, data)
    return path


class _Run:
    """What the steps of one verification share."""

    def __init__(
        self,
        subject: Subject,
        options: Options,
        prompts: PromptSet,
        gate: Gate | None,
        report: Log,
    ) -> None:
        self._subject, self._options, self._gate, self._report = subject, options, gate, report
        self._end_token_ids = subject.end_token_ids
        self._at_once = min(subject.engines.options.max_batch_size, _MAX_AT_ONCE)
        self._lengths = self._draft_lengths()
        self._cases = self._make_cases(prompts)
        self._skipped: list[str] = []
        self._samplings = {"greedy": GREEDY}
        if subject.runs_own_loop:
            self._samplings["seeded"] = SEEDED
        else:
            if options.is_in_process:
                raise ConfigError(
                    f"--in-process: the engines of runtime {subject.runtime} do not run in this "
                    "process; leave it out"
                )
            self._skipped.append(
                f"seeded: with runtime {subject.runtime} another K draws another text"
            )

    def run(self) -> Findings:
        plans = self._plan_distributions()
        asked: dict[str, list[Asked]] = {}
        with self._subject.open_as_asked() as endpoint:
            for check, sampling in self._samplings.items():
                asked[check] = self._ask(endpoint, self._sides(), check, sampling)
            tests = self._test_distributions(plans, endpoint)
            gate = self._run_gate(endpoint)
        self._ask_as_served(asked)
        self._ask_controls(asked)
        with self._subject.open_scorer() as scorer:
            threshold = self._threshold(scorer, asked["greedy"][0])
            sides = self._judge(scorer, threshold, asked)
        return Findings(
            sides=tuple(sides),
            tests=tuple(tests),
            gate=gate,
            threshold=threshold,
            skipped=tuple(self._skipped),
            is_strict=self._options.is_strict,
        )

    def settings(self) -> dict[str, Any]:
        """What was asked for, resolved."""
        return {
            **dataclasses.asdict(self._options),
            "gate": None if self._gate is None else self._gate.source,
            "num_draft_tokens": list(self._lengths),
            "served_by": "this process" if self._subject.is_in_process else "Triton",
            "runtime": self._subject.runtime,
            "at_once": self._at_once,
            "seeded": {
                name: getattr(SEEDED, name) for name in ("temperature", "top_p", "top_k", "seed")
            },
        }

    def _draft_lengths(self) -> tuple[int, ...]:
        most = self._subject.engines.options.num_draft_tokens
        wanted = self._options.num_draft_tokens or tuple(
            sorted({1, (most + 1) // 2, most} if most else ())
        )
        if not wanted:
            raise ConfigError(
                "speculation.num_draft_tokens is 0: there is no speculation to verify"
            )
        for length in wanted:
            if not 1 <= length <= most:
                raise ConfigError(
                    f"--num-draft-tokens {length}: this pair drafts between 1 and {most} tokens "
                    "(speculation.num_draft_tokens)"
                )
        return wanted

    def _make_cases(self, prompts: PromptSet) -> list[Case]:
        longest = self._subject.engines.options.max_seq_len
        cases = []
        for prompt in prompts.prompts:
            token_ids = self._encode(prompt)
            max_tokens = min(prompt.max_tokens or self._options.max_tokens, longest)
            if len(token_ids) >= longest:
                raise ConfigError(
                    f"{prompts.source}: prompt {prompt.name} has {len(token_ids)} tokens; prompt "
                    f"and answer together may have {longest} (engine.max_seq_len)"
                )
            cases.append(Case(name=prompt.name, token_ids=token_ids, max_tokens=max_tokens))
        return cases

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Returns the ids of a prompt, as preprocessing makes them."""
        tokenizer = self._subject.tokenizer
        if prompt.messages is not None:
            return tuple(tokenizer.encode_messages([dict(message) for message in prompt.messages]))
        assert prompt.text is not None
        return tuple(tokenizer.encode(prompt.text))

    def _sides(self) -> list[Side]:
        """How the served pair is asked; the first is what the others are compared with."""
        many = self._at_once
        longest = max(self._lengths)
        sides = [
            Side(name="target alone", kind="reference", num_draft_tokens=0, at_once=1),
            Side(
                name=f"target alone, {many} at once",
                kind="control",
                num_draft_tokens=0,
                at_once=many,
            ),
            Side(
                name=f"K = {longest}, 1 at once",
                kind="speculation",
                num_draft_tokens=longest,
                at_once=1,
            ),
        ]
        return sides + [
            Side(
                name=f"K = {length}, {many} at once",
                kind="speculation",
                num_draft_tokens=length,
                at_once=many,
            )
            for length in self._lengths
        ]

    def _ask(
        self, endpoint: Endpoint, sides: Sequence[Side], check: str, sampling: Sampling
    ) -> list[Asked]:
        asked = []
        for side in sides:
            self._report(f"{check}: {side.name}")
            asked.append(exact.ask_side(endpoint, self._cases, side, sampling))
        return asked

    def _ask_as_served(self, asked: dict[str, list[Asked]]) -> None:
        """With the adaptive K of the artifact, which changes while a request runs."""
        if not self._subject.has_own_k:
            return
        side = Side(
            name=f"as served, {self._at_once} at once",
            kind="speculation",
            num_draft_tokens=None,
            at_once=self._at_once,
        )
        with self._subject.open_as_served() as endpoint:
            for check, sampling in self._samplings.items():
                asked[check] += self._ask(endpoint, [side], check, sampling)

    def _ask_controls(self, asked: dict[str, list[Asked]]) -> None:
        """Pairs in this process that ordinary drafts seldom come near to."""
        side = Side(
            name="the target as its own draft",
            kind="control",
            num_draft_tokens=max(self._lengths),
            at_once=self._at_once,
            is_own_draft=True,
        )
        runtime, engines = self._subject.runtime, self._subject.engines
        if self._subject.runs_own_loop:
            self._ask_control(asked, side, engines.load_own_draft)
        else:
            self._skipped.append(f"{side.name}: runtime {runtime} does not run in this process")
        side = dataclasses.replace(
            side, name="a draft that is always wrong", is_own_draft=False, is_wrong_draft=True
        )
        if runtime == "torch":
            self._ask_control(asked, side, engines.load_wrong_draft)
        else:
            self._skipped.append(f"{side.name}: only runtime torch has engines to change")

    def _ask_control(
        self, asked: dict[str, list[Asked]], side: Side, load: Callable[[], Pair]
    ) -> None:
        try:
            pair = load()
        except RuntimeUnavailable as exc:  # the target twice may be too large
            self._skipped.append(f"{side.name}: {exc}")
            return
        with self._subject.open(pair) as endpoint:
            for check, sampling in self._samplings.items():
                asked[check] += self._ask(endpoint, [side], check, sampling)

    def _plan_distributions(self) -> list[distribution.Plan]:
        if self._options.distance is None:
            self._skipped.append("unseeded sampling: not asked for")
            return []
        self._report("sampling: computing the target's distributions")
        with self._subject.open_scorer() as scorer:
            return distribution.make_plans(
                scorer,
                self._cases,
                distance=self._options.distance,
                max_num_draft_tokens=max(self._lengths),
                end_token_ids=self._end_token_ids,
            )

    def _test_distributions(
        self, plans: list[distribution.Plan], endpoint: Endpoint
    ) -> list[distribution.Finding]:
        if not plans:
            return []
        if not distribution.is_lossless(plans[0], endpoint):
            self._skipped.append(
                "unseeded sampling: the server says that it does not keep the target's "
                "distribution, as its config allows"
            )
            return []
        samples = plans[0].num_samples
        self._report(f"sampling: {len(plans)} tests of {samples} answers each")
        return distribution.run_tests(plans, endpoint, at_once=self._at_once)

    def _run_gate(self, endpoint: Endpoint) -> GateResult | None:
        if self._gate is None:
            return None
        self._report(f"gate: {self._gate.source}, with speculation and without")
        return run_gate(
            self._gate,
            endpoint,
            encode=self._encode,
            max_tokens=self._options.max_tokens,
            num_draft_tokens=max(self._lengths),
            at_once=self._at_once,
            min_pass_rate=self._options.gate_pass_rate,
        )

    def _threshold(self, scorer: Scorer, reference: Asked) -> TieThreshold:
        if self._options.is_float32:
            return TieThreshold(dtype="float32", fixed=FLOAT32_MARGIN)
        self._report("measuring the target's logits in other block shapes")
        texts = [
            Text(case.token_ids, stream.token_ids, case.max_tokens)
            for case, stream in zip(self._cases, reference.streams, strict=True)
        ]
        found = measure_block_difference(
            scorer, texts[:_NUM_THRESHOLD_TEXTS], [length + 1 for length in self._lengths]
        )
        return TieThreshold(dtype=scorer.dtype, block_difference=found.value)

    def _judge(
        self, scorer: Scorer, threshold: TieThreshold, asked: dict[str, list[Asked]]
    ) -> list[SideResult]:
        results = []
        for check, (reference, *others) in asked.items():
            for other in others:
                if other.side.kind == "speculation" and not other.is_lossless:
                    self._skipped.append(
                        f"{check}, {other.side.name}: the server says that it is not lossless"
                    )
                    continue
                results.append(
                    exact.judge(
                        check,
                        reference,
                        other,
                        self._cases,
                        scorer=scorer,
                        sampling=self._samplings[check],
                        threshold=threshold,
                        end_token_ids=self._end_token_ids,
                    )
                )
        results.append(
            exact.judge_target(
                asked["greedy"][0],
                self._cases,
                scorer=scorer,
                threshold=threshold,
                end_token_ids=self._end_token_ids,
            )
        )
        return results
