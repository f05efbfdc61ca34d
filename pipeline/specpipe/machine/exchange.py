"""Two paths that change places at once, so that no kill leaves a name without its folder."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

_AT_FDCWD = -100  # linux/fcntl.h
_RENAME_EXCHANGE = 2  # linux/fs.h

# rename(2): an old kernel, a file system that does not know the flag, a filter of system calls.
_NOT_HERE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


def exchange(first: Path, second: Path) -> bool:
    """Lets two existing paths of one file system change places; returns whether that is known here.

    renameat2(2), Linux 3.15, glibc 2.28; NFS and some overlays do not have it.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    sys.audit("os.rename", str(first), str(second), -1, -1)  # as Python's own renames do
    paths = [os.fsencode(first), os.fsencode(second)]
    if rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_HERE:
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))
