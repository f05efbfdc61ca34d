from __future__ import annotations


class Quiet:
    """A reporter of builds that says nothing."""

    def started(self, stage: str, reasons: object) -> None: ...

    def waiting(self, stage: str) -> None: ...

    def finished(self, report: object) -> None: ...
