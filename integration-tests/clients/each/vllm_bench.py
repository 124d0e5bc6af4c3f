"""`vllm bench serve`: 1,000 prompts of 16 tokens and 4 more at once, then its default lengths at a rate. With $CLIENT_QUICK: 100 of the
first kind. With $CLIENT_FETCH it fetches vLLM's files, and runs nothing.

vLLM's own files run. What they import of the rest of vLLM would need torch and is replaced, as
benchmarks/client/vllm_bench_serve.py says; the tokenizer is the one of transformers.
"""

import argparse
import json
import os
import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks/client"))
import vllm_bench_serve as launcher  # noqa: E402

# Requests a second, and how many: the default lengths are 1,024 tokens and 128 more.
RATE, COUNT = "0.25", 24
SHORT = ["--random-input-len", "16", "--random-output-len", "4", "--num-prompts"]
RUNS = {
    "1,000 of 16 + 4 at once": [*SHORT, "1000"],
    f"default lengths, {RATE}/s": ["--request-rate", RATE, "--num-prompts", str(COUNT)],
}
QUICK = {"100 of 16 + 4 at once": [*SHORT, "100"]}


def tokenizer_of(name, *_args, trust_remote_code=False, **_more):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


def main():
    source = launcher.vllm_source(Path(os.environ["CLIENT_WORK"]) / "vllm-source")
    if os.environ.get("CLIENT_FETCH"):
        return
    # Only a run has what this reads.
    from rows import FOLDER, MODEL, TOKENIZER, URL

    tokenizers = types.ModuleType("vllm.tokenizers")
    tokenizers.TokenizerLike, tokenizers.get_tokenizer = object, tokenizer_of
    sys.modules["vllm.tokenizers"] = tokenizers
    serve = launcher.load_vllm(source)
    for at, (what, words) in enumerate((QUICK if os.environ.get("CLIENT_QUICK") else RUNS).items()):
        parser = argparse.ArgumentParser("vllm bench serve")
        serve.add_cli_args(parser)
        common = ["--backend", "openai", "--endpoint", "/v1/completions", "--base-url", URL, "--model", MODEL]
        common += ["--tokenizer", TOKENIZER, "--dataset-name", "random", "--ready-check-timeout-sec", "0"]
        prefix, file = f"run-{os.getpid()}-{at}-", FOLDER / f"{at}.json"
        common += ["--seed", str(at), "--request-id-prefix", prefix, "--save-result", "--save-detailed"]
        serve.main(parser.parse_args([*common, "--result-dir", str(FOLDER), "--result-filename", file.name, *words]))
        told(what, prefix, json.loads(file.read_text()), is_crowded=at == 0)


def told(what, prefix, result, is_crowded):
    """One row for each request of a result; the ids are the prefix and the number."""
    from rows import write

    columns = ("input_lens", "output_lens", "ttfts", "itls", "errors")
    for at, (prompt, output, ttft_s, itl_s, error) in enumerate(zip(*(result[key] for key in columns), strict=True)):
        write(
            what=what, id=f"{prefix}{at}", error=error or None, is_crowded=is_crowded, prompt_tokens=prompt,
            output_tokens=output, ttft_ms=ttft_s * 1000, last_token_ms=(ttft_s + sum(itl_s)) * 1000,
        )


main()
