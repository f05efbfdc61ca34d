"""What is verified, and the ways to ask it: served as it is, with K as asked, and the controls."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from specpipe.config.sections import PipelineConfig
from specpipe.errors import ConfigError
from specpipe.evaluate.endpoints.base import Endpoint
from specpipe.evaluate.endpoints.in_process import InProcess
from specpipe.evaluate.endpoints.triton import Speculative
from specpipe.evaluate.serving import served
from specpipe.evaluate.verification import repositories
from specpipe.evaluate.verification.controls import Engines
from specpipe.evaluate.verification.scorer import Scorer, engine_rounding, open_scorer, torch_engine
from specpipe.machine.web import fetch
from specpipe.runtimes.pair.pair import Pair
from specpipe.runtimes.pair_file import read_pair
from specpipe.runtimes.runtime import load_runtime
from specpipe.triton.server.server import Log


class Subject:
    """A built pair, or its two checkpoints in float32; `made` is a folder for what that takes."""

    def __init__(
        self,
        config: PipelineConfig,
        repository: Path,
        work: Path,
        *,
        is_in_process: bool,
        is_float32: bool,
        max_num_draft_tokens: int,
        report: Log,
    ) -> None:
        """max_num_draft_tokens is what engines in float32 are built for, if more than packaged."""
        self._config, self._repository, self._work, self._report = config, repository, work, report
        self.is_in_process = is_in_process or is_float32
        self._is_float32 = is_float32
        self.engines = Engines.of(repository)
        pair = read_pair(repository)
        self.has_own_k = pair.options != repositories.as_asked(pair.options) and not is_float32
        """Whether the pair, as it is served, chooses by itself how much to draft or to copy."""
        self.may_copy = pair.options.prompt_lookup
        """Whether it takes draft tokens from the text of a request that runs alone."""
        self.triton_version: str | None = None
        """The version of the server that was asked, once one was."""
        self.is_artifact = True
        """Whether the engines are those that are served."""
        if is_float32:
            self._take_float32(max_num_draft_tokens)
            engines = (self.engines.draft, self.engines.target)
            self.is_artifact = pair.runtime == "torch" and not any(
                engine.is_relative_to(work) for engine in engines
            )
        self.tokenizer = self.engines.tokenizer
        self.end_token_ids = self.tokenizer.end_token_ids

    @property
    def runtime(self) -> str:
        return self.engines.runtime

    @property
    def runs_own_loop(self) -> bool:
        """As `Runtime` has it; TensorRT-LLM's engines draw with a noise of their own."""
        return load_runtime(self.runtime).runs_own_loop

    @contextmanager
    def open_as_asked(self) -> Iterator[Endpoint]:
        """Yields the pair with K as a request asks, all of it drafted by the draft."""
        if self.is_in_process:
            with self._open_pair(self.engines.load()) as endpoint:
                yield endpoint
            return
        self._report("starting Triton, with K as asked")
        made = repositories.write_as_asked(self._repository, self._work / "as_asked")
        with self._open_triton(made) as endpoint:
            yield endpoint

    @contextmanager
    def open_as_served(self) -> Iterator[Endpoint]:
        """Yields the pair as it is."""
        if self.is_in_process:
            with closing(InProcess.load(self._repository)) as endpoint:
                yield endpoint
            return
        self._report("starting Triton, as served")
        with self._open_triton(self._repository) as endpoint:
            yield endpoint

    @contextmanager
    def open_without_draft(self) -> Iterator[Endpoint]:
        """Yields the target alone, of a pair that drafts in every step of every request."""
        self._report("starting Triton, without a draft")
        made = repositories.write_without_draft(
            self._config, self._repository, self._work / "without_draft"
        )
        with self._open_triton(made) as endpoint:
            yield endpoint

    @contextmanager
    def open_own_draft(self) -> Iterator[Endpoint]:
        """Yields the target as its own draft."""
        if self.runs_own_loop:
            with self._open_pair(self.engines.load_own_draft()) as endpoint:
                yield endpoint
            return
        self._report("starting Triton, with the target as its own draft")
        made = repositories.write_own_draft(self._repository, self._work / "own_draft")
        with self._open_triton(made) as endpoint:
            yield endpoint

    @contextmanager
    def open_wrong_draft(self) -> Iterator[Endpoint]:
        """Yields the target with a draft that is always wrong."""
        if self.runs_own_loop:
            with self._open_pair(self.engines.load_wrong_draft()) as endpoint:
                yield endpoint
            return
        made = repositories.write_wrong_draft(self._repository, self._work / "wrong_draft")
        self._report("starting Triton, with a draft that is always wrong")
        with self._open_triton(made) as endpoint:
            yield endpoint

    @contextmanager
    def _open_pair(self, pair: Pair) -> Iterator[Endpoint]:
        """Yields a pair in this process."""
        with closing(InProcess(pair, self.tokenizer)) as endpoint:
            yield endpoint

    @contextmanager
    def open_scorer(self) -> Iterator[Scorer]:
        """Yields a scorer of texts by the target's own logits."""
        with open_scorer(self._config, dtype="float32" if self._is_float32 else None) as scorer:
            yield scorer

    @contextmanager
    def _open_triton(self, repository: Path) -> Iterator[Endpoint]:
        with served(repository) as server:
            url, end_token_ids = server.http_url, self.end_token_ids
            self.triton_version = json.loads(fetch(f"{url}/v2", timeout_s=60.0))["version"]
            with closing(
                Speculative(url, secret=server.secret, end_token_ids=end_token_ids)
            ) as endpoint:
                yield endpoint

    def _take_float32(self, max_num_draft_tokens: int) -> None:
        """Takes both checkpoints for runtime torch; the artifact's own engines where they are that.

        What a draft rounds has no part in what the target chooses.
        """
        options = self.engines.options
        longest = max(options.num_draft_tokens, max_num_draft_tokens)
        target = torch_engine(
            self._config, "target", self._work, dtype="float32", num_draft_tokens=longest
        )
        if (rounding := engine_rounding(target)) is not None:
            raise ConfigError(
                f"--float32: the target rounds {rounding}, which makes a whole step of what "
                "differs in the last place, so that its logits move by more than 1e-4 in float32, "
                "too; leave it out"
            )
        draft = torch_engine(
            self._config, "draft", self._work, dtype="float32", num_draft_tokens=longest
        )
        self.engines = dataclasses.replace(
            self.engines,
            runtime="torch",
            draft=draft,
            target=target,
            options=dataclasses.replace(options, num_draft_tokens=longest, runtime_settings={}),
        )
