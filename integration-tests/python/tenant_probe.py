#!/usr/bin/env python3
"""Can one key's holder see by the time to the first token whether another one has sent a prompt?

    integration-tests/python/tenant_probe.py --baton target/release/baton --probes 1000

It starts `baton up --topology 1c` with the real model and three keys: a victim, a stranger (another tenant) and a mate (the victim's tenant).
Before half of the probes the victim sends a prompt; then the prober sends one that begins alike, and its time to the first token is taken.
AUC is the share of pairs of a probe after the victim's prompt and one without it that the time puts in the right order: 0.5 is no knowledge, 1.0 is
certain. Exit status 3: the stranger's is above 0.55, or the mate's below 0.9, so that the probe would not see anything.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

STRANGER_AUC_MAX, MATE_AUC_MIN = 0.55, 0.9
WORDS = "river stone cloud paper garden window silver market winter letter bridge forest island copper lantern meadow".split()
# About 190 tokens, so that a cached prompt is computed in a fraction of the time.
PROMPT_WORDS = 160


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--baton", default="target/release/baton")
    parse.add_argument("--model", default="smollm2-135m")
    parse.add_argument("--probes", type=int, default=1000, help="of each prober [1000]")
    args = parse.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "keys.toml")
        keys = {name: create(args.baton, file, name, *more) for name, more in
                (("victim", ["--tenant", "house"]), ("stranger", []), ("mate", ["--tenant", "house"]))}
        command = [args.baton, "up", "--topology", "1c", "--model", args.model, "--listen", "127.0.0.1:0", "--json", "--quiet"]
        cluster = subprocess.Popen([*command, "--api-keys", file], stdout=subprocess.PIPE, text=True)
        try:
            url = json.loads(cluster.stdout.readline())["url"]
            found = probe(url, keys, args.probes)
        finally:
            cluster.send_signal(signal.SIGINT)
            cluster.wait(timeout=60)
    for name, auc in found.items():
        print(f"{name}: AUC {auc:.3f} over {args.probes} probes")
    is_met = found["stranger"] <= STRANGER_AUC_MAX and found["mate"] >= MATE_AUC_MIN
    sys.exit(0 if is_met else 3)


def create(baton, file, name, *more):
    done = subprocess.run([baton, "keys", "create", name, "--file", file, *more], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def probe(url, keys, probes):
    """AUC by prober. Both probe in turn, so that a machine whose speed changes is the same for both."""
    draw = random.Random(1)
    times = {name: {True: [], False: []} for name in ("stranger", "mate")}
    for number in range(probes):
        for prober, seen in times.items():
            prompt = " ".join(draw.choices(WORDS, k=PROMPT_WORDS))
            was_sent = (number + (prober == "mate")) % 2 == 0
            # The victim always sends something, so that the machine is as busy before each probe.
            ask(url, keys["victim"], prompt if was_sent else " ".join(draw.choices(WORDS, k=PROMPT_WORDS)))
            seen[was_sent].append(ask(url, keys[prober], prompt))
    return {name: auc(seen[True], seen[False]) for name, seen in times.items()}


def ask(url, key, prompt):
    """Seconds until the only token has come."""
    body = json.dumps({"prompt": prompt, "max_tokens": 1, "temperature": 0}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    began = time.perf_counter()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, headers), timeout=60) as answer:
        answer.read()
    return time.perf_counter() - began


def auc(sent, not_sent):
    """How often a prompt that was sent before is the faster one; a tie counts half."""
    wins = sum((a < b) + (a == b) / 2 for a in sent for b in not_sent)
    return wins / (len(sent) * len(not_sent))


if __name__ == "__main__":
    main()
