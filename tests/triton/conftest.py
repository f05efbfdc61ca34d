"""Two real Tritons for all tests of this folder: one whose pair repeats its prompt, one with the
quickstart pair.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specpipe.build import execution, planning, repositories
from specpipe.build.load import load_config
from specpipe.build.stages.package import models_folder
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.pair_file import PairFile
from specpipe.triton import repository
from specpipe.triton.server import launcher
from specpipe.triton.server.server import Server
from tests.quiet import Quiet

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "models" / "python-code" / "target"

CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}# {{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}# {{ message.role }}: {{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}def answer():\n{% endif %}"
)
"""For the quickstart pair, which has none; calls as Hermes writes them."""

_PLAIN_CONFIG = """
name: "plain"  backend: "python"  max_batch_size: 1
input { name: "text_input" data_type: TYPE_STRING dims: 1 optional: true }
input { name: "max_tokens" data_type: TYPE_INT32 dims: 1 optional: true }
input { name: "stream" data_type: TYPE_BOOL dims: 1 optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: -1 }
instance_group { count: 1 kind: KIND_CPU }
"""

_PLAIN_MODEL = '''
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Not decoupled: answers with the prompt."""

    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(r, "text_input").as_numpy() for r in requests]
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)]) for text in texts
        ]
'''


def write_engine(folder: Path, **limits: int) -> Path:
    """An engine folder with nothing but its limits."""
    folder.mkdir(parents=True)
    build_config = {"max_batch_size": 8, "max_seq_len": 1024, "max_draft_len": 4, **limits}
    (folder / "config.json").write_text(json.dumps({"build_config": build_config}))
    return folder


def write_echo_repository(out: Path, *, first: int = 0, **options: int | float) -> Path:
    """A repository of the hand-written models around EchoPair, and a model `plain`.

    Each step is a response, unless options say otherwise: tests know what is in which.
    """
    engine = write_engine(out.parent / f"{out.name}-engine")
    out.mkdir()
    repository.write(
        out,
        models=models_folder(),
        draft_engine=engine,
        target_engine=engine,
        tokenizer=TOKENIZER,
        pair=PairFile("torch", PairOptions(**{"stream_interval_s": 0.0, **options})),  # type: ignore[arg-type]
    )
    model = out / "speculative" / "1" / "model.py"
    register = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import echo_pair\n"
    model.write_text(f"{register}echo_pair.register(first={first})\n{model.read_text()}")
    plain = out / "plain" / "1"
    plain.mkdir(parents=True)
    (plain.parent / "config.pbtxt").write_text(_PLAIN_CONFIG)
    (plain / "model.py").write_text(_PLAIN_MODEL)
    return out


@pytest.fixture
def echo_repository(tmp_path: Path) -> Callable[..., Path]:
    """Writes a repository of its own for a test that will break it; takes PairOptions' fields."""

    def write(**options: int | float) -> Path:
        return write_echo_repository(tmp_path / "model_repo", **options)

    return write


@pytest.fixture(scope="session")
def echo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A running server; no test may crash it."""
    folder = write_echo_repository(tmp_path_factory.mktemp("echo") / "model_repo")
    with launcher.running(folder) as server:
        yield server


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, echo_server: Server) -> str:
    """The server's address, by each protocol."""
    return echo_server.http_url if request.param == "http" else echo_server.grpc_url


@pytest.fixture(scope="session")
def quickstart_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `specpipe build` does, for up to 8 draft tokens, then moved; with a chat template.

    K is as asked: the adaptive one is 0 on a machine that is busy.
    """
    output_dir = tmp_path_factory.mktemp("engines")
    overrides = [
        f"output_dir={output_dir}",
        "speculation.num_draft_tokens=8",
        "speculation.adaptive=false",
    ]
    config = load_config(ROOT / "configs" / "quickstart.yaml", overrides)
    execution.run(planning.plan(config), Quiet())
    repository = repositories.built_repository(config).rename(output_dir / "moved")
    for folder in repository.glob("*/1/tokenizer"):
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return repository


@pytest.fixture(scope="session")
def quickstart_server(quickstart_repository: Path) -> Iterator[Server]:
    with launcher.running(quickstart_repository) as running:
        yield running
