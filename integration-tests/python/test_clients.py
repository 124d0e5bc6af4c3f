"""A load generator that is not ours, unmodified, in CI: `vllm bench serve` with 100 prompts. docs/reference/clients.md has all clients.

scripts/test installs it beforehand and leaves this out where that cannot be done.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR") or REPOSITORY / "target")
PROMPTS = 100


def test_vllm_bench_serve_sees_what_the_records_say(tmp_path):
    out = tmp_path / "results.json"
    command = [sys.executable, REPOSITORY / "integration-tests/clients/run", "--work", TARGET / "clients", "--out", out]
    command += ["--url", os.environ["BATON_BASE_URL"], "--quick", "vllm-bench"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads(out.read_text())["clients"]
    assert (result["requests"], result["errors"]) == (PROMPTS, []), result
    assert result["tokens_equal"] == result["tokens_known"] == 2 * PROMPTS, result
