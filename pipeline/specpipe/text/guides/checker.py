"""Compiles guides in a process of its own, which may be killed: what a client sent may take any
time, memory or stack to compile.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from typing import Any

from specpipe.speculative.guide import Guide
from specpipe.text import worker_process
from specpipe.text.guides import grammar
from specpipe.text.guides.vocabulary import make_tokenizer

_STACK_BYTES = 1 << 20
"""Half of the least that a thread has (pthread_create(3): 2 MB where there is no limit), so that
what does not end this process ends none that serves.
"""


def serve() -> None:
    """Checks guides until the other end is closed or its process gone."""
    worker_process.serve(_prepare)


def _prepare(setup: Mapping[str, Any]) -> worker_process.Work:
    tokens = [token.encode("latin-1") for token in setup["tokens"]]
    tokenizer = make_tokenizer(tokens)
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, most))

    def check(work: Mapping[str, Any]) -> dict[str, str] | None:
        guide = Guide(**work)
        try:
            matcher = grammar.compiled(guide, tokenizer)
            matcher.compute_bitmask()
            if matcher.is_error():
                raise grammar.GuideFault(grammar.reason_of(matcher))
        except grammar.GuideFault as exc:
            reason = str(exc)
            is_schema = guide.type == "json_schema"
            path = grammar.find_path(guide.text, reason, tokenizer) if is_schema else ""
            return {"path": path, "reason": reason}
        return None

    return check
