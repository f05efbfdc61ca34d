"""A stand-in for `docker run` with NVIDIA's image, `docker kill` and `docker image inspect`.

It takes exactly the options that specpipe has a reason to give, checks them, and runs the program
with the paths of this machine in place of the mounts. The environment:

FAKE_BIN      the folder of the fakes, which are the image's programs
FAKE_STATE    a folder that records each call as JSON lines, and the process of each container
FAKE_IMAGE    the image that there is, else any
FAKE_DIGESTS  the names by digest of the image that there is, with spaces between
FAKE_DOCKER   `down`: no daemon answers; `no_gpus`: no container toolkit
"""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path


def refuse(message: str, exit_code: int = 125) -> None:
    print(f"docker: {message}", file=sys.stderr, flush=True)
    sys.exit(exit_code)


def main(argv: list[str]) -> None:
    if argv[0] == "version" and os.environ.get("FAKE_DOCKER") != "down":
        print("28.2.2")
        return
    with open(state("calls.jsonl"), "a", encoding="utf-8") as calls:
        calls.write(json.dumps(argv) + "\n")
    if os.environ.get("FAKE_DOCKER") == "down":
        refuse("Cannot connect to the Docker daemon at unix:///var/run/docker.sock.", 1)
    if argv[0] == "kill":
        with suppress(ProcessLookupError):
            os.killpg(int(state(argv[1]).read_text()), signal.SIGKILL)
        return
    if argv[:2] == ["image", "inspect"]:
        if (
            argv[2:4] != ["--format", '{{join .RepoDigests " "}}']
            or "FAKE_DIGESTS" not in os.environ
        ):
            refuse(f"Error response from daemon: No such image: {argv[-1]}", 1)
        print(os.environ["FAKE_DIGESTS"])
        return
    if argv[0] != "run":
        refuse(f"'{argv[0]}' is not a docker command.", 1)
    run(argv[1:])


def run(words: list[str]) -> None:
    options: dict[str, list[str]] = {}
    while words[0].startswith("--"):
        option = words.pop(0)
        if option in ("--rm", "--init"):
            options[option] = []
        elif option in ("--name", "--gpus", "--user", "--env", "--workdir", "--mount"):
            options.setdefault(option, []).append(words.pop(0))
        else:
            refuse(f"unknown flag: {option}")
    image = words.pop(0)
    if image != os.environ.get("FAKE_IMAGE", image):
        refuse(f"Error response from daemon: manifest for {image} not found: manifest unknown")
    if os.environ.get("FAKE_DOCKER") == "no_gpus":
        refuse('Error response from daemon: could not select device driver "" with capabilities')
    if "--rm" not in options:
        refuse("a container would be left behind")
    (gpus,) = options["--gpus"]
    if not re.fullmatch(r'"device=\d+(,\d+)*"', gpus):
        refuse(f"invalid argument {gpus} for --gpus")
    if options["--user"] != [f"{os.getuid()}:{os.getgid()}"]:
        refuse("not the calling user")
    mounts = [mount(text) for text in options.get("--mount", [])]
    start(options["--name"][0], [here(word, mounts) for word in words])


def mount(text: str) -> tuple[Path, str, bool]:
    """Reads a bind mount: the folder here, that in the container, and whether it is read-only."""
    (fields,) = csv.reader([text])
    values = dict(field.split("=", 1) for field in fields if "=" in field)
    if values["type"] != "bind" or not Path(values["source"]).exists():
        refuse(f"invalid mount config: bind source path does not exist: {values['source']}")
    return Path(values["source"]), values["target"], "readonly" in fields


def here(word: str, mounts: list[tuple[Path, str, bool]]) -> str:
    for source, target, _ in mounts:
        if word == target or word.startswith(f"{target}/"):
            return str(source) + word[len(target) :]
    if word.startswith("/specpipe"):
        refuse(f"{word} is not mounted")
    return word


def start(name: str, line: list[str]) -> None:
    """Runs the container in a group of its own: killing the client leaves it running."""
    programs = Path(os.environ["FAKE_BIN"])
    if line[0] == "python3":
        line = [sys.executable, *line[1:]]
    else:
        line = [sys.executable, str(programs / "fake_trtllm_build.py"), *line[1:]]
    process = subprocess.Popen(line, start_new_session=True)
    state(name).write_text(str(process.pid))
    exit_code = process.wait()
    sys.exit(128 - exit_code if exit_code < 0 else exit_code)


def state(name: str) -> Path:
    return Path(os.environ["FAKE_STATE"], name)


if __name__ == "__main__":
    main(sys.argv[1:])
