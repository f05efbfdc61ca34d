"""`specpipe gateway`, and the options of the door in `specpipe serve`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specpipe.build import repositories
from specpipe.cli.group import main
from specpipe.gateway import run as gateway
from specpipe.gateway.settings import GatewaySettings
from specpipe.machine.libraries import with_extras

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def run(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def test_the_options_and_the_yaml_come_to_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[GatewaySettings] = []

    def stand_in(settings: GatewaySettings, *, log: Any, on_ready: Any) -> None:
        seen.append(settings)
        on_ready("http://127.0.0.1:9000")

    monkeypatch.setattr(gateway, "run", stand_in)
    monkeypatch.setattr(repositories, "built_repository", lambda config: tmp_path)
    sets = ("--config", str(CONFIG), "--set", "serving.request_timeout_s=90")
    urls = ("--url", "grpc://a:1", "--url", "grpc://b:2")
    names = ("--served-model-name", "one", "--served-model-name", "two")
    result = run(
        "gateway", *sets, *urls, *names, "--listen", "9000", "--lenient", "--no-access-log"
    )
    assert (result.exit_code, result.output) == (0, "ready: http://127.0.0.1:9000\n")
    assert run("gateway", *sets, *urls, "--keys", "keys.yaml", "--log-prompts").exit_code == 0
    first, second = seen
    assert first == GatewaySettings(
        listen="9000",
        urls=("grpc://a:1", "grpc://b:2"),
        repository=tmp_path,
        names=("one", "two"),
        request_timeout_s=90.0,
        is_lenient=True,
        has_access_log=False,
    )
    assert second == first.model_copy(
        update={
            "listen": "127.0.0.1:8080",
            "names": ("python-code",),
            "keys": Path("keys.yaml").resolve(),
            "is_lenient": False,
            "has_access_log": True,
            "log_prompts": True,
        }
    )
    # As a child of `serve` gets them.
    assert GatewaySettings.model_validate_json(second.model_dump_json()) == second


def test_an_option_of_the_door_without_a_door_is_a_mistake() -> None:
    result = run("serve", "--config", str(CONFIG), "--lenient")
    assert result.exit_code == 2
    assert "Options of the door have no effect without --openai." in result.output


def test_an_empty_name_is_a_mistake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(repositories, "built_repository", lambda config: tmp_path)
    words = ("--config", str(CONFIG), "--url", "grpc://a:1", "--served-model-name", " ")
    result = run("gateway", *words)
    assert result.exit_code == 2
    assert "--served-model-name is empty: give a name, or leave it out." in result.output


@pytest.mark.parametrize("command", ["gateway", "serve"])
def test_a_missing_library_is_named(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "uvicorn" else find_spec(name, *rest),
    )
    door = {"gateway": ("--url", "grpc://a:1"), "serve": ("--openai", "0")}[command]
    result = run(command, "--config", str(CONFIG), *door)
    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == (
        f"Error: the door for OpenAI's clients needs 'uvicorn': {with_extras('openai')}"
    )
