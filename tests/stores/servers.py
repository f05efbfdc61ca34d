"""The places that a store can be in, each with a real server on loopback that can be killed."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from specpipe.stores.places import open_store
from specpipe.stores.store import Blob, Store

_START_S = 60.0  # generous: a slow machine may start a server slowly
SECRET = "a-secret-of-the-tests"
USERS = ("publisher", "stranger")


class Place:
    """Somewhere that holds stores; a folder needs no server.

    folder            where the server keeps what it has, and its settings
    replaces_damaged  whether an upload can put right what is damaged
    forgets           whether what it had is gone once it was killed
    """

    name = ""
    has_server = True
    replaces_damaged = True
    forgets = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = _free_port()
        self._server: subprocess.Popen[bytes] | None = None

    def url(self, store: str) -> str:
        """Returns the URL of a store of this place."""
        raise NotImplementedError

    def command(self) -> list[str]:
        """Returns the command line of the server."""
        raise NotImplementedError

    def prepare(self, patch: pytest.MonkeyPatch) -> None:
        """Writes the server's settings, and sets what clients read of the environment."""

    def settings(self) -> dict[str, Any]:
        """Returns what the server's process is started with."""
        return {}

    def open(self, store: str, **settings: Any) -> Store:
        """Opens a store of this place."""
        return open_store(self.url(store), self.folder, **settings)

    def start(self) -> None:
        """Starts the server, with what it had before."""
        with (self.folder / "server.log").open("ab") as log:
            self._server = subprocess.Popen(
                self.command(), stdout=log, stderr=log, start_new_session=True, **self.settings()
            )
        began = time.monotonic()
        while not _answers(self.port):
            assert self._server.poll() is None, (self.folder / "server.log").read_text()
            assert time.monotonic() - began < _START_S, "the server does not start"
            time.sleep(0.05)

    def kill(self) -> None:
        """Kills the server at once, with all its processes."""
        if self._server is not None:
            for process in _descendants(self._server.pid):  # sshd's leave its group
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self._server.wait()
            self._server = None

    def damage(self, store: str, blob: Blob) -> None:
        """Changes a byte of a content, behind the server's back."""
        path = self.content(store, blob)
        path.write_bytes(b"\xff" + path.read_bytes()[1:])

    def content(self, store: str, blob: Blob) -> Path:
        """Returns the file in which the server keeps a content."""
        return self.folder / store / "blobs" / "sha256" / blob.sha256[:2] / blob.sha256


class FolderPlace(Place):
    """A folder."""

    name = "folder"
    has_server = False

    def url(self, store: str) -> str:
        return str(self.folder / store)

    def start(self) -> None: ...


class S3Place(Place):
    """moto's S3 server, which holds all in memory."""

    name = "s3"
    forgets = True

    def url(self, store: str) -> str:
        return f"s3://bucket/{store}"

    def prepare(self, patch: pytest.MonkeyPatch) -> None:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{self.port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "an-id-of-the-tests")
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    def command(self) -> list[str]:
        program = "from moto.server import main; main()"
        return [sys.executable, "-c", program, "-H", "127.0.0.1", "-p", str(self.port)]

    def start(self) -> None:
        super().start()
        self._filesystem().mkdir("bucket")

    def damage(self, store: str, blob: Blob) -> None:
        path = f"bucket/{store}/blobs/sha256/{blob.sha256[:2]}/{blob.sha256}"
        filesystem = self._filesystem()
        filesystem.pipe_file(path, b"\xff" + filesystem.cat_file(path)[1:])

    def _filesystem(self) -> Any:
        import s3fs

        return s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)


class SshPlace(Place):
    """OpenSSH's server, which lets one key in; run by nobody, since root would need its user."""

    name = "ssh"

    def url(self, store: str) -> str:
        return f"ssh://{self._user()}@127.0.0.1:{self.port}{self.folder}/{store}"

    def _user(self) -> str:
        return "nobody" if os.getuid() == 0 else getpass.getuser()

    def prepare(self, patch: pytest.MonkeyPatch) -> None:
        import paramiko

        home = self.folder / "home"
        (home / ".ssh").mkdir(parents=True, mode=0o700)
        key, host_key = paramiko.ECDSAKey.generate(), paramiko.ECDSAKey.generate()
        key.write_private_key_file(str(home / ".ssh" / "id_ecdsa"))
        host_key.write_private_key_file(str(self.folder / "host_key"))
        (home / ".ssh" / "known_hosts").write_text(
            f"[127.0.0.1]:{self.port} {host_key.get_name()} {host_key.get_base64()}\n"
        )
        (self.folder / "authorized_keys").write_text(f"{key.get_name()} {key.get_base64()}\n")
        (self.folder / "sshd_config").write_text(
            f"ListenAddress 127.0.0.1\nPort {self.port}\nHostKey {self.folder}/host_key\n"
            f"AuthorizedKeysFile {self.folder}/authorized_keys\nPidFile none\nUsePAM yes\n"
            "StrictModes no\nPasswordAuthentication no\nSubsystem sftp internal-sftp\n"
        )
        if os.getuid() == 0:
            for path in (self.folder, *self.folder.iterdir()):
                shutil.chown(path, "nobody", "nogroup")
        patch.setenv("HOME", str(home))
        patch.delenv("SSH_AUTH_SOCK", raising=False)

    def settings(self) -> dict[str, Any]:
        program = Path(self._program())
        libraries = [str(path) for path in program.parents[1].glob("lib/*-linux-gnu")]
        as_nobody = {"user": "nobody", "group": "nogroup", "extra_groups": []}
        return {
            "env": {**os.environ, "LD_LIBRARY_PATH": ":".join(libraries)},
            **(as_nobody if os.getuid() == 0 else {}),
        }

    def command(self) -> list[str]:
        return [self._program(), "-D", "-e", "-f", str(self.folder / "sshd_config")]

    def _program(self) -> str:
        return program("sshd", "openssh-server")


class OciPlace(Place):
    """Docker's registry, on a folder."""

    name = "oci"
    replaces_damaged = False

    def url(self, store: str) -> str:
        return f"oci://127.0.0.1:{self.port}/specpipe/{store}"

    def prepare(self, patch: pytest.MonkeyPatch) -> None:
        import bcrypt

        patch.setenv("DOCKER_CONFIG", str(self.folder))
        patch.setenv("ORAS_USER", "publisher")
        patch.setenv("ORAS_PASS", SECRET)
        password = bcrypt.hashpw(SECRET.encode(), bcrypt.gensalt(4)).decode()
        (self.folder / "htpasswd").write_text(f"publisher:{password}\n")
        settings = {
            "version": "0.1",
            "log": {"level": "warn"},
            "storage": {
                "filesystem": {"rootdirectory": str(self.folder)},
                "delete": {"enabled": True},
            },
            "auth": {"htpasswd": {"realm": "tests", "path": str(self.folder / "htpasswd")}},
            "http": {"addr": f"127.0.0.1:{self.port}", "secret": "of the registry itself"},
        }
        (self.folder / "config.yml").write_text(yaml.safe_dump(settings))

    def command(self) -> list[str]:
        registry = program("docker-registry", "docker-registry")
        return [registry, "serve", str(self.folder / "config.yml")]

    def content(self, store: str, blob: Blob) -> Path:
        blobs = self.folder / "docker" / "registry" / "v2" / "blobs"
        return blobs / "sha256" / blob.sha256[:2] / blob.sha256 / "data"


def program(name: str, package: str) -> str:
    """Returns where a program is; skips the test without it."""
    # Debian has daemons in /usr/sbin, which is not on everybody's PATH.
    folders = os.environ["PATH"].split(os.pathsep)
    beside = [str(Path(folder).parent / "sbin") for folder in folders]
    found = shutil.which(name, path=os.pathsep.join([*folders, *beside, "/usr/sbin"]))
    if found is None:
        pytest.skip(f"{name} (Debian: {package}) is not installed")
    return found


def _descendants(process: int) -> list[int]:
    """Returns a process and those that it started: proc(5), /proc/PID/task/TID/children."""
    try:
        tasks = [*Path(f"/proc/{process}/task").iterdir()]
        children = [int(child) for t in tasks for child in (t / "children").read_text().split()]
    except FileNotFoundError:
        return []
    return [process, *(found for child in children for found in _descendants(child))]


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


def _answers(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


PLACES: dict[str, type[Place]] = {
    kind.name: kind for kind in (FolderPlace, S3Place, SshPlace, OciPlace)
}
