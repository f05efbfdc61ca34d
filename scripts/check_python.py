"""Exits with one sentence where a Python cannot run specpipe with the Triton that pip installs.

Run by the Makefile, with whatever `python3` is: so it is written for old ones, too.
`--compile-numpy` allows Python 3.13, for which NumPy 1 has no wheel.
"""

# ruff: noqa: UP031

import platform
import sys

OLDEST, NEWEST, WITH_WHEELS = (3, 10), (3, 13), (3, 12)
GLIBC = (2, 35)  # of nvidia-pytriton 0.7's wheel, manylinux_2_35


def fault(compiles_numpy):
    version = sys.version_info[:2]
    name = "Python %d.%d (%s)" % (version + (sys.executable,))
    if not OLDEST <= version <= NEWEST:
        return (
            name + " does not fit: specpipe runs on 3.10 to 3.13; name one with PYTHON=python3.12"
        )
    if not sys.platform.startswith("linux"):
        return "the Triton that pip installs is for Linux, not for %s" % sys.platform
    libc, number = platform.libc_ver()
    if libc != "glibc" or tuple(map(int, number.split(".")[:2])) < GLIBC:
        return (
            "the Triton that pip installs needs glibc 2.35 or later, as Debian 12 and Ubuntu 22.04 "
            "have it; here is %s" % (" ".join((libc, number)).strip() or "another libc")
        )
    if version > WITH_WHEELS and not compiles_numpy:
        return (
            name
            + ": Triton's Python models need NumPy 1, which has no wheel for 3.13; name an older "
            "Python with PYTHON=python3.12, or let NumPy be compiled, 10 to 20 minutes, with "
            "COMPILE_NUMPY=1"
        )
    wanted = "pip" if sys.prefix != sys.base_prefix else "ensurepip"
    try:
        __import__(wanted)
    except ImportError:
        if wanted == "pip":
            return "the environment %s has no pip: remove it, and it is made anew" % sys.prefix
        return (
            "%s cannot make virtual environments: install its package, as in apt-get install "
            "python%d.%d-venv" % ((name,) + version)
        )
    return None


if __name__ == "__main__":
    sys.exit(fault("--compile-numpy" in sys.argv[1:]))
