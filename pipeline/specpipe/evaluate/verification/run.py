"""One verification from beginning to end: what is asked, judged and written.

with K as asked  the target alone, one request at a time: the reference
                 the target alone in another batch shape; every K; sampling; the gate
as served        the pair with the K that it chooses by itself, copied draft tokens among them
controls         the target as its own draft, a draft that is always wrong
the scorer       tie or fault; the threshold; the distributions to expect

Where the pair runs in this process, all of it does; otherwise a Triton is started for each of the
first three. Controls of runtimes that run specpipe's loop are in this process in any case.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from specpipe.build import cache, repositories
from specpipe.config.sections import PipelineConfig
from specpipe.errors import ConfigError, RepositoryError, RuntimeUnavailable, ServerError
from specpipe.evaluate import results
from specpipe.evaluate.endpoints.base import Endpoint, TimedAnswer
from specpipe.evaluate.prompts import PromptSet, as_messages, load_prompts
from specpipe.evaluate.verification import distribution, questions, record
from specpipe.evaluate.verification.asking import SideAnswers, VerifySide, ask_side
from specpipe.evaluate.verification.gate import Gate, ask_gate, judge_gate, load_gate
from specpipe.evaluate.verification.judge import Judge
from specpipe.evaluate.verification.outcome import Findings, Verification, VerifyOptions
from specpipe.evaluate.verification.scorer import Scorer, work_folder
from specpipe.evaluate.verification.subject import Subject
from specpipe.machine.callables import Log
from specpipe.machine.libraries import with_extras
from specpipe.machine.manifest import Files, compare_files
from specpipe.progress import count, logged_phase, phase
from specpipe.runtimes.engine_fit import installed
from specpipe.runtimes.runtime import require_library
from specpipe.speculative.request import GREEDY, Sampling

SEEDED = Sampling(temperature=0.8, top_p=0.95, seed=20_000, is_seeded=True)
"""How seeded requests sample: as chat models are often asked, from any one seed."""

_MAX_AT_ONCE = 32  # requests in flight: more take longer and show no more. A guess.
_FEW_TOKENS = 4  # of a mean greedy answer, fewer than which show little. A guess.
_NUM_CONTROLS = 2
_LIBRARIES = ("torch", "scipy", "nvidia-pytriton")
_IF_INSTALLED = ("tensorrt-rtx-cu13", "tensorrt", "tensorrt_llm")


def verify(
    config: PipelineConfig, options: VerifyOptions, *, report: Log = lambda line: None
) -> Verification:
    """Verifies a built pair and writes the result next to it; `report` gets what is going on."""
    if options.distance is not None and importlib.util.find_spec("scipy") is None:
        raise RuntimeUnavailable(
            "testing unseeded sampling needs 'scipy', unless it is left out with --no-sampling: "
            f"{with_extras('evaluate')}"
        )
    require_library("torch", "torch", extra="torch")  # scores the target, after minutes of asking
    report("hashing the pair and what it was made from")
    with phase("hashing"):
        hashed = repositories.check_artifacts(config)
    report(hashed.amount)
    repository = config.artifacts.repository
    prompts = load_prompts(options.prompts, limit=options.limit)
    gate = None if options.gate is None else load_gate(options.gate)
    if options.is_chat:
        prompts = PromptSet(prompts.source, as_messages(prompts.prompts))
        gate = None if gate is None else gate.as_chat()
    with work_folder(config) as work:
        subject = Subject(
            config,
            repository,
            work,
            is_in_process=options.is_in_process,
            is_float32=options.is_float32,
            max_num_draft_tokens=max(options.num_draft_tokens, default=0),
            report=report,
        )
        run = _Run(subject, options, prompts, gate, report)
        files = record.record_repository(config.artifacts_dir)
        findings = run.run()
        if compare_files(repository, files, trust_times=True).differences:
            raise RepositoryError(
                f"{repository} was changed while it was verified: run `specpipe verify` again"
            )
        path = _write(config, subject, run.settings(), prompts, findings, files)
    cache.check_integrity(repository)  # notes what links to it were made and removed
    return Verification(findings, path, title=_title(config, subject, prompts, findings))


def _title(config: PipelineConfig, subject: Subject, prompts: PromptSet, findings: Findings) -> str:
    """Returns what was verified and on how much, in a line."""
    place = "in this process"
    if subject.triton_version is not None:
        place = f"in Triton {subject.triton_version}"
    num_tokens = sum(side.num_tokens for side in findings.sides)
    return (
        f"{config.name} with runtime {subject.runtime}, {place}: {len(prompts.prompts)} prompts of "
        f"{prompts.source}, {num_tokens} tokens compared with those of the target alone"
    )


def _write(
    config: PipelineConfig,
    subject: Subject,
    settings: dict[str, Any],
    prompts: PromptSet,
    findings: Findings,
    files: Files,
) -> Path:
    """Writes the verdict, that of other engines than the artifact's elsewhere; returns the file."""
    libraries = [*_LIBRARIES, *(name for name in _IF_INSTALLED if installed(name) is not None)]
    data = {
        **results.header(
            record.VERIFY_KIND,
            pair=config.name,
            settings=settings,
            prompts=prompts,
            libraries=libraries,
        ),
        **findings.to_json(),
    }
    if subject.triton_version is not None:
        data["versions"]["triton"] = subject.triton_version
    if subject.is_artifact:
        return record.write(config.artifacts_dir, data, files)
    path = config.artifacts.result("verify-float32")
    results.write_result(path, data)
    return path


class _Run:
    """What the steps of one verification share."""

    def __init__(
        self,
        subject: Subject,
        options: VerifyOptions,
        prompts: PromptSet,
        gate: Gate | None,
        report: Log,
    ) -> None:
        self._subject, self._options, self._gate, self._report = subject, options, gate, report
        self._encode = partial(questions.encode, tokenizer=subject.tokenizer)
        for item in gate.items if gate is not None else ():
            self._encode(item.prompt)  # what cannot be asked is refused before minutes pass
        served = subject.engines.options
        self._at_once = min(served.max_batch_size, _MAX_AT_ONCE)
        self._lengths = questions.draft_lengths(options.num_draft_tokens, served.num_draft_tokens)
        self._cases = questions.make_cases(
            prompts,
            subject.tokenizer,
            max_tokens=options.max_tokens,
            max_seq_len=served.max_seq_len,
        )
        self._drafts_always = False
        self._asked: dict[str, list[SideAnswers]] = {}
        self._gate_answers: dict[bool, list[TimedAnswer]] = {}
        self._notes: list[str] = []
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
                f"seeded: runtime {subject.runtime} promises no text that is the same for every K"
            )

    def run(self) -> Findings:
        plans = self._plan_distributions()
        num_sides = self._num_sides()
        self._report(
            f"to ask: {len(self._cases)} prompts in {num_sides} ways, {self._options.max_tokens} "
            f"tokens at most; {len(plans)} tests of unseeded sampling"
        )
        with phase("verify"), count(num_sides, "sides") as self._done:
            tests = self._ask_all(plans)
        with self._subject.open_scorer() as scorer, phase("the target's own logits"):
            judge = self._judge(scorer)
            self._report("comparing with the target's own logits, also in other block shapes")
            threshold = judge.threshold()
            sides = judge.sides(threshold)
        self._skipped += judge.skipped
        gate = None
        if self._gate is not None:
            gate = judge_gate(
                self._gate,
                alone=self._gate_answers[False],
                speculative=self._gate_answers[True],
                min_pass_rate=self._options.gate_pass_rate,
            )
        return Findings(
            sides=tuple(sides),
            tests=tuple(tests),
            gate=gate,
            threshold=threshold,
            distance=self._options.distance,
            notes=tuple(self._notes),
            skipped=tuple(self._skipped),
            is_strict=self._options.is_strict,
        )

    def _num_sides(self) -> int:
        """Returns how often all prompts are asked, where the library drafts as it is asked to."""
        sides = [
            *questions.sides_of_target_alone(self._at_once),
            *questions.sides_of_speculation(self._lengths, self._at_once),
        ]
        num_served = len(self._served_loads()) if self._subject.has_own_k else 0
        return len(self._samplings) * (len(sides) + num_served + _NUM_CONTROLS)

    def _ask_all(self, plans: list[distribution.PlannedTest]) -> list[distribution.Finding]:
        with self._subject.open_as_asked() as endpoint:
            self._drafts_always = not questions.takes_draft_lengths(endpoint, self._cases[0])
            if self._drafts_always:
                self._take_fixed_length()
            else:
                self._ask_target_alone(endpoint)
            self._ask_speculation(endpoint)
            tests = self._test_distributions(plans, endpoint)
        if self._drafts_always:
            with self._subject.open_without_draft() as endpoint:
                self._ask_target_alone(endpoint)
        self._note_short_answers()
        self._ask_as_served()
        self._ask_controls()
        return tests

    def settings(self) -> dict[str, Any]:
        """Returns what was asked for, resolved."""
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

    def _take_fixed_length(self) -> None:
        """For a pair whose library drafts in every step: the target alone needs another server."""
        most = self._subject.engines.options.num_draft_tokens
        self._lengths = questions.fixed_lengths(self._options.num_draft_tokens, most)
        self._notes.append(
            f"this pair drafts {most} tokens in every step, whatever a request asks for: the "
            "target alone was asked in a server of its own"
        )

    def _note_short_answers(self) -> None:
        alone = self._asked["greedy"][0]
        if alone.num_tokens < len(self._cases) * min(_FEW_TOKENS, self._options.max_tokens):
            self._notes.append(
                f"the greedy answers of the target to {len(self._cases)} prompts have "
                f"{alone.num_tokens} tokens in all, which shows little: ask other prompts, or a "
                "chat model with --chat"
            )

    def _ask_target_alone(self, endpoint: Endpoint) -> None:
        for check in self._samplings:
            sides = questions.sides_of_target_alone(self._at_once)
            alone = self._ask(endpoint, sides, check)
            self._asked[check] = alone + self._asked.get(check, [])
        self._ask_gate(endpoint, with_draft=False)

    def _ask_speculation(self, endpoint: Endpoint) -> None:
        sides = questions.sides_of_speculation(self._lengths, self._at_once)
        self._ask_more(endpoint, sides)
        self._ask_gate(endpoint, with_draft=True)

    def _ask_more(self, endpoint: Endpoint, sides: Sequence[VerifySide]) -> None:
        for check in self._samplings:
            self._asked.setdefault(check, []).extend(self._ask(endpoint, sides, check))

    def _ask(
        self, endpoint: Endpoint, sides: Sequence[VerifySide], check: str
    ) -> list[SideAnswers]:
        asked = []
        for side in sides:
            with logged_phase(f"{check}: {side.name}", self._report):
                asked.append(ask_side(endpoint, self._cases, side, self._samplings[check]))
            self._done.advance()
        return asked

    def _ask_gate(self, endpoint: Endpoint, *, with_draft: bool) -> None:
        if self._gate is None:
            return
        self._report(
            f"gate: {self._gate.source}, {'with' if with_draft else 'without'} speculation"
        )
        with phase("gate"):
            self._gate_answers[with_draft] = ask_gate(
                self._gate,
                endpoint,
                encode=self._encode,
                max_tokens=self._options.max_tokens,
                num_draft_tokens=max(self._lengths) if with_draft else 0,
                at_once=self._at_once,
            )

    def _ask_as_served(self) -> None:
        if self._subject.has_own_k and not self._drafts_always:
            sides = [questions.side_as_served(load) for load in self._served_loads()]
            with self._subject.open_as_served() as endpoint:
                self._ask_more(endpoint, sides)

    def _served_loads(self) -> list[int]:
        """Returns how many requests at once; only one that runs alone copies."""
        return sorted({1, self._at_once} if self._subject.may_copy else {self._at_once})

    def _ask_controls(self) -> None:
        """Pairs that ordinary drafts seldom come near to."""
        longest = max(self._lengths)
        self._ask_control(
            questions.side_of_own_draft(longest, self._at_once), self._subject.open_own_draft()
        )
        self._ask_control(
            questions.side_of_wrong_draft(longest, self._at_once), self._subject.open_wrong_draft()
        )

    def _ask_control(self, side: VerifySide, opening: AbstractContextManager[Endpoint]) -> None:
        with ExitStack() as stack:
            try:
                endpoint = stack.enter_context(opening)
            except (RuntimeUnavailable, ServerError) as exc:  # the target twice may be too large
                self._skipped.append(f"{side.name}: {exc}")
                return
            self._ask_more(endpoint, [side])

    def _plan_distributions(self) -> list[distribution.PlannedTest]:
        if self._options.distance is None:
            self._skipped.append("unseeded sampling: not asked for")
            return []
        self._report("sampling: computing the target's distributions")
        with self._subject.open_scorer() as scorer, phase("sampling"):
            return distribution.make_plans(
                scorer,
                self._cases,
                distance=self._options.distance,
                max_num_draft_tokens=max(self._lengths),
                end_token_ids=self._subject.end_token_ids,
            )

    def _test_distributions(
        self, plans: list[distribution.PlannedTest], endpoint: Endpoint
    ) -> list[distribution.Finding]:
        if not plans:
            return []
        reason = distribution.skip_reason(plans[0], endpoint)
        if reason is None and self._drafts_always:
            reason = "the tests need other draft lengths than the one that this pair has"
        if reason is not None:
            self._skipped.append(f"unseeded sampling: {reason}")
            return []
        samples = plans[0].num_samples
        self._report(f"sampling: {len(plans)} tests of {samples} answers each")
        with phase("sampling"):
            return distribution.run_tests(plans, endpoint, at_once=self._at_once)

    def _judge(self, scorer: Scorer) -> Judge:
        return Judge(
            scorer=scorer,
            cases=tuple(self._cases),
            asked=self._asked,
            samplings=self._samplings,
            lengths=self._lengths,
            end_token_ids=self._subject.end_token_ids,
            is_float32=self._options.is_float32,
        )
