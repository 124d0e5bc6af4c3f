"""A local cluster for the measurements of this folder: started with pinned nodes, given a trace, stopped."""

import json
import math
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
from typing import NamedTuple

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from release_build import release_build  # noqa: E402: the folder stands in the path only now

READY_WITHIN_S, STOP_WITHIN_S = 180, 60


def percentile(values, percent):
    """Linear between the two nearest samples, as workload::statistics does."""
    values = sorted(values)
    place = (len(values) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (place - below)


def seconds(duration):
    return duration["secs"] + duration["nanos"] / 1e9


class Answer(NamedTuple):
    """A measured, completed request. Times in ms."""

    prompt_tokens: int
    # When the trace has it, and from then to the first token.
    sent: float
    ttft: float
    tokens: list

    def gaps(self, while_of=None):
        """The gaps between its tokens. With the tokens of another answer: only the gaps between the first and the last of those."""
        began, ended = (while_of[0], while_of[-1]) if while_of else (self.tokens[0], self.tokens[-1])
        return [b - a for a, b in zip(self.tokens, self.tokens[1:]) if began <= a and b <= ended]


def answers(run):
    """The measured, completed requests of a run, in the order of the trace."""
    found = []
    for record in sorted(run["records"], key=lambda record: seconds(record["scheduled"])):
        if record["part"] != "measured" or record["outcome"] != "completed":
            continue
        times = [seconds(at) * 1e3 for at in record["tokens"]]
        sent = seconds(record["scheduled"]) * 1e3
        found.append(Answer(record["prompt_tokens"], sent, times[0] - sent, times))
    if not any(answer.gaps() for answer in found):
        raise SystemExit("no request was completed; is the load too high for this machine?")
    return found


def figures(run):
    """TTFT and ITL of a run, in ms."""
    found = answers(run)
    ttft = [answer.ttft for answer in found]
    itl = [gap for answer in found for gap in answer.gaps()]
    return {
        f"{name}_ms_p{percent}": percentile(values, percent)
        for name, values in (("ttft", ttft), ("itl", itl))
        for percent in (50, 90)
    }


class Cluster:
    """`baton up` with one thread for each node, and each node on a core of its own."""

    def __init__(self, baton, topology, engine, cores, more=(), environment=()):
        self.baton = release_build(baton)
        command = [baton, "up", "--topology", topology, "--threads-per-node", "1", "--engine", engine]
        command += ["--listen", "127.0.0.1:0", "--quiet", "--json", *more]
        self.process = subprocess.Popen(command, env={**os.environ, **dict(environment)}, stdout=subprocess.PIPE, text=True)
        try:
            self.pin_when_ready(command, cores)
        except BaseException:
            self.__exit__()
            raise

    def pin_when_ready(self, command, cores):
        # A line comes whole, so that its beginning is enough to wait for.
        if not select.select([self.process.stdout], [], [], READY_WITHIN_S)[0]:
            raise SystemExit(f"{' '.join(command)} was not ready within {READY_WITHIN_S} s")
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(command)} did not start")
        ready = json.loads(line)
        self.url = ready["url"]
        self.processes = ready["processes"]
        self.nodes = [process for process in self.processes if process["role"] != "coordinator"]
        for number, node in enumerate(self.nodes):
            core = str(cores[number % len(cores)])
            pin = ["taskset", "-a", "-c", "-p", core, str(node["pid"])]
            subprocess.run(pin, check=True, stdout=subprocess.DEVNULL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(timeout=STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            # A cluster that stays would take part in the next measurement.
            self.process.kill()
            self.process.wait()

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


# Name, requests a second, and (weight, prompt tokens, output tokens) of each kind of request.
LOADS = [
    ("short", 2.0, [(1, 96, 40)]),
    ("balanced", 1.0, [(1, 384, 64)]),
    ("long beside streams", 1.0, [(9, 96, 64), (1, 1200, 16)]),
]


def poisson(rate, kinds, length, seed):
    """Poisson arrivals for so many seconds; a fixed seed, so that every run and every session has the same."""
    draw = random.Random(seed)
    at = 0.0
    while True:
        at += draw.expovariate(rate)
        if at >= length:
            return
        (_, prompt, output) = draw.choices(kinds, [weight for weight, _, _ in kinds])[0]
        yield at, prompt, output


# Prompt tokens of the light load.
SHORT, LONG = 128, 320


def light_figures(run):
    """What is fitted of the light load, in ms. First tokens of short and of long prompts, and how far their p90 is above what is usual.
    Gaps: the first ones of an answer, some of its middle, and the last ones. On a CPU the weights have to come into the caches after a
    prompt or a pause, so gaps become shorter along an answer."""
    found = answers(run)
    usual = {prompt: median(answer.ttft for answer in found if answer.prompt_tokens == prompt) for prompt in (SHORT, LONG)}
    gaps = lambda begin, end: [gap for answer in found for gap in answer.gaps()[begin:end]]
    last = gaps(24, None)
    return {
        "ttft_short": usual[SHORT],
        "ttft_long": usual[LONG],
        "ttft_spread": percentile([answer.ttft / usual[answer.prompt_tokens] for answer in found], 90),
        "first": median(gaps(0, 4)),
        "middle": median(gaps(8, 16)),
        "last": median(last),
        "last_spread": percentile(last, 90) / median(last),
    }


# What a step takes for its prompt tokens.
PROMPT_COSTS = ("prefill_token_seconds", "prefill_pair_seconds")
# Numbers of sequences for which `batch_seconds` has a figure (crates/simulator/src/step_costs.rs).
BATCHES = (1, 2, 3, 4, 6, 8, 16)
# Coefficients of variation among which the one of steps is looked for, and steps until 37 % is left of what a cold step takes more:
# first its guess, then its bounds. FIT_STEPS says how closely each is looked for.
VARIATIONS = (0.0, 0.5)
COLD_STEPS_GUESS, COLD_STEPS = 8.0, (1.0, 24.0)
FIT_STEPS = 9
FIT_ROUNDS = 4
# The least and the most that prompts may change in one round of a fit. Two lengths of a disturbed run may be too close together.
PROMPTS = (0.7, 1.5)


# Of one cycle of the load that shows how nodes slow each other down: requests as (seconds from its beginning, prompt tokens, output tokens).
# The first one is alone. The last one begins beside the second, which has begun to decode by then and goes on until the last one ends.
BESIDE, BESIDE_CYCLES, BESIDE_EVERY_S = ((0.0, SHORT, 40), (0.45, 16, 110), (0.55, SHORT, 40)), 14, 1.5

# Seconds from a short request of the light load to the next one, and from a long one. They do not overlap on a machine as fast as those of
# docs/measurements/simulator.md: what a prompt takes more beside a stream is measured apart from this load, and is no part of a request's own time.
LIGHT_S = (0.5, 0.75)


class Calibration:
    """Traces that are no load whose error is measured. The light one shows how fast the machine serves just now, and the other one how
    much two nodes slow each other down."""

    def __init__(self, folder):
        self.lone, self.light, self.threes = (os.path.join(folder, name) for name in ("lone.jsonl", "light.jsonl", "threes.jsonl"))
        # One request at a time: it is over when the next one comes. It warms a cluster.
        write_trace(self.lone, [(float(number), 160, 40) for number in range(8)])
        # A machine that is idle half of the time computes more slowly than one with some work, so this has some.
        light = [(number // 2 * sum(LIGHT_S) + number % 2 * LIGHT_S[0], (SHORT, LONG)[number % 2], 48) for number in range(20)]
        write_trace(self.light, light)
        write_trace(self.threes, [(BESIDE_EVERY_S * cycle + at, *request) for cycle in range(BESIDE_CYCLES) for at, *request in BESIDE])

    def run(self, cluster, seeds):
        """The figures of the light load."""
        return light_figures(cluster.run(self.light, next(seeds)))

    def beside(self, cluster, seeds):
        """How many times as long first tokens and gaps take while the other node of 2c decodes."""
        return beside(cluster.run(self.threes, next(seeds)))


class Beside(NamedTuple):
    prompts: float
    gaps: float


def beside(run):
    """Of a run of `Calibration.threes`."""
    found = answers(run)
    if len(found) != len(BESIDE) * BESIDE_CYCLES:
        raise SystemExit(f"{len(found)} of {len(BESIDE) * BESIDE_CYCLES} requests were answered")
    alone, first, later = (found[place :: len(BESIDE)] for place in range(len(BESIDE)))
    for cycle, (one, stream) in enumerate(zip(alone, first)):
        before = later[cycle - 1].tokens[-1], first[cycle - 1].tokens[-1]
        if one.tokens[-1] > stream.sent or (cycle and max(before) > one.sent):
            print(f"cycle {cycle + 1}: the lone request was not alone, so the figures are too small; is the machine too slow for this load?")
    early, late = [], []
    for stream, request in zip(first, later):
        early += stream.gaps(request.tokens)
        late += request.gaps(stream.tokens)
    # The later one is slowed down more than the first one. The simulation has one figure for both.
    gaps = (median(early) + median(late)) / 2 / median(gap for one in alone for gap in one.gaps())
    return Beside(median(request.ttft for request in later) / median(one.ttft for one in alone), gaps)


def beside_decoding(costs, beside):
    """Steps in which one or two sequences decode, and all other steps, take so many times as long while the other node decodes. The figure of the
    others is that of prompts. Costs of one node for each machine stay as they are.

    `bench engine` finds less for gaps: its engines share their cores with no coordinator and no client (docs/measurements/simulator.md)."""
    for slowdown in costs["host"].get("slowdown", [])[:1]:
        # A figure below 1 is noise.
        slowdown["reading"]["reading"] = max(beside.gaps, 1.0)
        slowdown["computing"]["reading"] = max(beside.prompts, 1.0)


class Fit(NamedTuple):
    """How far serving is from the costs that were given."""

    # What prompts cost as a multiple, and a request takes more besides.
    prompts: float
    request_seconds: float
    # What a step of one sequence takes more for reading the weights.
    reading_seconds: float

    def __str__(self):
        request = f" and {self.request_seconds * 1e3:+.1f} ms a request" if self.request_seconds else ""
        return f"prompts cost {self.prompts:.2f} times what the costs said{request}, reading weights {self.reading_seconds * 1e3:+.2f} ms"


def fit(baton, costs, calibration, topology, seen):
    """Changes the costs of a step so that the light load takes as long on this topology as in the real runs, and returns by how
    much. First tokens fit the prompts, the last gaps of answers the reading, and the earlier gaps what a cold step takes more. Two
    lengths of prompts give a factor and what a request takes more besides, which is no part of a step: a prompt in chunks does not take
    longer than a prompt in one step."""
    real = {metric: median([light[metric] for light in seen]) for metric in seen[0]}
    step, overheads, changed = costs["step"], costs["overheads"], Fit(1.0, 0.0, 0.0)
    cold = step["cold"] = {"seconds": 0.0, "steps": COLD_STEPS_GUESS}
    simulated = lambda: simulate_costs(baton, costs, topology, calibration.light, light_figures)

    def find(where, name, bounds, figure):
        """The value with which this figure is that of the real runs."""

        def is_too_low(tried):
            where[name] = tried
            return figure(simulated()) < figure(real)

        where[name] = bisect(bounds, FIT_STEPS, is_too_low)

    # Each moves the others a little, so they are found by turns. Cold steps add to a gap, so they are found by differences: by ratios they
    # and the reading never came to rest.
    for _ in range(FIT_ROUNDS):
        find(cold, "seconds", (0.0, real["first"] / 1e3), lambda found: found["first"] - found["last"])
        find(cold, "steps", COLD_STEPS, lambda found: found["middle"] - found["last"])
        find(step, "variation", VARIATIONS, lambda found: found["last_spread"])
        find(step, "prompt_variation", VARIATIONS, lambda found: found["ttft_spread"])
        found = simulated()
        prompts = (real["ttft_long"] - real["ttft_short"]) / (found["ttft_long"] - found["ttft_short"])
        prompts = compute_slower(step, prompts)
        # Nothing may take less than no time.
        request = max((real["ttft_short"] - simulated()["ttft_short"]) / 1e3, -overheads["request_seconds"])
        overheads["request_seconds"] += request
        reading = (real["last"] - simulated()["last"]) / 1e3
        read_slower(step, reading)
        changed = Fit(changed.prompts * prompts, changed.request_seconds + request, changed.reading_seconds + reading)
    return changed


def fit_speed(baton, costs, calibration, topology, seen):
    """The part of `fit` that changes from minute to minute: how fast prompts are computed and weights are read. Two light loads have
    too few prompts and first gaps for the rest."""
    real = {metric: median([light[metric] for light in seen]) for metric in seen[0]}
    step, changed = costs["step"], Fit(1.0, 0.0, 0.0)
    for _ in range(3):
        found = simulate_costs(baton, costs, topology, calibration.light, light_figures)
        reading = sum(real[gaps] - found[gaps] for gaps in ("first", "middle", "last")) / 3 / 1e3
        read_slower(step, reading)
        ratios = [real[name] / found[name] for name in ("ttft_short", "ttft_long")]
        prompts = compute_slower(step, math.sqrt(math.prod(ratios)))
        changed = Fit(changed.prompts * prompts, 0.0, changed.reading_seconds + reading)
    return changed


def read_slower(step, more):
    """A step of one sequence takes so many seconds more."""
    # As with a cold step: while it waits for the weights, a step of several sequences computes.
    step["batch_seconds"] = [seconds + more / batch for batch, seconds in zip(BATCHES, step["batch_seconds"])]


def compute_slower(step, times):
    """Prompts take so many times as long, within what one round of a fit may change; returns how many times."""
    times = min(max(times, PROMPTS[0]), PROMPTS[1])
    for name in PROMPT_COSTS:
        step[name] *= times
    step["chunk_seconds"] = [seconds * times for seconds in step["chunk_seconds"]]
    return times


def bisect(bounds, steps, is_too_low):
    """Where `is_too_low` changes, between the bounds."""
    low, high = bounds
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if is_too_low(middle) else (low, middle)
    return (low + high) / 2


def simulate_costs(baton, costs, topology, trace, read=figures):
    """As `simulate`, with costs that are in no file yet."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(costs, file)
        file.flush()
        return simulate(baton, file.name, topology, trace, read)


def simulate(baton, costs, topology, trace, read=figures):
    """The figures of the same trace on a simulated cluster."""
    with tempfile.TemporaryDirectory() as folder:
        result = os.path.join(folder, "run.json")
        command = [baton, "simulate", "--costs", costs, "--topology", topology, "--trace", trace, "--out", result]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with open(result) as file:
            return read(json.load(file))


def median(values):
    return statistics.median(values)
