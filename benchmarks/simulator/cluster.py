"""A local cluster for the measurements of this folder: started with pinned nodes, given a trace, stopped."""

import json
import os
import signal
import statistics
import subprocess
import tempfile


def percentile(values, percent):
    """Linear between the two nearest samples, as workload::statistics does."""
    values = sorted(values)
    place = (len(values) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (place - below)


def seconds(duration):
    return duration["secs"] + duration["nanos"] / 1e9


def figures(run):
    """TTFT and ITL of the measured, completed requests of a run, in ms."""
    ttft, itl = [], []
    for record in run["records"]:
        if record["part"] != "measured" or record["outcome"] != "completed":
            continue
        times = [seconds(at) for at in record["tokens"]]
        ttft.append((times[0] - seconds(record["scheduled"])) * 1e3)
        itl += [(b - a) * 1e3 for a, b in zip(times, times[1:])]
    if not ttft or not itl:
        raise SystemExit("no request was completed; is the load too high for this machine?")
    return {
        f"{name}_ms_p{percent}": percentile(values, percent)
        for name, values in (("ttft", ttft), ("itl", itl))
        for percent in (50, 90)
    }


class Cluster:
    """`baton up` with one thread for each node, and each node on a core of its own."""

    def __init__(self, baton, topology, engine, cores):
        self.baton = baton
        command = [baton, "up", "--topology", topology, "--threads-per-node", "1", "--engine", engine]
        command += ["--listen", "127.0.0.1:0", "--quiet", "--json"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            self.pin_when_ready(command, cores)
        except BaseException:
            self.__exit__()
            raise

    def pin_when_ready(self, command, cores):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(command)} did not start")
        ready = json.loads(line)
        self.url = ready["url"]
        nodes = [process for process in ready["processes"] if process["role"] != "coordinator"]
        for number, node in enumerate(nodes):
            core = str(cores[number % len(cores)])
            pin = ["taskset", "-a", "-c", "-p", core, str(node["pid"])]
            subprocess.run(pin, check=True, stdout=subprocess.DEVNULL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGINT)
        self.process.wait(timeout=60)

    def run(self, trace, seed, more=()):
        """Sends a trace and returns the run. Another seed makes other prompts, so no cache knows them."""
        with tempfile.TemporaryDirectory() as folder:
            result = os.path.join(folder, "run.json")
            command = [self.baton, "bench", "run", "--base-url", self.url, "--dataset-name", "trace"]
            command += ["--dataset-path", trace, "--seed", str(seed), "--run-json", result, "--disable-tqdm", *more]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            with open(result) as file:
                return json.load(file)


def write_trace(path, requests):
    """Requests of (time in s, prompt tokens, output tokens), in Mooncake's form. No prompt shares anything with another."""
    block = 0
    with open(path, "w") as file:
        for at, prompt, output in requests:
            blocks = list(range(block, block + -(-prompt // 512)))
            block += len(blocks)
            row = {"timestamp": round(at * 1e3), "input_length": prompt, "output_length": output, "hash_ids": blocks}
            file.write(json.dumps(row) + "\n")


def write_lone_requests(path, requests):
    """One request at a time: it is over when the next one comes. What they take shows how fast the machine is just now."""
    seconds_apart, prompt_tokens, output_tokens = 1.0, 160, 40
    write_trace(path, [(number * seconds_apart, prompt_tokens, output_tokens) for number in range(requests)])


def slowdown(real, predicted):
    """How many times as long as simulated first tokens took, gaps between tokens, and both together."""
    ttft, itl = (real[metric] / predicted[metric] for metric in ("ttft_ms_p50", "itl_ms_p50"))
    return ttft, itl, (ttft * itl) ** 0.5


def simulate(baton, costs, topology, trace):
    """The figures of the same trace on a simulated cluster."""
    with tempfile.TemporaryDirectory() as folder:
        result = os.path.join(folder, "run.json")
        command = [baton, "simulate", "--costs", costs, "--topology", topology, "--trace", trace, "--out", result]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with open(result) as file:
            return figures(json.load(file))


def median(values):
    return statistics.median(values)
