"""GuideLLM: synthetic prompts, two streams at a time."""

import json

from rows import FOLDER, MODEL, PROGRAMS, TOKENIZER, URL, tool, write

OUT = FOLDER / "guidellm.json"
WORDS = [
    "benchmark", "--target", URL, "--model", MODEL, "--processor", TOKENIZER,
    "--data", "prompt_tokens=32,output_tokens=12", "--rate-type", "concurrent", "--rate", "2", "--max-requests", "20", "--output-path", OUT, "--disable-progress",
]

OUT.unlink(missing_ok=True)
tool([PROGRAMS / "guidellm", *WORDS], 600, HF_HUB_OFFLINE="1")
# Before it measures it asks for one token: the main process does, and each of its two.
write(what="validation", is_check=True, prepares=3)
(benchmark,) = json.loads(OUT.read_text())["benchmarks"]
for kind in ("successful", "incomplete", "errored"):
    for one in benchmark["requests"][kind]:
        write(
            what="text_completions", id=None, start_unix_ms=one["start_time"] * 1000, error=None if kind == "successful" else f"{kind}: {one.get('error')}",
            prompt_tokens=one["prompt_tokens"], output_tokens=one["output_tokens"],
            ttft_ms=one["time_to_first_token_ms"], last_token_ms=one["request_latency"] * 1000,
        )
