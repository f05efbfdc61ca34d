from __future__ import annotations

from http.server import ThreadingHTTPServer


class Quiet:
    """A reporter of builds that says nothing."""

    def planned(self, reports: object) -> None: ...

    def started(self, stage: str, reasons: object) -> None: ...

    def waiting(self, stage: str) -> None: ...

    def finished(self, report: object) -> None: ...


class QuietServer(ThreadingHTTPServer):
    """A server that does not tell the test's stderr of clients that leave early."""

    def handle_error(self, *_: object) -> None: ...
