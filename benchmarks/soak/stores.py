"""The stores of a soak: a folder, or S3 by moto's server, and how each goes away and comes back.

A folder is away when a file stands in its place: that is what root cannot read either. The S3
server is away when nothing listens where clients look for it, and those that were connected are cut
off; it keeps all in memory, so it runs on behind that.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from specpipe.errors import SpecpipeError

_START_S = 60.0
_BLOCK_BYTES = 1 << 16
_LOOPBACK = "127.0.0.1"


class Store(Protocol):
    """Where versions are published; `url` is what a YAML has, `kind` what people read."""

    kind: str
    url: str

    def leave(self) -> None:
        """Takes it away, also from who is about to use it."""

    def come_back(self) -> None: ...


class FolderStore:
    """A folder, as a link that can lead elsewhere."""

    kind = "a folder"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "store.there").mkdir()
        (folder / "store.away").write_text("what stands where a store should be\n")
        self.url = str(folder / "store")
        self.come_back()

    def leave(self) -> None:
        self._point_to("store.away")

    def come_back(self) -> None:
        self._point_to("store.there")

    def _point_to(self, name: str) -> None:
        link = self._folder / "store.link"
        link.symlink_to(name)
        link.replace(self.url)


class S3Store:
    """A server of its own behind a port of this process."""

    kind = "S3 by moto's server"
    url = "s3://soak/releases"

    def __init__(self, server_port: int, port: int) -> None:
        self._server_port, self._port = server_port, port
        self._listener: socket.socket | None = None
        self._open: list[socket.socket] = []

    def come_back(self) -> None:
        self._listener = socket.create_server((_LOOPBACK, self._port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def leave(self) -> None:
        assert self._listener is not None
        for end in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._open.clear()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
                server = socket.create_connection((_LOOPBACK, self._server_port))
            except OSError:  # it was taken away
                return
            self._open += [client, server]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=_pass_on, args=(source, sink), daemon=True).start()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with source, contextlib.suppress(OSError):
        while block := source.recv(_BLOCK_BYTES):
            sink.sendall(block)
        sink.shutdown(socket.SHUT_WR)


@contextmanager
def s3_store() -> Iterator[S3Store]:
    """Starts moto's server, with a bucket, and tells this process's children where it is."""
    with socket.create_server((_LOOPBACK, 0)) as one, socket.create_server((_LOOPBACK, 0)) as other:
        server_port, port = one.getsockname()[1], other.getsockname()[1]
    program = "from moto.server import main; main()"
    server = subprocess.Popen(
        [sys.executable, "-c", program, "-H", _LOOPBACK, "-p", str(server_port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _await(server, server_port)
        os.environ.update(
            AWS_ENDPOINT_URL=f"http://{_LOOPBACK}:{port}",
            AWS_ACCESS_KEY_ID="an-id",
            AWS_SECRET_ACCESS_KEY="a-secret",
            AWS_DEFAULT_REGION="us-east-1",
            AWS_EC2_METADATA_DISABLED="true",
        )
        store = S3Store(server_port, port)
        store.come_back()
        _make_bucket()
        yield store
        store.leave()
    finally:
        server.kill()
        server.wait()


def _await(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and server.poll() is None:
        with socket.socket() as asking:
            if asking.connect_ex((_LOOPBACK, port)) == 0:
                return
        time.sleep(0.05)
    raise SpecpipeError("moto's server did not start: --store s3 needs moto[s3,server] and s3fs")


def _make_bucket() -> None:
    import s3fs

    s3fs.S3FileSystem(skip_instance_cache=True).mkdir("soak")
