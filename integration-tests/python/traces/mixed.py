"""Requests of every kind, each the same in every run of the same turn, and their traces."""

import concurrent.futures
import json
import random
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

from traces.checks import incomplete, left_over
from traces.processes import NotYet, wait_until

WORDS = (Path(__file__).resolve().parents[2] / "data/golden/ppl.txt").read_text().split()
# The first transfer of each prefill node breaks just before its end, then three in ten do.
BREAKS = "transfer-nearly-done=1*return(fault)->30%return(fault)"
UNATTRIBUTED_MS_MAX = 1.0
# Of one answer; with many at once on two cores the longest take some seconds.
ANSWERED_WITHIN_S = 120
# Spans of other processes end with the request or a moment after it: a busy prefill node says its last word after the
# step that runs, which may be another request's whole prompt.
WHOLE_WITHIN_S = 15


def body_of(turn):
    """60 % streamed; chat, several choices or prompts, one token, and prompts so short that the decode node prefills them."""
    dice = random.Random(turn)
    words = dice.choice([5, 20, 60, 150, 300])
    at = dice.randrange(0, len(WORDS) - words)
    text = " ".join(WORDS[at : at + words])
    body = {"max_tokens": dice.choice([1, 4, 16, 32]), "stream": dice.random() < 0.6, "temperature": 0, "ignore_eos": True}
    way = dice.random()
    if way < 0.2:
        return body | {"messages": [{"role": "user", "content": text}]}
    if way < 0.3:
        return body | {"prompt": text, "n": 2, "temperature": 0.7, "seed": turn}
    if way < 0.4:
        return body | {"prompt": [text, " ".join(WORDS[at : at + words // 2]), " ".join(WORDS[at + 1 : at + words])]}
    return body | {"prompt": text}


def send(url, model, id, body):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    headers = {"content-type": "application/json", "x-request-id": id}
    request = urllib.request.Request(url + path, json.dumps({"model": model} | body).encode(), headers)
    with urllib.request.urlopen(request, timeout=ANSWERED_WITHIN_S) as answer:
        return answer.read()


def is_not_migratable(body, outcome):
    """Several choices whose first tokens are out are not begun again: an error by design (cluster/recovery.rs)."""
    return "n" in body and outcome == "transfer_failed"


def sent(url, model, id, body):
    try:
        send(url, model, id, body)
    except urllib.error.HTTPError as error:
        assert "n" in body and error.code == 502, f"{id}: {error} {error.read()}"


def whole(get, id, faults):
    """The waterfall once `faults` finds none in it."""

    def look():
        trace = get(f"/admin/traces/{id}?view=waterfall")
        if found := faults(trace):
            raise NotYet("; ".join(found))
        return trace

    return wait_until(f"a whole trace of {id}", WHOLE_WITHIN_S, look)


class Run:
    """`count` mixed requests, `at_once` of them at a time, and what their traces are like."""

    def __init__(self, get, url, count, at_once):
        model = get("/v1/models")["data"][0]["id"]
        # Another run on the same cluster must not find the records of this one.
        prefix = f"mixed-{random.SystemRandom().getrandbits(32):08x}"
        bodies = {f"{prefix}-{turn}": body_of(turn) for turn in range(count)}
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            list(pool.map(lambda item: sent(url, model, *item), bodies.items()))
        self.count, self.traces, self.faults, self.left = count, {}, [], {}
        for id, body in bodies.items():
            try:
                self.traces[id] = whole(get, id, incomplete)
                self.left[id] = left_over(self.traces[id]["request"])
            except AssertionError as why:
                self.faults.append(str(why))
                continue
            outcome = self.traces[id]["request"]["outcome"]
            if outcome != "ok" and not is_not_migratable(body, outcome):
                self.faults.append(f"{id}: {outcome}")

    def share_attributed(self):
        return sum(ms <= UNATTRIBUTED_MS_MAX for ms in self.left.values()) / self.count

    def ways(self):
        """How many went each way, by attempts and where the prompt was computed."""
        ways = Counter()
        for trace in self.traces.values():
            request = trace["request"]
            if request["local_prefill"]:
                where = f"local ({request['local_prefill']})"
            else:
                where = "split" if request["decode_node"] else "prefill node alone"
            ended = f"attempt {request['attempts']}" if request["outcome"] == "ok" else request["outcome"]
            ways[f"{where}, {ended}"] += 1
        return dict(sorted(ways.items()))

    def retried(self):
        return [trace["request"] for trace in self.traces.values() if trace["request"]["attempts"] > 1]

    def said(self):
        """In words, with every request that is not as it should be."""
        left = sorted(self.left.values()) or [float("nan")]
        at = {name: left[min(int(len(left) * rank), len(left) - 1)] for name, rank in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))}
        lines = [f"{len(self.traces)} of {self.count} traces are whole; {len(self.retried())} requests were retried; {self.ways()}"]
        lines += self.faults
        lines += [f"{id}: {ms:.3f} ms unattributed of {self.traces[id]['request']}" for id, ms in self.left.items() if ms > UNATTRIBUTED_MS_MAX]
        figures = " ".join(f"{name} {ms:.3f}" for name, ms in at.items())
        lines.append(f"unattributed ms: {figures} max {left[-1]:.3f}; {self.share_attributed():.1%} within {UNATTRIBUTED_MS_MAX} ms")
        return "\n".join(lines)

    def is_good(self):
        return not self.faults and self.share_attributed() >= 0.99
