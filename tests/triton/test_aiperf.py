"""NVIDIA's load tool against the door: it finds what drafting came to."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from specpipe.gateway.child import GatewayChild, reserve
from specpipe.gateway.settings import GatewaySettings
from specpipe.triton.server.server import Server
from tests.triton.conftest import TOKENIZER

AIPERF = shutil.which("aiperf")


@pytest.mark.slow
@pytest.mark.skipif(AIPERF is None, reason="aiperf (PyPI; 0.13 was tried) is not on the PATH")
@pytest.mark.parametrize("streaming", [True, False])
def test_aiperf_reports_acceptance(
    quickstart_server: Server, tmp_path: Path, streaming: bool
) -> None:
    settings = GatewaySettings(
        listen="127.0.0.1:0",
        urls=(quickstart_server.grpc_url,),
        repository=quickstart_server.version.repository,
        names=("python-code",),
        request_timeout_s=600.0,
        has_access_log=False,
    )
    secret = quickstart_server.secret
    with GatewayChild(settings, reserve(settings), secret=secret, log=print) as child:
        command = [
            str(AIPERF),
            "profile",
            *("--model", "python-code", "--tokenizer", str(TOKENIZER)),
            *("--url", child.url, "--endpoint-type", "completions"),
            *(["--streaming"] if streaming else []),
            *("--request-count", "4", "--concurrency", "2"),
            *("--isl", "32", "--osl", "24", "--extra-inputs", "ignore_eos:true"),
            *("--use-server-token-count", "--no-gpu-telemetry", "--no-server-metrics"),
            *("--ui", "none", "--artifact-dir", str(tmp_path)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (path,) = tmp_path.rglob("profile_export_aiperf.json")
    found = json.loads(path.read_text())
    assert found["request_count"]["avg"] == 4
    assert found["total_draft_tokens"]["avg"] > 0
    steps = {int(n): num for n, num in found["pooled_spec_decode_acceptance_histogram"].items()}
    assert sum(steps.values()) == found["total_spec_decode_steps"]["avg"]
    accepted = found["total_accepted_draft_tokens"]["avg"]
    assert sum(n * num for n, num in steps.items()) == accepted
    # Each step gives a token of the target, too; few have no draft token.
    assert 0.8 * 4 * 24 < accepted + sum(steps.values()) <= 4 * 24
