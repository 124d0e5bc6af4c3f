"""Writes the percentiles, means and intervals that numpy and scipy give, for the tests of crates/workload.

    python integration-tests/python/make_statistics.py [FILE]

FILE is crates/workload/tests/data/statistics.json when it is left out. `samples` has lists with their percentiles, mean and standard
deviation. `quantiles` has quantiles of Student's t. `pairs` has repeats of two arms with the ratio of their goodput and its
95 % interval, computed here from the definition in docs/reference/statistics.md with another generator and 20,000 resamples: so the
interval of crates/workload, with its own 200, is near and not equal.

Made with numpy 2.4.6 and scipy 1.17.1 for Python 3.11. The result is the same each time.
"""

import json
import math
import sys
from pathlib import Path

import numpy
from scipy import stats

FILE = Path(__file__).resolve().parents[2] / "crates" / "workload" / "tests" / "data" / "statistics.json"
PERCENTS = [0, 1, 25, 50, 75, 90, 95, 99, 99.9, 100]


def samples(random):
    lists = [
        [5.0],
        [1.0, 2.0],
        [4.0, 4.0, 4.0],
        [round(value, 6) for value in random.lognormal(3, 1, 37)],
        [round(value, 6) for value in random.exponential(50, 400)],
        [float(value) for value in random.integers(0, 20, 100)],
    ]
    return [
        {
            "values": values,
            "percentiles": [[percent, float(numpy.percentile(values, percent))] for percent in PERCENTS],
            "mean": float(numpy.mean(values)),
            "std": float(numpy.std(values)),
        }
        for values in lists
    ]


def quantiles():
    return [
        {"degrees": degrees, "chance": chance, "quantile": float(stats.t.ppf(chance, degrees))}
        for degrees in (1, 2, 3, 4, 9, 29)
        for chance in (0.9, 0.975, 0.995, 0.9995)
    ]


def difference(baseline, candidate):
    return (candidate - baseline) / (candidate + baseline)


def ratio(value):
    value = min(max(value, -0.999), 0.999)
    return (1 + value) / (1 - value)


def pair(random, repeats, count, shares):
    """Requests that met the SLO (1) or not (0), in runs of neighbours; all runs take ten seconds on one core."""
    walk = random.normal(0, 1, count)
    for at in range(1, count):
        walk[at] += 0.7 * walk[at - 1]
    trace = stats.norm.cdf(walk / walk.std())
    arms = [
        [(trace + random.normal(0, 0.1, count) < share * random.uniform(0.95, 1.05)).astype(int) for _ in range(repeats)]
        for share in shares
    ]
    goodput = numpy.array([[run.sum() / 10 for run in arm] for arm in arms])
    baseline, candidate = goodput.mean(axis=1)
    influence = 2 * (goodput[1] * baseline - goodput[0] * candidate) / (candidate + baseline) ** 2
    between = influence.std(ddof=1) / math.sqrt(repeats)
    length = math.ceil(math.sqrt(count))
    starts = random.integers(0, count, (20_000, math.ceil(count / length)))
    chosen = ((starts[:, :, None] + numpy.arange(length)).reshape(20_000, -1)[:, :count]) % count
    drawn = [numpy.mean([run[chosen].sum(axis=1) / 10 for run in arm], axis=0) for arm in arms]
    within = difference(*drawn).std(ddof=1)
    reach = math.hypot(stats.t.ppf(0.975, repeats - 1) * between, stats.norm.ppf(0.975) * within)
    middle = difference(baseline, candidate)
    return {
        "met": [["".join(map(str, run)) for run in arm] for arm in arms],
        "ratio": ratio(middle),
        "low": ratio(middle - reach),
        "high": ratio(middle + reach),
    }


def main():
    random = numpy.random.default_rng(17)
    content = {
        "samples": samples(random),
        "quantiles": quantiles(),
        "pairs": [
            pair(random, 3, 200, (0.8, 0.8)),
            pair(random, 3, 200, (0.5, 0.9)),
            pair(random, 5, 300, (0.7, 0.6)),
            pair(random, 10, 100, (0.9, 0.3)),
        ],
    }
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")


main()
