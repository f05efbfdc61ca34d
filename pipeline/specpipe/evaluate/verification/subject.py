"""What is verified, and the ways to ask it: served as it is, with K as asked, and the controls."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
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
from specpipe.machine.callables import Log
from specpipe.machine.web import fetch
from specpipe.runtimes.pair.pair import Pair
from specpipe.runtimes.pair_file import read_pair
from specpipe.runtimes.runtime import load_runtime


class Subject:
    """A built pair, or its two checkpoints in float32; `work` is a folder for what that takes."""

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
            self.is_artifact = not any(engine.is_relative_to(work) for engine in engines)
        self.tokenizer = self.engines.tokenizer
        self.end_token_ids = self.tokenizer.end_token_ids

    @property
    def runtime(self) -> str:
        return self.engines.runtime

    @property
    def runs_own_loop(self) -> bool:
        """As `Runtime` has it; TensorRT-LLM's engines draw with a noise of their own."""
        return load_runtime(self.runtime).runs_own_loop

    def open_as_asked(self) -> AbstractContextManager[Endpoint]:
        """Returns the pair with K as a request asks, all of it drafted by the draft."""
        if self.is_in_process:
            return self._open_pair(self.engines.load)
        return self._open_triton("with K as asked", repositories.write_as_asked, "as_asked")

    def open_as_served(self) -> AbstractContextManager[Endpoint]:
        """Returns the pair as it is."""
        if self.is_in_process:
            return _opened(lambda: InProcess.load(self._repository))
        return self._open_triton("as served", lambda repository, out: repository, "as_served")

    def open_without_draft(self) -> AbstractContextManager[Endpoint]:
        """Returns the target alone, of a pair that drafts in every step of every request."""
        write = partial(repositories.write_without_draft, self._config)
        return self._open_triton("without a draft", write, "without_draft")

    def open_own_draft(self) -> AbstractContextManager[Endpoint]:
        """Returns the target as its own draft."""
        if self.runs_own_loop:
            return self._open_pair(self.engines.load_own_draft)
        how = "with the target as its own draft"
        return self._open_triton(how, repositories.write_own_draft, "own_draft")

    def open_wrong_draft(self) -> AbstractContextManager[Endpoint]:
        """Returns the target with a draft that is always wrong."""
        if self.runs_own_loop:
            return self._open_pair(self.engines.load_wrong_draft)
        how = "with a draft that is always wrong"
        return self._open_triton(how, repositories.write_wrong_draft, "wrong_draft")

    def open_scorer(self) -> AbstractContextManager[Scorer]:
        """Returns a scorer of texts by the target's own logits."""
        return open_scorer(self._config, dtype="float32" if self._is_float32 else None)

    def _open_pair(self, load: Callable[[], Pair]) -> AbstractContextManager[Endpoint]:
        return _opened(lambda: InProcess(load(), self.tokenizer))

    @contextmanager
    def _open_triton(
        self, how: str, write: Callable[[Path, Path], Path], folder: str
    ) -> Iterator[Endpoint]:
        """Serves the repository that `write` makes of the artifact's in a folder of that name."""
        repository = write(self._repository, self._work / folder)
        self._report(f"starting Triton, {how}")
        with served(repository) as server:
            url, end_token_ids = server.http_url, self.end_token_ids
            self.triton_version = json.loads(fetch(f"{url}/v2", timeout_s=60.0))["version"]
            speculative = Speculative(url, secret=server.secret, end_token_ids=end_token_ids)
            with closing(speculative) as endpoint:
                yield endpoint

    def _take_float32(self, max_num_draft_tokens: int) -> None:
        """Takes both checkpoints for runtime torch; the artifact's own engines where they are that.

        What a draft rounds has no part in what the target chooses.
        """
        options = self.engines.options
        longest = max(options.num_draft_tokens, max_num_draft_tokens)
        build = partial(
            torch_engine, self._config, work=self._work, dtype="float32", num_draft_tokens=longest
        )
        target = build("target")
        if (rounding := engine_rounding(target)) is not None:
            raise ConfigError(
                f"--float32: the target rounds {rounding}, which makes a whole step of what "
                "differs in the last place, so that its logits move by more than 1e-4 in float32, "
                "too; leave it out"
            )
        self.engines = dataclasses.replace(
            self.engines,
            runtime="torch",
            draft=build("draft"),
            target=target,
            options=dataclasses.replace(options, num_draft_tokens=longest, runtime_settings={}),
        )


@contextmanager
def _opened(load: Callable[[], InProcess]) -> Iterator[Endpoint]:
    with closing(load()) as endpoint:
        yield endpoint
