"""The figures of Mooncake and Azure traces, to set beside those of crates/workload.

    python3 integration-tests/python/trace_facts.py FILE... > crates/workload/tests/data/facts.json

The keys are those of `TraceFacts`. `cargo run --release -p workload --example trace_facts -- FILE` prints the crate's own.
"""

import collections
import csv
import datetime
import fractions
import hashlib
import json
import math
import pathlib
import statistics
import sys


def spread(values):
    ordered = sorted(values)
    percentile = lambda p: float(ordered[math.ceil(fractions.Fraction(p, 100) * len(ordered)) - 1])
    figures = {"mean": statistics.fmean(ordered)}
    figures |= {f"p{p}": percentile(p) for p in (10, 50, 90, 99)}
    return figures | {"max": float(ordered[-1])}


def bins(times, width):
    counts = collections.Counter(math.floor((time - times[0]) / width) for time in times)
    return spread([counts[bin] for bin in range(max(counts) + 1)])


def prefixes(rows, block):
    seen = collections.Counter()
    last, hits, tokens, uncached, reuse = {}, [], 0, [], []
    for time, prompt, _, ids in rows:
        found = [position for position, id in enumerate(ids) if id in last]
        cached = sum(min(prompt, (position + 1) * block) - position * block for position in found)
        tokens += cached
        uncached.append(prompt - cached)
        reuse += [float(time - last[ids[position]]) for position in found if position > 0]
        hits.append(found)
        seen.update(ids)
        last.update((id, time) for id in ids)
    blocks = sum(seen.values())
    return {
        "block_tokens": block,
        "blocks": blocks,
        "distinct_blocks": len(seen),
        "hit_blocks": sum(map(len, hits)) / blocks,
        "hit_tokens": tokens / sum(prompt for _, prompt, _, _ in rows),
        "hit_blocks_after_first": sum(position > 0 for found in hits for position in found) / (blocks - len(rows)),
        "requests_with_hits": sum(len(found) > 1 for found in hits) / len(rows),
        "uncached_tokens": spread(uncached),
        "reuse_s": spread(reuse),
        "once": sum(count == 1 for count in seen.values()) / len(seen),
    }


def mooncake(path):
    for line in path.read_text().splitlines():
        row = json.loads(line)
        yield fractions.Fraction(row["timestamp"], 1000), row["input_length"], row["output_length"], row["hash_ids"]


def azure(path):
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            clock, _, digits = row["TIMESTAMP"].partition(".")
            whole = datetime.datetime.fromisoformat(clock + "+00:00").timestamp()
            time = int(whole) + fractions.Fraction(int(digits), 10 ** len(digits))
            yield time, int(row["ContextTokens"]), int(row["GeneratedTokens"]), []


def trace_hash(rows, block):
    """SHA-256 of the trace in baton's own format, without its name."""
    lines = [{"baton_trace": 1, "block_tokens": block}]
    for time, prompt, output, ids in rows:
        line = {"at_ns": int((time - (0 if block else rows[0][0])) * 10**9)}
        line |= {"prompt_tokens": prompt, "output_tokens": output}
        lines.append(line | ({"prefix_blocks": ids} if ids else {}))
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    return hashlib.sha256(text.encode()).hexdigest()


def facts(path):
    rows = list((azure if path.suffix == ".csv" else mooncake)(path))
    times = [row[0] for row in rows]
    gaps = [float(later - earlier) for earlier, later in zip(times, times[1:])]
    duration = float(times[-1] - times[0])
    return {
        "name": path.name,
        "hash": trace_hash(rows, 512 if rows[0][3] else 0),
        "requests": len(rows),
        "conversations": 0,
        "duration_s": duration,
        "arrivals_per_s": len(rows) / duration,
        "gap_variation": statistics.pstdev(gaps) / statistics.fmean(gaps),
        "arrivals_in_1s": bins(times, 1),
        "arrivals_in_10s": bins(times, 10),
        "prompt_tokens": spread([row[1] for row in rows]),
        "output_tokens": spread([row[2] for row in rows]),
        "prefixes": prefixes(rows, 512) if rows[0][3] else None,
    }


print(json.dumps([facts(pathlib.Path(name)) for name in sys.argv[1:]], indent=1))
