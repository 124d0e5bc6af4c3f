"""Steady load on the coordinators, how much of it gets through, and whether /ready tells the truth meanwhile."""

import threading
import time
from bisect import bisect
from collections import Counter

from hosts.asking import ask, body_of
from traces.processes import NotYet, wait_until

OUTPUT_TOKENS = 64
# What a client gives a request. Shorter than most of baton's own limits (deploy/local), longer than the line of T13.
DEADLINE_S = 20
CLIENTS = 6
# Each client begins one in this time, or as soon as its last one ends when that took longer: less than two cores manage.
PERIOD_S = 2
# Of just as many requests, whatever its beginning.
WINDOW_S = PERIOD_S
NORMAL_SHARE = 0.8
LOOK_EVERY_S = 0.1
PROBE_EVERY_S = 0.25
PROBE_WITHIN_S = 2


class Right:
    """The answers of one co-located node to the requests of the load, by turn."""

    def __init__(self, address, count):
        self.bodies = [body_of(turn, OUTPUT_TOKENS) for turn in range(count)]
        answers = [ask(address, body, DEADLINE_S) for body in self.bodies]
        bad = [answer for answer in answers if answer.outcome != "ok" or len(answer.tokens) != OUTPUT_TOKENS]
        assert not bad, f"the co-located node itself: {bad}"
        self.tokens = [answer.tokens for answer in answers]

    def ask(self, coordinator, turn):
        turn %= len(self.bodies)
        return ask(coordinator, self.bodies[turn], DEADLINE_S, self.tokens[turn])


class Repeating:
    """A thread that does `once(turn)` every `period_s` until it is stopped, and keeps what came of it."""

    def __init__(self, period_s, once, first=0.0):
        self.period_s, self.once, self.results, self.busy_since = period_s, once, [], None
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.run, args=(first,), daemon=True)
        self.thread.start()

    def run(self, first):
        self.stopped.wait(first)
        turn = 0
        while not self.stopped.is_set():
            self.busy_since = began = time.monotonic()
            self.results.append(self.once(turn))
            self.busy_since = None
            turn += 1
            self.stopped.wait(max(0.0, began + self.period_s - time.monotonic()))

    def end(self):
        self.stopped.set()
        self.thread.join(DEADLINE_S * 2)
        assert not self.thread.is_alive(), "a client does not end"
        return self.results


class Load:
    """Clients that take the coordinators in turn."""

    def __init__(self, right, coordinators):
        def client(number):
            def once(turn):
                return right.ask(coordinators[number % len(coordinators)], number + turn * CLIENTS)

            return Repeating(PERIOD_S, once, first=number * PERIOD_S / CLIENTS)

        self.clients = [client(number) for number in range(CLIENTS)]

    def answers(self):
        return [answer for client in self.clients for answer in list(client.results)]

    def rate(self, since, until):
        """Right answers a second."""
        return sum(answer.outcome == "ok" and since <= answer.ended < until for answer in self.answers()) / (until - since)

    def wait_until_each_has_one(self):
        def look():
            if not all(client.results for client in self.clients):
                raise NotYet("not every client has had an answer")

        wait_until("the load to be steady", DEADLINE_S + PERIOD_S, look)

    def seconds_to_normal(self, since, rate_before, limit_s):
        """From `since` until nothing of before is under way any more and a window begins in which as many right answers
        come as before. None: not within the limit."""

        def look():
            start = time.monotonic() - WINDOW_S
            if start < since or self.rate(start, start + WINDOW_S) < NORMAL_SHARE * rate_before:
                raise NotYet("too few right answers")
            return max(start, self.last_end(since)) - since

        try:
            return wait_until("normal", limit_s + WINDOW_S, look)
        except AssertionError:
            return None

    def last_end(self, since):
        """When the last request that began before `since` ended."""
        if any((client.busy_since or since) < since for client in self.clients):
            raise NotYet("requests of before are under way")
        return max([since, *(answer.ended for answer in self.answers() if answer.began < since)])

    def end(self):
        return [answer for client in self.clients for answer in client.end()]


class Truth:
    """Samples one coordinator's /ready and sends it small real requests: for how long did it say "ready" while those failed?"""

    def __init__(self, cluster, name):
        self.name = name
        address = cluster.address(name)

        def sample(_):
            try:
                return time.monotonic(), cluster.ask(name, "/ready", limit_s=1)[0] == 200
            except OSError:
                return time.monotonic(), False

        # No two alike: nothing of it may come from a cache.
        def probe(turn):
            body = {"prompt": f"{turn} is a number, and", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
            return ask(address, body, PROBE_WITHIN_S)

        self.samples, self.probes = Repeating(LOOK_EVERY_S, sample), Repeating(PROBE_EVERY_S, probe)

    def end(self):
        self.samples.end()
        self.probes.end()

    def failed(self):
        return [answer for answer in self.probes.results if answer.outcome != "ok"]

    def untrue_s(self):
        """Seconds with "ready" while the probe that began last failed."""
        probes = self.probes.results
        began = [answer.began for answer in probes]
        is_failed = lambda at: bool(before := bisect(began, at)) and probes[before - 1].outcome != "ok"  # noqa: E731
        return LOOK_EVERY_S * sum(is_ready and is_failed(at) for at, is_ready in self.samples.results)

    def not_ready_s(self):
        return LOOK_EVERY_S * sum(not is_ready for _, is_ready in self.samples.results)


def counted(answers):
    return Counter(answer.outcome for answer in answers)
