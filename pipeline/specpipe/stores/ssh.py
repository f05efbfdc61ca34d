"""A store on a machine behind SSH, by SFTP: who it is and who we are is decided as ssh does.

~/.ssh/config, keys of the agent and of ~/.ssh; a host key that known_hosts lacks is refused.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import paramiko
from fsspec.implementations.sftp import SFTPFileSystem

from specpipe.errors import StoreError
from specpipe.stores.objects import Tree
from specpipe.stores.patience import ANSWER_S, CONNECT_S

# What breaks is raised, too; without a handler Python prints what a library logs.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

_KNOWN_HOSTS = (Path("/etc/ssh/ssh_known_hosts"), Path("~/.ssh/known_hosts"))
_CONFIG = Path("~/.ssh/config")
_KEEPALIVE_S = 15
_PIECE_BYTES = 1 << 18  # the library puts together what it returns, 32 KiB at a time


class Ssh(Tree):
    """Files of a machine behind OpenSSH's server, whose rename of SFTP replaces no file."""

    num_threads = 4  # channels of one connection, of which sshd's MaxSessions allows ten

    def entry_is_there(self, path: str) -> bool:
        try:
            self.fs.info(path)
        except FileNotFoundError:
            return False
        return True

    def rename_new(self, staged: str, path: str) -> bool:
        try:
            # SSH_FXP_RENAME: link(2) and unlink(2) in sftp-server.c
            self.fs.ftp.rename(staged, path)
        except OSError:
            if self.entry_is_there(path):
                return False
            raise
        return True

    def read_range(self, name: str, start: int, end: int) -> bytes:
        with self.fs.ftp.open(self.path(name), "rb") as file:
            file.seek(start)
            # Asked for at once, and only where it is: the library waits for what is not.
            end = min(end, file.stat().st_size)
            file.prefetch(end)
            pieces = range(start, end, _PIECE_BYTES)
            return b"".join(file.read(min(_PIECE_BYTES, end - piece)) for piece in pieces)

    def settle(self, file: Any) -> None:
        """Nothing: SFTP asks a server for no fsync(2) in this library."""


class Sftp(SFTPFileSystem):  # type: ignore[misc]
    """fsspec's SFTP with a channel for each thread, and a new connection where one broke.

    One channel answers one thread at a time; fsspec's own takes any host key.
    """

    def __init__(self, host: str, user: str | None, port: int | None) -> None:
        self._host, self._user, self._port = host, user, port
        self._client: paramiko.SSHClient | None = None
        self._lock = threading.Lock()
        self._own = threading.local()
        super().__init__(host, skip_instance_cache=True)

    def _connect(self) -> None:
        """Nothing yet: a call connects."""

    @property
    def ftp(self) -> Any:
        """This thread's channel."""
        channel = getattr(self._own, "sftp", None)
        transport = self._transport()
        if channel is None or channel.sock.closed or channel.sock.get_transport() is not transport:
            channel = paramiko.SFTPClient.from_transport(transport)
            channel.get_channel().settimeout(ANSWER_S)
            self._own.sftp = channel
        return channel

    def makedirs(self, path: str, exist_ok: bool = False, mode: int = 0o777) -> None:
        if self._is_folder(path):
            return
        parent = path.rpartition("/")[0]
        if parent:
            self.makedirs(parent, exist_ok=True)
        try:
            self.ftp.mkdir(path, mode)
        except OSError:
            if not self._is_folder(path):  # another one may just have made it
                raise

    def _is_folder(self, path: str) -> bool:
        try:
            return bool(self.info(path)["type"] == "directory")
        except FileNotFoundError:
            return False

    def _open(self, path: str, mode: str = "rb", **settings: Any) -> Any:
        file = super()._open(path, mode, **settings)
        file.set_pipelined("w" in mode)
        return file

    def _transport(self) -> Any:
        with self._lock:
            transport = None if self._client is None else self._client.get_transport()
            if transport is None or not transport.is_active():
                if self._client is not None:
                    self._client.close()
                self._client = self._connected()
                transport = self._client.get_transport()
            return transport

    def _connected(self) -> paramiko.SSHClient:
        config = _config(self._host)
        client = paramiko.SSHClient()
        for path in _KNOWN_HOSTS:
            with suppress(FileNotFoundError):
                client.load_system_host_keys(str(path.expanduser()))
        client.set_missing_host_key_policy(_Refuse())
        port = self._port or int(config.get("port", 22))
        try:
            client.connect(
                config.get("hostname", self._host),
                port,
                self._user or config.get("user"),
                key_filename=config.get("identityfile"),
                sock=paramiko.ProxyCommand(config["proxycommand"])
                if "proxycommand" in config
                else None,
                timeout=CONNECT_S,
                banner_timeout=CONNECT_S,
                auth_timeout=CONNECT_S,
            )
        except paramiko.BadHostKeyException:
            raise StoreError(
                f"{self._host} shows another host key than known_hosts has: it is another machine, "
                "or was installed anew; ask who runs it"
            ) from None
        except paramiko.SSHException as exc:
            is_refused = isinstance(exc, paramiko.AuthenticationException)
            if is_refused or "No authentication methods" in str(exc):
                raise StoreError(
                    f"{self._host} takes no key of the SSH agent or of ~/.ssh: try `ssh "
                    f"{self._host}` first"
                ) from None
            raise
        client.get_transport().set_keepalive(_KEEPALIVE_S)
        return client


class _Refuse(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]
    """Takes no host key that is not known."""

    def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
        raise StoreError(
            f"the host key of {hostname} is not in known_hosts: connect with `ssh` once, compare "
            "its fingerprint, and accept it"
        )


def _config(host: str) -> dict[str, Any]:
    """Returns what ~/.ssh/config says of a host."""
    try:
        return dict(paramiko.SSHConfig.from_path(str(_CONFIG.expanduser())).lookup(host))
    except FileNotFoundError:
        return {}
    except paramiko.ConfigParseError:
        raise StoreError(f"{_CONFIG} cannot be read by paramiko") from None
