"""Versions of a pair in one real Triton: promoted and rolled back while clients are answered.

Versions of odd numbers repeat the prompt from its first token, those of even numbers from the
second, so that an answer tells which of them gave it.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from specpipe.errors import ServerError, SpecpipeError
from specpipe.machine.web import fetch
from specpipe.triton.client import Client
from specpipe.triton.server import control
from tests.triton.asking import metrics
from tests.triton.conftest import write_echo_repository
from tests.triton.server.test_launcher import Launcher, WaitUntil
from tests.waiting import PATIENCE_S

PROMPT = "a b c d e f g h"
DRAIN_S = 2.0


class Served:
    """A launcher whose pair is asked for other versions."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self.launcher, self.folder = launcher, folder
        self.last_number = 0

    def promote(self, repository: str | Path = "", **choices: Any) -> dict[str, Any]:
        """Promotes the next number."""
        self.last_number += 1
        named = self.folder / (str(repository) or ("odd" if self.last_number % 2 else "even"))
        return control.ask(
            self.folder, "promote", repository=named, number=self.last_number, **choices
        )

    def rollback(self) -> dict[str, Any]:
        return control.ask(self.folder, "rollback")

    def served(self) -> tuple[int | None, int | None]:
        """The number that is served, and that which is kept loaded."""
        status = control.ask(self.folder, "status")
        previous = status["previous"]
        is_loaded = previous is not None and previous["is_loaded"]
        return status["number"], previous["number"] if is_loaded else None

    def model_processes(self) -> set[str]:
        """The models that have a process."""
        triton = self.launcher.triton()
        children = Path(f"/proc/{triton}/task/{triton}/children").read_text().split()
        lines = [Path(f"/proc/{child}/cmdline").read_text() for child in children]
        return {line.split("/1/model.py")[0].rpartition("/")[2] for line in lines if line}

    def loading(self) -> str:
        """The model that is slow to load, of the number that was promoted last."""
        return f"speculative_{self.last_number}"

    def restarts(self) -> list[str]:
        return [line for line in self.launcher.lines if "restarted" in line]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, wait_until: WaitUntil) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("versions")
    for name, first in (("odd", 0), ("even", 1)):
        write_echo_repository(folder / name, first=first)
        shutil.rmtree(folder / name / "plain")
    started = Launcher(
        folder / "even",
        wait_until,
        artifacts_dir=folder,
        drain_timeout_s=DRAIN_S,
        probe_interval_s=1,
    )
    yield Served(started, folder)
    started.end()


def answer(url: str, *, prompt: str = PROMPT, **settings: Any) -> str:
    with Client(url) as client:
        chunks = list(client.stream(prompt, **settings))
    assert chunks[-1].finish_reason == "length"
    return "".join(chunk.text for chunk in chunks)


def models(*numbers: int | None) -> set[str]:
    return {
        model if number is None else f"{model}_{number}"
        for model in ("preprocessing", "speculative", "postprocessing")
        for number in numbers
    }


def test_five_promotes_and_two_rollbacks_under_32_streams_fail_no_request(
    served: Served, wait_until: WaitUntil
) -> None:
    """Every answer is wholly that of one version, and both kinds occur."""
    settings = {"max_tokens": 40, "end_id": -1}
    urls = served.launcher.url, served.launcher.grpc_url
    texts = {answer(urls[0], **settings)}
    served.promote()
    texts.add(answer(urls[0], **settings))
    assert len(texts) == 2
    is_over = threading.Event()
    found: list[str] = []

    def ask(number: int) -> None:
        # A pause leaves the processor to what is loaded; more than the server runs at once wait.
        while not is_over.wait(1):
            found.append(answer(urls[number % 2], **settings))

    def ask_whether_ready() -> None:
        while not is_over.wait(0.05):
            for path in ("health/ready", "models/ensemble/ready"):
                try:
                    fetch(f"{urls[0]}/v2/{path}", timeout_s=PATIENCE_S)
                except OSError as exc:
                    unready.append(f"{path}: {exc}")

    changes, unready = [], list[str]()
    with ThreadPoolExecutor(33) as pool:
        asking = [pool.submit(ask, number) for number in range(32)]
        asking.append(pool.submit(ask_whether_ready))
        try:
            changes += [served.promote(keep_previous=True), served.promote(keep_previous=True)]
            changes += [served.rollback(), served.rollback()]
            changes += [served.promote(keep_previous=keep) for keep in (False, True)]
        finally:
            is_over.set()
        for one in asking:
            one.result()
    print(f"{len(found)} answers", *changes, sep="\n")
    assert set(found) == texts
    assert unready == []
    assert [(change["number"], change["is_previous_loaded"]) for change in changes] == [
        *((2, True), (3, True), (2, False), (1, False), (4, False), (5, True)),
    ]
    assert served.served() == (5, 4)
    assert wait_until(lambda: served.model_processes() == models(5, 4))
    assert served.restarts() == []


def test_what_fails_changes_nothing(served: Served, tmp_path: Path, wait_until: WaitUntil) -> None:
    before = served.served()
    broken = shutil.copytree(served.folder / "odd", tmp_path / "broken")
    (broken / "postprocessing" / "1" / "model.py").write_text("import nothing_of_that_name\n")
    silent = write_echo_repository(tmp_path / "silent", max_seq_len=1)
    for repository, reason in (
        (broken, "postprocessing_{}: ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        (silent, "the prompt has 1 tokens; prompt and output together may have 1 (engine."),
    ):
        with pytest.raises(ServerError) as caught:
            served.promote(repository)
        number = served.last_number
        why = f"version {number} is not served: {reason.format(number)}"
        assert str(caught.value).startswith(why)
        assert str(caught.value).endswith(f"; version {before[0]} answers as before")
    with pytest.raises(ServerError, match="would not serve:"):
        served.promote("nowhere")
    with pytest.raises(ServerError, match=f"version {before[0]} is served already"):
        served.last_number = (before[0] or 0) - 1
        served.promote()
    assert served.served() == before
    assert wait_until(lambda: served.model_processes() == models(*before))
    assert served.restarts() == []


def test_a_long_answer_outlives_the_drain_limit_and_is_cancelled_as_ever(
    served: Served, tmp_path: Path, wait_until: WaitUntil
) -> None:
    """Of two streams that a rollback leaves behind, one ends, the other one's client goes away.

    What was kept goes on as it was loaded, although a file of it was touched and linked since.
    """
    left, kept = served.served()
    loaded = served.launcher.pid(f"speculative_{kept}")
    touched = served.folder / "even" / "speculative" / "1" / "pair.json"
    os.link(touched, touched.with_name("linked"))
    touched.touch()

    def in_flight() -> float:
        name = f'specpipe_requests_in_flight{{model="speculative_{left}"}}'
        return metrics(served.launcher, name).get(name, 0.0)

    go = tmp_path / "go"
    settings: dict[str, Any] = {"end_id": -1, "num_draft_tokens": 0}
    with Client(served.launcher.grpc_url) as client:
        streams = [
            client.stream(f"<until {go}> a b c", max_tokens=40, **settings),
            client.stream("<slow> a b c", max_tokens=900, **settings),  # a minute
        ]
        for stream in streams:
            next(stream)
        assert wait_until(lambda: in_flight() == 2)
        assert served.rollback()["in_flight"] == 2
        streams[1].close()  # type: ignore[attr-defined]
        assert wait_until(lambda: in_flight() == 1)
        time.sleep(DRAIN_S + 1.0)
        assert in_flight() == 1
        go.touch()
        *_, last = streams[0]
    assert last.finish_reason == "length"
    assert last.statistics is not None and last.statistics.num_output_tokens == 40
    assert served.served() == (kept, None)
    assert served.launcher.pid(f"speculative_{kept}") == loaded
    assert wait_until(lambda: served.model_processes() == models(kept))
    assert served.restarts() == []


@pytest.mark.slow
def test_a_version_in_place_of_another_is_served_after_a_gap_or_the_old_one_again(
    served: Served, tmp_path: Path
) -> None:
    def is_answered() -> bool:
        try:
            answer(served.launcher.url, max_tokens=4)
        except SpecpipeError:
            return False
        return True

    before = served.served()[0]
    change = served.promote(replace=True)
    assert change["gap_s"] > change["load_s"] > 0
    assert (change["previous"], change["is_previous_loaded"]) == (before, False)
    number = served.last_number
    silent = write_echo_repository(tmp_path / "silent", max_seq_len=1)
    with pytest.raises(ServerError, match=f"the prompt has 1 tokens.*; version {number} answers"):
        served.promote(silent, replace=True)
    assert served.served() == (number, None)
    assert served.model_processes() == models(number)
    assert is_answered()
    print(change)
    assert served.restarts() == []


@pytest.mark.slow
def test_what_is_lost_of_a_kept_version_restarts_nothing(
    served: Served, wait_until: WaitUntil
) -> None:
    served.promote()
    number, kept = served.served()
    assert kept is not None
    os.kill(served.launcher.pid(f"speculative_{kept}"), signal.SIGKILL)
    assert wait_until(lambda: served.served() == (number, None))
    assert wait_until(lambda: served.model_processes() == models(number))
    assert served.rollback()["number"] == kept
    assert served.restarts() == []


@pytest.mark.slow
def test_a_killed_server_comes_back_with_what_is_served_and_what_is_kept(
    served: Served, wait_until: WaitUntil
) -> None:
    served.promote()
    before = served.served()
    text = answer(served.launcher.url, max_tokens=8, end_id=-1)
    num_lines = len(served.launcher.lines)
    os.kill(served.launcher.pid(f"speculative_{before[0]}"), signal.SIGKILL)
    assert wait_until(
        lambda: any("answers again" in line for line in served.launcher.lines[num_lines:]),
        seconds=60,
    )
    assert answer(served.launcher.url, max_tokens=8, end_id=-1) == text
    assert wait_until(lambda: served.served() == before)
    assert served.model_processes() == models(*before)


@pytest.mark.slow
def test_a_process_killed_while_it_is_loaded_is_no_fault_of_the_server(
    served: Served, tmp_path: Path, wait_until: WaitUntil
) -> None:
    before, num_restarts = served.served(), len(served.restarts())
    slow = shutil.copytree(served.folder / "odd", tmp_path / "slow")
    model = slow / "speculative" / "1" / "model.py"
    model.write_text(f"import time; time.sleep(30)\n{model.read_text()}")
    with ThreadPoolExecutor() as pool:
        change = pool.submit(served.promote, slow)
        assert wait_until(lambda: served.loading() in served.model_processes())
        name = served.loading()
        with pytest.raises(ServerError, match="another change of version is under way"):
            served.rollback()
        os.kill(served.launcher.pid(name), signal.SIGKILL)
        with pytest.raises(ServerError, match=f"{name}.*; version {before[0]} answers as before"):
            change.result(timeout=PATIENCE_S)
    assert served.served() == before
    assert served.model_processes() == models(*before)
    assert len(served.restarts()) == num_restarts


@pytest.mark.slow
def test_twenty_promotes_leave_no_memory_behind(served: Served) -> None:
    """None to speak of in Triton (2.51 grows by 110 to 210 kB each time, over 70 of them), and in
    the launcher; models have processes of their own, which end.
    """

    def held() -> dict[str, int]:
        """Kilobytes that are a process's own (proc(5), RssAnon)."""
        pids = {"tritonserver": served.launcher.triton(), "launcher": served.launcher.process.pid}
        return {
            name: int(Path(f"/proc/{pid}/status").read_text().split("RssAnon:")[1].split()[0])
            for name, pid in pids.items()
        }

    measured = []
    for _ in range(20):
        served.promote(keep_previous=False)
        answer(served.launcher.grpc_url, max_tokens=8, end_id=-1)
        measured.append(held())
    print(*measured, sep="\n")
    assert len(served.model_processes()) == 3
    for name, last in measured[-1].items():
        assert (last - measured[3][name]) / 16 < 300


@pytest.mark.slow
def test_a_launcher_that_is_told_to_end_while_it_loads_ends_in_order(
    served: Served, tmp_path: Path, wait_until: WaitUntil
) -> None:
    """The last test: a stream that runs is answered in full."""
    slow = shutil.copytree(served.folder / "odd", tmp_path / "slow")
    model = slow / "speculative" / "1" / "model.py"
    model.write_text(f"import time; time.sleep(30)\n{model.read_text()}")
    triton = served.launcher.triton()
    with ThreadPoolExecutor() as pool, Client(served.launcher.grpc_url) as client:
        change = pool.submit(served.promote, slow)
        assert wait_until(lambda: served.loading() in served.model_processes())
        go = tmp_path / "go"
        stream = client.stream(f"<until {go}> a b c", max_tokens=60, end_id=-1)
        next(stream)
        served.launcher.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: any("stopping" in line for line in served.launcher.lines))
        go.touch()
        assert list(stream)[-1].finish_reason == "length"
        with pytest.raises(ServerError, match="the server was told to end|ended before"):
            change.result(timeout=PATIENCE_S)
    assert served.launcher.process.wait(PATIENCE_S) == 0
    assert not Path(f"/proc/{triton}").exists()
    assert not (served.folder / control.NAME).exists()
    assert not list(Path("/dev/shm").glob(f"specpipe_{served.launcher.process.pid}_*"))


@pytest.mark.slow
def test_a_launcher_that_is_killed_while_it_loads_leaves_nothing(
    served: Served, tmp_path: Path, wait_until: WaitUntil
) -> None:
    slow = shutil.copytree(served.folder / "odd", tmp_path / "slow")
    model = slow / "speculative" / "1" / "model.py"
    model.write_text(f"import time; time.sleep(5)\n{model.read_text()}")
    killed = Served(Launcher(served.folder / "odd", wait_until, artifacts_dir=tmp_path), tmp_path)
    try:
        triton = killed.launcher.triton()
        with ThreadPoolExecutor() as pool:
            change = pool.submit(killed.promote, slow)
            assert wait_until(lambda: killed.loading() in killed.model_processes())
            pids = [triton, *(killed.launcher.pid(name) for name in killed.model_processes())]
            killed.launcher.process.kill()
            with pytest.raises(ServerError, match="ended before it had answered"):
                change.result(timeout=PATIENCE_S)
        assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
        assert not control.is_served(tmp_path)
    finally:
        killed.launcher.end()


@pytest.mark.slow
def test_greedy_and_seeded_answers_of_real_pairs_are_wholly_of_one_version(
    quickstart_repository: Path, tmp_path: Path, wait_until: WaitUntil
) -> None:
    """The even versions have the quickstart pair's draft in place of its target."""
    for name in ("odd", "even"):
        shutil.copytree(quickstart_repository, tmp_path / name)
    engines = tmp_path / "even" / "speculative" / "1"
    shutil.rmtree(engines / "target")
    shutil.copytree(engines / "draft", engines / "target")
    options: dict[str, Any] = {"artifacts_dir": tmp_path, "drain_timeout_s": 300}
    served = Served(Launcher(tmp_path / "even", wait_until, **options), tmp_path)
    urls = served.launcher.url, served.launcher.grpc_url
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 7}]

    def ask(number: int) -> str:
        settings = {"max_tokens": 40, "end_id": -1, **kinds[number // 2 % 2]}
        return answer(urls[number % 2], prompt="def add(a, b):", **settings)

    try:
        texts = [{ask(0)}, {ask(2)}]
        print(served.promote())
        for kind, known in enumerate(texts):
            known.add(ask(2 * kind))
        assert [len(known) for known in texts] == [2, 2]
        is_over = threading.Event()
        found: list[set[str]] = [set(), set()]

        def ask_on(number: int) -> int:
            count = 0
            while not is_over.is_set():
                found[number // 2 % 2].add(ask(number))
                count += 1
            return count

        with ThreadPoolExecutor(32) as pool:
            asking = [pool.submit(ask_on, number) for number in range(32)]
            try:
                print(*(served.promote() for _ in range(3)), sep="\n")
                print(served.rollback(), served.rollback(), served.promote(), sep="\n")
                print(served.promote())
            finally:
                is_over.set()
            print(sum(one.result() for one in asking), "answers")
        assert found == texts
        assert served.restarts() == []
    finally:
        served.launcher.end()
