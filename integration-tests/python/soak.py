#!/usr/bin/env python3
"""Does a coordinator grow over 20,000 requests of which 30 % are given up, while a node is killed every 500?

    integration-tests/python/soak.py --baton target/release/baton --traces FOLDER

It starts a coordinator, two prefill and two decode nodes (stand-in engine) by hand, and replays the Azure conversation trace and a part of the Mooncake
one with `baton bench run`. After every 500 requests that ended it kills one of the nodes with SIGKILL, in turn, and starts it again under its name. After
each kill it waits until the cluster is whole again and samples the coordinator: resident memory, descriptors, threads, and what its metrics say about
tasks; and of all processes together the shared memory that is mapped. The coordinator remembers 10,000 requests, so what comes before is its warm-up.
Means of the last fifth of the samples may be 2 % above those of the fifth behind the middle. Exit status 3: something grew. What became of the requests is
printed.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

GROWTH_MAX = 0.02
KILL_EVERY = 500
NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
TRACES = (
    ("azure2023/AzureLLMInferenceTrace_conv.csv", 19_000, ("--length-scale", "4", "--time-scale", "5")),
    ("mooncake/conversation_trace.jsonl", 1_000, ("--length-scale", "32", "--time-scale", "6", "--spread-steps-s", "3")),
)
READY_WITHIN_S = 60


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--baton", default="target/release/baton")
    parse.add_argument("--traces", type=Path, required=True, help="folder with azure2023/ and mooncake/")
    parse.add_argument("--model", default="smollm2-135m")
    parse.add_argument("--requests", type=int, help="of the first trace, for a short run")
    args = parse.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(args, Path(folder))
        try:
            cluster.begin()
            samples = [sample for trace in TRACES for sample in replayed(cluster, args, *trace)]
            outcomes = cluster.outcomes()
        finally:
            cluster.end()
    sys.exit(0 if told(samples, outcomes) else 3)


class Cluster:
    def __init__(self, args, folder):
        self.args, self.folder, self.running, self.killed = args, folder, {}, 0

    def begin(self):
        said = self.start("coordinator", "--listen", "127.0.0.1:0", "--control-listen", "127.0.0.1:0")
        self.url, self.control = f"http://{said['http']}", said["control"]
        for node in NODES:
            self.start(node, "--coordinators", self.control)
        self.wait_until_whole()

    def start(self, name, *flags):
        role = name.split("-")[0]
        listen = [] if role == "coordinator" else ["--engine", "stand-in", "--listen", "127.0.0.1:0", "--kv-cache-memory", "128MiB"]
        words = [self.args.baton, f"serve-{role}", "--name", name, "--model", self.args.model, "--served-model-name", "stand-in", *listen, *flags]
        log = (self.folder / f"{name}.log").open("ab")
        self.running[name] = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True)
        for line in self.running[name].stdout:
            if (said := json.loads(line))["event"] == "listening":
                return said
        raise SystemExit(f"{name} ended: {(self.folder / f'{name}.log').read_text()[-2000:]}")

    def kill_next(self):
        name = NODES[self.killed % len(NODES)]
        self.killed += 1
        self.running[name].kill()
        self.running[name].wait()
        self.start(name, "--coordinators", self.control)

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return answer.read().decode()

    def wait_until_whole(self):
        ends = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < ends:
            try:
                if json.loads(self.get("/ready"))["usable_pairs"] == 4:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise SystemExit(f"not whole within {READY_WITHIN_S} s: {self.get('/admin/cluster')[:2000]}")

    def outcomes(self):
        found = re.findall(r'^baton_requests_total\{.*outcome="(\w+)".*\} ([0-9.]+)$', self.get("/metrics"), re.M)
        counts = {}
        for outcome, count in found:
            counts[outcome] = counts.get(outcome, 0) + int(float(count))
        return counts

    def sample(self):
        """Of the coordinator, and the shared memory of all."""
        pid = self.running["coordinator"].pid
        status = Path(f"/proc/{pid}/status").read_text()
        field = lambda name: int(re.search(rf"^{name}:\s+(\d+)", status, re.M)[1])  # noqa: E731
        tasks = re.search(r"^baton_runtime_tasks\S* ([0-9.]+)$", self.get("/metrics"), re.M)
        shared = sum(int(re.search(r"^RssShmem:\s+(\d+)", Path(f"/proc/{each.pid}/status").read_text(), re.M)[1]) for each in self.running.values())
        return {
            "resident_mb": field("VmRSS") / 1024,
            "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
            "threads": field("Threads"),
            "tasks": float(tasks[1]),
            "shared_mb_of_all": shared / 1024,
        }

    def end(self):
        for process in reversed(self.running.values()):
            process.send_signal(signal.SIGTERM)
        for name, process in self.running.items():
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                print(f"{name} did not end after SIGTERM")
                process.kill()


def replayed(cluster, args, trace, count, flags):
    count = min(count, args.requests or count)
    words = [args.baton, "bench", "run", "--base-url", cluster.url, "--dataset-name", "trace", "--dataset-path", str(args.traces / trace)]
    words += ["--num-prompts", str(count), "--cancel-rate", "0.3", "--context-len", "2048", "--disable-tqdm", "--no-server-records", *flags]
    log = cluster.folder / "bench.log"
    bench = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=log.open("ab"))
    begun, samples = sum(cluster.outcomes().values()), []
    due = begun + KILL_EVERY
    while bench.poll() is None:
        time.sleep(0.2)
        if sum(cluster.outcomes().values()) < due:
            continue
        due += KILL_EVERY
        cluster.kill_next()
        cluster.wait_until_whole()
        samples.append(cluster.sample())
        print(f"{due - KILL_EVERY:6} requests ended, {NODES[(cluster.killed - 1) % 4]} was killed: {words_of(samples[-1])}", flush=True)
    if bench.returncode != 0:
        raise SystemExit(f"bench ended with {bench.returncode}: {log.read_text()[-3000:]}")
    return samples


def words_of(sample):
    return ", ".join(f"{name} {value:.1f}" for name, value in sample.items())


def told(samples, outcomes):
    print(f"outcomes: {outcomes}")
    if len(samples) < 10:
        print(f"only {len(samples)} samples: too few to judge")
        return False
    fifth, middle = len(samples) // 5, len(samples) // 2
    is_flat = True
    for name in samples[0]:
        early, late = (statistics.mean(sample[name] for sample in part) for part in (samples[middle : middle + fifth], samples[-fifth:]))
        growth = (late - early) / max(early, 1e-9)
        is_flat &= growth <= GROWTH_MAX
        print(f"{name}: {early:.1f} behind the middle, {late:.1f} at the end, {growth:+.1%}")
    return is_flat


if __name__ == "__main__":
    main()
