"""Chat templates as no friend writes them, and the process that bears the consequences."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from specpipe.checkpoints.limits import FileLimits
from specpipe.errors import CheckpointError, RequestError, SpecpipeError
from specpipe.text.chat_template import ChatTemplate
from tests.waiting import wait_until

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HI = [{"role": "user", "content": "hi"}]
MEMORY = "needs more than 67108864 bytes of memory (serving.limits.chat_template_memory_bytes)"
TIME = "takes longer than 0.2 s (serving.limits.chat_template_seconds)"
NESTED = "it is nested too deeply"

LIMITS = FileLimits(chat_template_seconds=20.0, chat_template_memory_bytes=64 << 20)
HURRIED = LIMITS.model_copy(update={"chat_template_seconds": 0.2})
A_SECOND = LIMITS.model_copy(update={"chat_template_seconds": 1.0})


def template(source: str, limits: FileLimits = LIMITS) -> ChatTemplate:
    return ChatTemplate(source, file="FILE", special_tokens={}, limits=limits)


def refusal(made: ChatTemplate, messages: Any = HI) -> str:
    with pytest.raises(RequestError) as error:
        made.render(messages)
    return str(error.value)


def children() -> set[int]:
    """The processes of this one, zombies included."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def worker_of(made: ChatTemplate) -> int:
    before = children()
    made.warm_up()
    (pid,) = children() - before
    return pid


def wait_until_gone(pid: int) -> None:
    assert wait_until(lambda: not Path(f"/proc/{pid}").exists())


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("{{ '%1000000000d' % 1 }}", MEMORY),
        ("{{ 'x'|center(10**9) }}", MEMORY),
        ("{{ 'a' * 10**10 }}", MEMORY),
        ("{{ '{:>9999999999}'.format(1) }}", MEMORY),
        ("{{ 'a'.ljust(10**10) }}", MEMORY),
        ("{{ ('a' * 10**4).replace('a', 'b' * 10**6) }}", MEMORY),
        ("{{ 'a\nb'|indent(10**9) }}", MEMORY),
        ("{{ messages|tojson(indent=10**9) }}", MEMORY),
        ("{{ [1]|batch(10**9, 0)|list }}", MEMORY),
        ("{{ strftime_now('%Y' * 10**8) }}", MEMORY),
        ("{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
         "{% endfor %}", MEMORY),
        (LOOPS, TIME),
        ("{{ 9 ** (9 ** 9) }}", TIME),
        ("{{ lipsum(n=10**6) }}", TIME),
        ("{{ ('a ' * 10**7)|wordwrap(1) }}", TIME),
        ("{{ 1" + "+1" * 100_000 + " }}", TIME),
        ("{% for i in range(99999) %}{{ 'a' * 10**5 }}{% endfor %}",
         "the prompt has more than 16777216 bytes (serving.limits.max_prompt_bytes)"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", NESTED),
        ("{{ " + "(" * 10**5 + "1" + ")" * 10**5 + " }}", NESTED),
        ("{{ " + "[" * 10**5 + "]" * 10**5 + " }}", NESTED),
        ("{{ " + "not " * 10**5 + "1 }}", NESTED),
        ("{% if 1 %}" * 40_000 + "{% endif %}" * 40_000, NESTED),
        ("{% for i in [1] %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
        ("{{ " + "1" * 5_000 + " }}", "Exceeds the limit (4300 digits)"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str'"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ raise_exception('x' * 10**6) }}", "refuses them: " + "x" * 200 + "..."),
    ],
    ids=lambda value: repr(value)[:30],
)  # fmt: skip
def test_hostile_template_is_refused_by_check_and_for_each_chat(source: str, fault: str) -> None:
    made = template(source, HURRIED if fault == TIME else LIMITS)
    with pytest.raises(CheckpointError) as error:
        made.check()
    assert str(error.value).startswith("FILE: the chat template ")
    message = refusal(made)
    assert fault in message
    assert message.startswith("messages: the chat template ")
    assert "FILE" not in message
    assert len(message) < 300


def test_template_that_ends_its_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that overflows the stack of C; what Python guards against differs by version."""
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    monkeypatch.setattr("specpipe.text.worker._BOOT", crash)
    assert refusal(template(PLAIN)) == (
        "messages: the chat template does not compile: the process that does it died (SIGSEGV)"
    )


def test_template_has_a_greatest_length() -> None:
    with pytest.raises(CheckpointError) as error:
        template("x" * 11, FileLimits(max_chat_template_bytes=10))
    assert str(error.value) == (
        "FILE: the chat template has 11 bytes, expected at most 10 "
        "(serving.limits.max_chat_template_bytes)"
    )


def test_prompt_has_a_greatest_length() -> None:
    made = template("{{ messages[0].content }}")
    assert made.render([{"role": "user", "content": "éé"}], max_bytes=4) == "éé"
    with pytest.raises(RequestError) as error:
        made.render([{"role": "user", "content": "ééx"}], max_bytes=4)
    assert str(error.value) == (
        "messages: the chat template cannot render them: "
        "the prompt has more than 4 bytes (serving.limits.max_prompt_bytes)"
    )


def test_refusal_keeps_the_words_of_the_template() -> None:
    words = "Conversation roles must alternate user/assistant/user/assistant/..."
    made = template("{{ raise_exception('" + words + "') }}")
    assert refusal(made) == f"messages: the chat template refuses them: {words}"


def test_chat_after_one_that_took_too_long_is_answered() -> None:
    made = template("{% if messages|length > 1 %}" + LOOPS + "{% endif %}" + PLAIN, A_SECOND)
    first = worker_of(made)
    assert made.render(HI) == "user: hi\n"
    assert "takes longer than 1 s" in refusal(made, HI * 2)
    assert made.render(HI) == "user: hi\n"
    wait_until_gone(first)


def test_process_that_does_not_answer_is_killed() -> None:
    made = template(PLAIN, A_SECOND)
    pid = worker_of(made)
    os.kill(pid, signal.SIGSTOP)
    assert "takes longer than 1 s" in refusal(made)
    assert made.render(HI) == "user: hi\n"
    wait_until_gone(pid)


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "later"])
def test_process_that_was_killed_is_replaced(waits: bool) -> None:
    made = template(PLAIN)
    pid = worker_of(made)
    os.kill(pid, signal.SIGKILL)
    if waits:
        wait_until_gone(pid)  # reaped without being asked for
    assert made.render(HI) == "user: hi\n"
    assert pid not in children()


def test_process_ends_with_its_template() -> None:
    made = template(PLAIN)
    pid = worker_of(made)
    del made
    wait_until_gone(pid)


def test_threads_share_a_process() -> None:
    made = template(PLAIN)
    pid = worker_of(made)
    texts = [f"text {number} \ud83d 𝄞\n" for number in range(100)]
    with ThreadPoolExecutor(8) as pool:
        rendered = pool.map(lambda t: made.render([{"role": "user", "content": t}]), texts)
        assert list(rendered) == [f"user: {text}\n" for text in texts]
    assert pid in children()


def test_fork_has_a_process_of_its_own() -> None:
    made = template(PLAIN)
    pid = worker_of(made)
    fork = os.fork()
    if fork == 0:
        is_right = made.render(HI) == "user: hi\n" and pid not in children()
        del made
        os._exit(0 if is_right else 1)
    assert os.waitpid(fork, 0)[1] == 0
    assert made.render(HI) == "user: hi\n"
    assert pid in children()


_PARENT = """
import os, sys, time
from specpipe.text.chat_template import ChatTemplate
made = ChatTemplate("x", file="", special_tokens={})
made.warm_up()
if sys.argv[1:]:
    os.fork() or time.sleep(600)
print(open(f"/proc/self/task/{os.getpid()}/children").read().split()[0], flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("forks", [(), ("fork",)], ids=["alone", "with a fork"])
def test_process_does_not_outlive_its_parent(forks: tuple[str, ...]) -> None:
    """Nor where a fork of the parent lives on, which holds the socket open."""
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, *forks], stdout=subprocess.PIPE, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        try:
            wait_until_gone(worker)
        finally:
            if forks:
                os.killpg(parent.pid, signal.SIGKILL)


def test_interpreter_is_the_one_on_path_where_python_is_embedded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/triton_python_backend_stub")
    assert template(PLAIN).render(HI) == "user: hi\n"
    monkeypatch.setenv("PATH", "/nowhere")
    assert refusal(template(PLAIN)) == (
        "messages: the chat template cannot render them: "
        "no process can be started for it: No such file or directory"
    )


def test_messages_that_are_no_json_are_refused() -> None:
    with pytest.raises(SpecpipeError, match="^messages cannot be written as JSON: "):
        template(PLAIN).render([{"role": "user", "content": "hi", "name": b""}])
