#!/usr/bin/env python3
"""Measures one scripted server with `vllm bench serve` and with `baton bench run`, in turn, and compares the percentiles.

    cargo build --release -p cli --bin baton --example client_accuracy
    python3 -m venv target/vllm && target/vllm/bin/pip install aiohttp numpy tqdm regex pybase64 pillow
    target/vllm/bin/python benchmarks/client/vllm_bench_serve.py [--rounds 3] [--requests 200] [--rate 10] [--tokens 100]

vLLM's files come from its source archive on PyPI (pip unpacks it; nothing is built). Its client's code runs as it is:
`benchmark`, the function that sends and reads a request, and `calculate_metrics`. What it imports of the rest of vLLM (models,
tokenizers, LoRA, images) would need torch, is not used for token-id prompts, and is replaced by empty modules here. Arrivals are
drawn by each client by itself, with the same rate and burstiness, so about the same number of streams runs: rate x (first
token + tokens x gap).
"""
import argparse
import asyncio
import glob
import importlib.machinery
import json
import pathlib
import random
import subprocess
import sys
import types

VLLM = "0.33.0"
FIRST_MS, GAP_MS, PROMPT_TOKENS = 100, 50, 100
# What the two clients may differ by.
SHARE_MAX = 0.05
PERCENTILES = [50.0, 90.0, 99.0]
ROOT = pathlib.Path(__file__).resolve().parents[2]


def vllm_source(folder: pathlib.Path) -> pathlib.Path:
    """The folder that holds the package. pip cannot describe the archive without torch, but it has unpacked it by then."""
    pattern = str(folder / "pip-download-*" / "vllm_*")
    if not glob.glob(pattern):
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "vllm", f"vllm=={VLLM}"]
        command += ["--no-build-isolation", "--no-clean", "-d", str(folder)]
        subprocess.run(command, env={"TMPDIR": str(folder), "PATH": "/usr/bin:/bin"}, capture_output=True, check=False)
    found = glob.glob(pattern)
    if not found:
        sys.exit(f"pip could not fetch the source archive of vllm {VLLM}")
    return pathlib.Path(found[0])


class Nothing:
    """Takes every call and every access, and gives itself."""

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class Anything(types.ModuleType):
    """A module that has every name."""

    __path__: list = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (Nothing,), {})
        setattr(self, name, made)
        return made


class Replaced:
    """Replaces all of vLLM but `vllm.benchmarks`."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        is_ours = name == "vllm" or name.startswith("vllm.") and not name.startswith("vllm.benchmarks")
        return importlib.machinery.ModuleSpec(name, Replaced, is_package=True) if is_ours else None

    @staticmethod
    def create_module(spec):
        return Anything(spec.name)

    @staticmethod
    def exec_module(module):
        pass


def load_vllm(source: pathlib.Path):
    sys.meta_path.insert(0, Replaced)
    import vllm  # noqa: PLC0415

    vllm.__path__ = [str(source / "vllm")]
    import vllm.benchmarks.serve as serve  # noqa: PLC0415

    serve.freeze_gc_heap = lambda: None
    return serve


def run_vllm(serve, url: str, args, seed: int) -> dict:
    import inspect

    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    make = serve.SampleRequest
    requests = [
        make(
            prompt=[random.randrange(1000, 30000) for _ in range(PROMPT_TOKENS)],
            prompt_len=PROMPT_TOKENS,
            expected_output_len=args.tokens,
            request_id=f"vllm-{seed}-{at}",
        )
        for at in range(args.requests)
    ]
    known = dict(
        task_type=serve.TaskType.GENERATION,
        endpoint_type="openai",
        api_url=f"{url}/v1/completions",
        base_url=url,
        model_id="scripted",
        model_name="scripted",
        # It would count tokens if the server did not.
        tokenizer=object(),
        input_requests=requests,
        logprobs=None,
        request_rate=args.rate,
        burstiness=1.0,
        disable_tqdm=True,
        num_warmups=2,
        profile=False,
        selected_percentile_metrics=["ttft", "tpot", "itl", "e2el"],
        selected_percentiles=PERCENTILES,
        ignore_eos=True,
        goodput_config_dict={},
        max_concurrency=None,
        lora_modules=None,
        extra_headers=None,
        extra_body={},
        ready_check_timeout_sec=0,
    )
    wanted = inspect.signature(serve.benchmark).parameters
    missing = {name: None for name, one in wanted.items() if one.default is inspect.Parameter.empty and name not in known}
    known = {name: value for name, value in known.items() if name in wanted}
    return asyncio.run(serve.benchmark(**known, **missing))


def run_baton(url: str, args, seed: int) -> dict:
    command = [str(args.baton), "bench", "run", "--base-url", url, "--num-prompts", str(args.requests)]
    command += ["--request-rate", str(args.rate), "--random-input-len", str(PROMPT_TOKENS)]
    command += ["--random-output-len", str(args.tokens), "--num-warmups", "2", "--seed", str(seed), "--json"]
    command += ["--metric-percentiles", ",".join(f"{percent:g}" for percent in PERCENTILES)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--baton", type=pathlib.Path, default=ROOT / "target/release/baton")
    parser.add_argument("--server", type=pathlib.Path, default=ROOT / "target/release/examples/client_accuracy")
    parser.add_argument("--source", type=pathlib.Path, default=ROOT / "target/vllm-source")
    args = parser.parse_args()
    serve = load_vllm(vllm_source(args.source))
    command = [str(args.server), "serve", "127.0.0.1:0", str(FIRST_MS), str(GAP_MS)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    url = server.stdout.readline().strip()
    rounds = []
    for seed in range(args.rounds):
        # Each goes first every other time.
        order = [("vllm", lambda: run_vllm(serve, url, args, seed)), ("baton", lambda: run_baton(url, args, seed))]
        rounds.append({name: run() for name, run in (order if seed % 2 == 0 else order[::-1])})
    server.stdin.close()
    server.wait()
    streams = args.rate * (FIRST_MS + args.tokens * GAP_MS) / 1000
    print(f"\n{args.rounds} rounds of {args.requests} requests, {args.rate:g} requests/s, about {streams:.0f} streams")
    print(f"{'metric':22}{'vllm ms':>10}{'baton ms':>10}{'difference':>12}  within {SHARE_MAX:.0%}")
    is_within = True
    for name in ("ttft", "tpot", "itl"):
        for percent in PERCENTILES:
            key = f"p{percent:g}_{name}_ms"
            ours, theirs = (sorted(one[who][key] for one in rounds)[len(rounds) // 2] for who in ("baton", "vllm"))
            difference = ours / theirs - 1
            is_within &= abs(difference) <= SHARE_MAX
            print(f"{key + ' (median)':22}{theirs:10.3f}{ours:10.3f}{difference:12.2%}  {abs(difference) <= SHARE_MAX}")
    counts = [(one["vllm"]["completed"], one["baton"]["completed"]) for one in rounds]
    print(f"completed, vllm and baton: {counts}")
    sys.exit(0 if is_within and all(pair == (args.requests, args.requests) for pair in counts) else 1)


if __name__ == "__main__":
    main()
