#!/usr/bin/env python3
"""What does one key's flood do to another key's requests?

    integration-tests/python/fairness_probe.py --baton target/release/baton --seconds 120

It starts `baton up --topology 1p1d` with the real model and two keys. `steady` sends a request every second, also alone. `flood` may send as many
requests a minute as `steady` sends, and sends ten times as many, each with a time limit of a second. Measured, each first alone and then beside the
flood: the share of `steady`'s requests that are answered within the limit (goodput), its p99 of the time to the first token, and how long a refusal
of `flood` takes. Exit status 3: the goodput beside the flood is below 0.9 of that alone, the p99 is more than twice, a refusal takes more than 50 ms at
p99 or has no Retry-After.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

from tenant_probe import create

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../benchmarks"))
from release_build import release_build  # noqa: E402: the folder stands in the path only now

GOODPUT_MIN, TTFT_FACTOR_MAX, REFUSED_WITHIN_S = 0.9, 2.0, 0.05
STEADY_A_MINUTE, FLOOD_FACTOR = 60, 10
PROMPT_CHARACTERS, TOKENS, LIMIT_S = 100, 16, 1.0


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--baton", default="target/release/baton", type=release_build)
    parse.add_argument("--model", default="smollm2-135m")
    parse.add_argument("--seconds", type=int, default=120, help="of each half [120]")
    parse.add_argument("--concurrent", type=int, help="requests that `flood` may have open at once [no limit]")
    parse.add_argument("--step-tokens", type=int, help="tokens of a step of the nodes (`baton up --max-num-batched-tokens`) [theirs]")
    parse.add_argument("--threads", type=int, help="threads of each node (`baton up --threads-per-node`) [as many as cores]")
    args = parse.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "keys.toml")
        steady = create(args.baton, file, "steady")
        at_once = ["--concurrent-requests", str(args.concurrent)] if args.concurrent else []
        flood = create(args.baton, file, "flood", "--requests-per-minute", str(STEADY_A_MINUTE), *at_once)
        command = [args.baton, "up", "--topology", "1p1d", "--model", args.model, "--listen", "127.0.0.1:0", "--json", "--quiet"]
        command += ["--max-num-batched-tokens", str(args.step_tokens)] if args.step_tokens else []
        command += ["--threads-per-node", str(args.threads)] if args.threads else []
        cluster = subprocess.Popen([*command, "--api-keys", file], stdout=subprocess.PIPE, text=True)
        try:
            url = json.loads(cluster.stdout.readline())["url"]
            sent(url, steady, 1.0, 5)
            alone = sent(url, steady, STEADY_A_MINUTE / 60, args.seconds)
            beside = []
            flooding = threading.Thread(target=lambda: beside.extend(sent(url, flood, FLOOD_FACTOR * STEADY_A_MINUTE / 60, args.seconds)))
            flooding.start()
            with_flood = sent(url, steady, STEADY_A_MINUTE / 60, args.seconds)
            flooding.join()
        finally:
            cluster.send_signal(signal.SIGINT)
            cluster.wait(timeout=60)
    sys.exit(0 if told(alone, with_flood, beside) else 3)


def told(alone, with_flood, flood):
    goodputs, tails = [], []
    for name, answers in (("alone", alone), ("beside the flood", with_flood)):
        good = [answer for answer in answers if answer["status"] == 200 and answer["whole_s"] <= LIMIT_S]
        goodputs.append(len(good) / len(answers))
        tails.append(p99([answer["ttft_s"] for answer in answers if answer["ttft_s"]]))
        print(f"steady {name}: {len(answers)} sent, goodput {goodputs[-1]:.3f}, p99 of TTFT {tails[-1] * 1e3:.0f} ms")
    refused = [answer for answer in flood if answer["status"] == 429]
    within = p99([answer["whole_s"] for answer in refused])
    have = all(answer["retry_after"] for answer in refused)
    print(f"flood: {len(flood)} sent, {len(refused)} refused within {within * 1e3:.0f} ms (p99), Retry-After in all: {have}")
    is_fast = bool(refused) and within <= REFUSED_WITHIN_S and have
    return goodputs[1] >= GOODPUT_MIN * goodputs[0] and tails[1] <= TTFT_FACTOR_MAX * tails[0] and is_fast


def p99(values):
    """Nearest rank, as everywhere in baton: of 100 values the second largest, and not the largest."""
    ordered = sorted(values)
    return ordered[(len(ordered) * 99 + 99) // 100 - 1] if ordered else float("inf")


def sent(url, key, rate, seconds):
    """No prompt begins as one that was sent before. Open loop: a request is sent when it is due, whatever became of those before it. Times count from then."""
    answers, asking, begun, first = [], [], time.perf_counter(), random.randrange(1_000_000)
    for number in range(int(rate * seconds)):
        due = begun + number / rate
        time.sleep(max(0.0, due - time.perf_counter()))
        one = threading.Thread(target=lambda number=first + number, due=due: answers.append(ask(url, key, number, due)))
        one.start()
        asking.append(one)
    for one in asking:
        one.join()
    return answers


def ask(url, key, number, due):
    # A digit is a token. A prompt of five times the length takes half of the limit alone, so that two at a time miss it, flood or not.
    prompt = " ".join(str(number * 1_000 + word) for word in range(PROMPT_CHARACTERS))
    body = json.dumps({"prompt": prompt[:PROMPT_CHARACTERS], "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}", "x-request-timeout-ms": str(int(LIMIT_S * 1e3))}
    first = None
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, headers), timeout=60) as answer:
            for line in answer:
                if first is None and line.startswith(b"data: {"):
                    first = time.perf_counter() - due
            status, retry_after = answer.status, None
    except urllib.error.HTTPError as error:
        status, retry_after = error.code, error.headers.get("retry-after")
    return {"status": status, "retry_after": retry_after, "ttft_s": first, "whole_s": time.perf_counter() - due}


if __name__ == "__main__":
    main()
