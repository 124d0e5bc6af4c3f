"""A local cluster for the measurements of this folder: started with pinned nodes, given a trace, stopped."""

import copy
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


# What a step takes for its prompt tokens, and what it takes for reading weights and KV.
PROMPT_COSTS = ("prefill_token_seconds", "prefill_pair_seconds")
READING_COSTS = ("fixed_seconds", "draw_seconds", "decode_row_seconds", "decode_context_token_seconds")
# Coefficients of variation among which the one of steps is looked for, and how closely.
VARIATIONS = (0.0, 0.5)
VARIATION_STEPS = 7
# The same for what a further sequence costs, as a multiple of what it costs in the engine alone.
ROWS = (0.5, 3.0)
ROWS_STEPS = 9


class Calibration:
    """Two traces that are no load whose error is measured. The light one shows how fast the machine serves just now."""

    def __init__(self, folder):
        self.lone = os.path.join(folder, "lone.jsonl")
        self.light = os.path.join(folder, "light.jsonl")
        # One request at a time: it is over when the next one comes. It warms a cluster.
        write_trace(self.lone, [(float(number), 160, 40) for number in range(8)])
        # A machine that is idle half of the time computes more slowly than one with some work, so this has some.
        write_trace(self.light, [(0.45 * number, 192, 48) for number in range(32)])
        # Three streams on each of two nodes, for as long as the prompts are short beside the answers.
        self.together = os.path.join(folder, "together.jsonl")
        write_trace(self.together, [(5.0 * group, 32, 96) for group in range(4) for _ in range(6)])

    def run(self, cluster, seeds):
        """The figures of the light load."""
        return figures(cluster.run(self.light, next(seeds)))


def fit(baton, costs, calibration, topology, seen):
    """Changes the costs of a step so that the light load takes as long on this topology as in the real runs, and returns by how
    much: prompts, reading. Gaps between tokens fit the reading, first tokens the prompts, and the longer gaps (p90) the variation
    of steps."""
    real = {metric: median([light[metric] for light in seen]) for metric in seen[0]}
    step, changed = costs["step"], [1.0, 1.0]
    # Each moves the others a little, so they are found by turns.
    for _ in range(4):
        step["variation"] = variation(baton, costs, calibration, topology, real)
        for place, names, metric in ((1, READING_COSTS, "itl_ms_p50"), (0, PROMPT_COSTS, "ttft_ms_p50")):
            factor = real[metric] / simulate_costs(baton, costs, topology, calibration.light)[metric]
            changed[place] *= factor
            for name in names:
                step[name] *= factor
            if place == 1:
                step["batch_seconds"] = [seconds * factor for seconds in step["batch_seconds"]]
            else:
                step["chunk_seconds"] = [seconds * factor for seconds in step["chunk_seconds"]]
    return changed


def fit_rows(baton, costs, calibration, runs):
    """Changes what each further sequence of a step costs, so that three streams together take as long as in the real runs, and
    returns by how much. A node that serves tells each stream its tokens, which `bench engine` does not. A step of one sequence
    costs what it did."""
    real, step = median([run["itl_ms_p50"] for run in runs]), costs["step"]
    before = dict(step)

    def take(factor):
        step["decode_row_seconds"] = before["decode_row_seconds"] * factor
        alone = before["batch_seconds"][0] - before["decode_row_seconds"] * (factor - 1)
        step["batch_seconds"] = [alone, *before["batch_seconds"][1:]]

    def is_too_quick(factor):
        take(factor)
        return simulate_costs(baton, costs, "2c", calibration.together)["itl_ms_p50"] < real

    factor = bisect(ROWS, ROWS_STEPS, is_too_quick)
    take(factor)
    return factor


def bisect(bounds, steps, is_too_low):
    """Where `is_too_low` changes, between the bounds."""
    low, high = bounds
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if is_too_low(middle) else (low, middle)
    return (low + high) / 2


def variation(baton, costs, calibration, topology, real):
    """The one with which long gaps are as much longer than usual ones as in the real runs."""
    costs = copy.deepcopy(costs)

    def is_too_steady(tried):
        costs["step"]["variation"] = tried
        found = simulate_costs(baton, costs, topology, calibration.light)
        return found["itl_ms_p90"] / found["itl_ms_p50"] < real["itl_ms_p90"] / real["itl_ms_p50"]

    return bisect(VARIATIONS, VARIATION_STEPS, is_too_steady)


def simulate_costs(baton, costs, topology, trace):
    """As `simulate`, with costs that are in no file yet."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(costs, file)
        file.flush()
        return simulate(baton, file.name, topology, trace)


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
