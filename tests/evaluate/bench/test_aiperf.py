"""NVIDIA's load tool speaks to our ensemble as it is, by its endpoint type `template`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from specpipe.build.repositories import built_repository
from specpipe.config.sections import PipelineConfig
from specpipe.triton.server import launcher
from tests.evaluate.bench.aiperf import AIPERF, needs_aiperf
from tests.evaluate.bench.conftest import ROOT

pytestmark = needs_aiperf

INPUTS = {
    "payload_template": '{"text_input": {{ text|tojson }}, "stream": {{ stream|tojson }}}',
    "response_field": "text_output",
    "max_tokens": 16,
    "end_id": -1,
    "num_draft_tokens": 2,
}


def test_aiperf_measures_our_endpoint(tmp_path: Path, quickstart: PipelineConfig) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "def fibonacci(n):"}\n{"text": "import re\\n"}\n')
    out = tmp_path / "out"
    with launcher.running(built_repository(quickstart)) as server:
        ran = subprocess.run(
            [
                *(str(AIPERF), "profile", "--model", "ensemble", "--url", server.http_url),
                *("--endpoint-type", "template", "--streaming"),
                *("--endpoint", "/v2/models/ensemble/generate_stream"),
                *("--extra-inputs", json.dumps(INPUTS)),
                *("--tokenizer", str(ROOT / "models" / "python-code" / "target")),
                *("--input-file", str(prompts), "--custom-dataset-type", "single_turn"),
                *("--request-count", "6", "--concurrency", "2", "--export-level", "records"),
                *("--artifact-dir", str(out), "--ui-type", "none"),
            ],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
        )
    assert ran.returncode == 0, ran.stdout[-2000:]
    records = [json.loads(line) for line in (out / "profile_export.jsonl").read_text().splitlines()]
    assert [record.get("error") for record in records] == [None] * 6
    for record in records:
        # aiperf counts by its own tokenizer, over a text cut into 16 tokens by ours.
        assert abs(record["metrics"]["output_sequence_length"]["value"] - 16) <= 2
        assert record["metrics"]["time_to_first_token"]["value"] > 0
