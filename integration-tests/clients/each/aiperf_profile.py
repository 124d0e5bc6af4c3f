"""aiperf: chats and completions as streams, four at a time."""

import json

from rows import FOLDER, MODEL, PROGRAMS, TOKENIZER, URL, tool, write

COMMON = ["--model", MODEL, "--url", URL, "--tokenizer", TOKENIZER, "--streaming", "--use-server-token-count"]
COMMON += ["--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "12", "--extra-inputs", "ignore_eos:true"]
COMMON += ["--concurrency", "4", "--request-count", "20", "--ui-type", "none"]
NAMES = {"time_to_first_token": "ttft_ms", "request_latency": "last_token_ms"}
COUNTS = {"input_sequence_length": "prompt_tokens", "output_sequence_length": "output_tokens"}

for kind in ("chat", "completions"):
    folder = FOLDER / kind
    tool([PROGRAMS / "aiperf", "profile", "--endpoint-type", kind, "--output-artifact-dir", folder, *COMMON], 600)
    for line in (folder / "profile_export.jsonl").read_text().splitlines():
        one = json.loads(line)
        values = {}
        for name, ours in (NAMES | COUNTS).items():
            if name in one["metrics"]:
                value = one["metrics"][name]
                assert name in COUNTS or value["unit"] == "ms", value
                values[ours] = value["value"]
        error = one.get("error")
        write(what=kind, id=one["metadata"]["x_request_id"], error=json.dumps(error) if error else None, **values)
