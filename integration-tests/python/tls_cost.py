#!/usr/bin/env python3
"""What certificates between the processes cost a request whose KV goes over gRPC.

    integration-tests/python/tls_cost.py --baton target/release/baton --pairs 40

It starts two clusters of the real model (1p1d, KV over gRPC), one with certificates and one without, and sends each a fresh prompt in turn. It prints
medians of the time to the first token, of the time from token to token and of the processor time of all processes, and the medians of the ratios.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../benchmarks"))
from release_build import release_build  # noqa: E402: the folder stands in the path only now

TICK = os.sysconf("SC_CLK_TCK")
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 32
PROCESSES = ("coordinator/coordinator", "prefill/prefill-0", "decode/decode-0")


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--baton", default="target/release/baton", type=release_build)
    parse.add_argument("--model", default="smollm2-135m")
    parse.add_argument("--pairs", type=int, default=40)
    args = parse.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        certs = os.path.join(folder, "certs")
        made = [args.baton, "certs", "init", certs, "--cluster", "cost", *PROCESSES]
        subprocess.run(made, check=True, capture_output=True)
        clusters = [Cluster(args), Cluster(args, "--certs", certs)]
        try:
            draw = random.Random(1)
            for cluster in clusters:
                cluster.ask(draw)
            pairs = [[cluster.ask(draw) for cluster in clusters] for _ in range(args.pairs)]
        finally:
            for cluster in clusters:
                cluster.end()
    for name in pairs[0][0]:
        plain, encrypted = ([pair[side][name] for pair in pairs] for side in (0, 1))
        ratios = [one / other for one, other in zip(encrypted, plain, strict=True)]
        print(f"{name}: {statistics.median(plain):.2f} in plain text, {statistics.median(encrypted):.2f} with certificates, "
              f"median of ratios {statistics.median(ratios):.3f} (n = {len(ratios)})")


class Cluster:
    def __init__(self, args, *flags):
        words = [args.baton, "up", "--model", args.model, "--transports", "grpc", "--listen", "127.0.0.1:0", "--json", "--quiet", *flags]
        self.up = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        said = json.loads(self.up.stdout.readline())
        self.url, self.pids = said["url"], [process["pid"] for process in said["processes"]]

    def processor_ms(self):
        total = 0
        for pid in self.pids:
            with open(f"/proc/{pid}/stat") as stat:
                fields = stat.read().rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12])
        return total * 1e3 / TICK

    def ask(self, draw):
        prompt = [draw.randrange(1_000, 40_000) for _ in range(PROMPT_TOKENS)]
        body = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
        used, begun, came = self.processor_ms(), time.perf_counter(), []
        with urllib.request.urlopen(request, timeout=120) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    came.append(time.perf_counter())
        used = self.processor_ms() - used
        gaps = (came[-1] - came[0]) / (len(came) - 1)
        return {"TTFT ms": (came[0] - begun) * 1e3, "ITL ms": gaps * 1e3, "processor ms": used}

    def end(self):
        self.up.send_signal(signal.SIGINT)
        self.up.wait(timeout=60)


if __name__ == "__main__":
    sys.exit(main())
