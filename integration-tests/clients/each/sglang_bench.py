"""SGLang's bench_serving: completions and chats. Its own files run; the parts of SGLang that need torch are replaced."""

import json
import os
import subprocess
import sys
import types
import zipfile
from pathlib import Path

from rows import FOLDER, MODEL, TOKENIZER, URL, write

VERSION = "0.5.23"
SOURCE = Path(os.environ["CLIENT_WORK"]) / "sglang-source"
# Name in our table, backend.
RUNS = {"completions": "vllm", "chats": "vllm-chat"}


def fetch():
    """The wheel, unpacked: an installation would bring torch."""
    if (SOURCE / "sglang").exists():
        return
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(SOURCE), f"sglang=={VERSION}"]
    subprocess.run(words, check=True)
    with zipfile.ZipFile(next(SOURCE.glob("sglang-*.whl"))) as wheel:
        wheel.extractall(SOURCE)


def package(name):
    module = types.ModuleType(name)
    module.__path__, module.__version__ = [str(SOURCE.joinpath(*name.split(".")))], VERSION
    sys.modules[name] = module


def replaced(name, **names):
    module = types.ModuleType(name)
    module.__path__ = []
    module.__dict__.update(names)
    sys.modules[name] = module


def refuse(*_args, **_more):
    raise RuntimeError("this part of SGLang is not here")


def load():
    for name in ("sglang", "sglang.srt", "sglang.srt.utils"):
        package(name)
    replaced("sglang.srt.disaggregation")
    replaced("sglang.srt.disaggregation.utils", FAKE_BOOTSTRAP_HOST="2.2.2.2")
    replaced(
        "sglang.srt.utils.network",
        resolve_base_url=lambda url, host, port: url or f"http://{host}:{port}",
        resolve_host_port=lambda url, host, port: url or f"{host}:{port}",
    )
    replaced("datasets", load_dataset=refuse)
    from sglang.benchmark.serving import cli_main

    return cli_main


def run(what, backend):
    out = FOLDER / f"{backend}.jsonl"
    out.unlink(missing_ok=True)
    words = ["--backend", backend, "--base-url", URL, "--model", MODEL, "--tokenizer", TOKENIZER]
    words += ["--dataset-name", "random-ids", "--random-input-len", "32", "--random-output-len", "12"]
    words += ["--num-prompts", "20", "--request-rate", "4", "--warmup-requests", "0", "--output-file", str(out), "--output-details"]
    sys.argv = ["bench_serving", *words]
    load()()
    result = json.loads(out.read_text().splitlines()[-1])
    columns = ("input_lens", "output_lens", "ttfts", "itls", "errors")
    for prompt, output, ttft_s, itl_s, error in zip(*(result[key] for key in columns), strict=True):
        times = {"ttft_ms": ttft_s * 1000, "last_token_ms": (ttft_s + sum(itl_s)) * 1000}
        # A chat's template adds tokens that its client does not count.
        counts = {"output_tokens": output} | ({"prompt_tokens": prompt} if what == "completions" else {})
        write(what=what, id=None, error=error or None, **counts, **times)


fetch()
for name, of in RUNS.items():
    run(name, of)
