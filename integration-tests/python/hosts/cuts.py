"""Cuts and losses under steady load: one row of figures for each, and what is wrong with it."""

import os
import random
import time
from dataclasses import dataclass, field
from threading import Event

from hosts.cluster import COORDINATORS, DECODE, LEASE_S, NODES, PREFILL
from hosts.load import CLIENTS, LOOK_EVERY_S, PERIOD_S, WINDOW_S, Load, Truth, counted

# Longer than the lease: whoever hears nothing of the other has to draw its conclusions.
HOLD_S = 6
NORMAL_WITHIN_S = 10
REST_WITHIN_S = 2 * LEASE_S + 1
# T14: the failure timeout of a node is its lease. That of a pair is two keepalives of 5 s (kv-transfer's grpc/connect.rs).
UNTRUE_S_MAX, PAIR_UNTRUE_S_MAX = LEASE_S, 10
OF_A_PAIR = {"is_pair": True, "untrue_s_max": PAIR_UNTRUE_S_MAX}
# Times are told always and judged in the long form alone, on a machine that does nothing else: CI judges texts, ends and rest.
JUDGES_TIMES = os.environ.get("BATON_HOSTS_FULL") == "1"
# What the distance of samples and probes adds, on a busy machine.
READING_S = 1


@dataclass
class Cut:
    """`steps`: (seconds to wait first, share of packets lost in percent, the ways that lose them)."""

    name: str
    steps: list
    # A link between a prefill and a decode node: nobody is to notice but these two. No error, no node taken for lost.
    is_pair: bool = False
    # None: told, not judged.
    untrue_s_max: float | None = UNTRUE_S_MAX


def both(one, other):
    return [(one, other), (other, one)]


def cut(name, ways, hold_s=HOLD_S, percent=100, **more):
    return Cut(name, [(0, percent, ways), (hold_s, 0, ways)], **more)


def three_ways(one, other, **more):
    yield cut(f"{one} x {other}", both(one, other), **more)
    yield cut(f"{one} -> {other}", [(one, other)], **more)
    yield cut(f"{other} -> {one}", [(other, one)], **more)


def all_links():
    links = [(prefill, decode) for prefill in PREFILL for decode in DECODE]
    links += [(coordinator, node) for coordinator in COORDINATORS for node in NODES]
    return links + [("etcd", member) for member in (*COORDINATORS, *NODES)]


def loss(percent, hold_s):
    ways = [way for link in all_links() for way in both(*link)]
    # Nobody is dead, so nobody is to be found dead: a request may take longer than a probe waits.
    return cut(f"{percent} % lost everywhere", ways, hold_s, percent, untrue_s_max=None)


def swizzle(seed):
    """Half of the links stop one by one, some of them one way only, and heal in another order."""
    dice = random.Random(seed)
    links = all_links()
    stopped = [dice.choice([both(*link), [link], [link[::-1]]]) for link in dice.sample(links, len(links) // 2)]
    steps = [(dice.uniform(0.1, 1), 100, ways) for ways in stopped]
    dice.shuffle(stopped)
    # Each of the faults has a time-out of its own, one after the other.
    return Cut(f"swizzle, seed {seed}", steps + [(dice.uniform(0.1, 1), 0, ways) for ways in stopped], untrue_s_max=None)


@dataclass
class Row:
    cut: str
    count: int = 0
    outcomes: dict = field(default_factory=dict)
    normal_s: float | None = None
    rest_s: float | None = None
    untrue_s: list = field(default_factory=list)
    not_ready_s: list = field(default_factory=list)
    dropped: int = 0
    rate_before: float = 0.0
    longest_s: float = 0.0
    faults: list = field(default_factory=list)

    HEAD = (
        "| cut | n | right | explicit errors | stuck, broken or wrong | longest s | right/s before | s to normal | s to rest "
        "| s ready while probes fail | s not ready | packets dropped |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
    )

    def said(self):
        bad = sum(self.outcomes.get(how, 0) for how in ("stuck", "broken", "wrong"))
        seconds = lambda s: "never" if s is None else f"{s:.1f}"  # noqa: E731
        each = lambda all: " ".join(seconds(one) for one in all)  # noqa: E731
        cells = [self.cut, self.count, self.outcomes.get("ok", 0), self.outcomes.get("error", 0), bad, seconds(self.longest_s)]
        cells += [seconds(self.rate_before), seconds(self.normal_s), seconds(self.rest_s)]
        cells += [each(self.untrue_s), each(self.not_ready_s), self.dropped]
        return "| " + " | ".join(map(str, cells)) + " |"


def table(rows):
    faults = [f"{row.cut}: {fault}" for row in rows for fault in row.faults]
    return "\n".join([Row.HEAD, *(row.said() for row in rows), *faults])


class Struck:
    """The cluster under load while something is done to it; `row` has the figures afterwards."""

    def __init__(self, cluster, right, name):
        self.cluster, self.row = cluster, Row(name)
        self.dropped_before = cluster.network.dropped()
        self.truths = [Truth(cluster, coordinator) for coordinator in COORDINATORS]
        self.load = Load(right, [cluster.address(coordinator) for coordinator in COORDINATORS])
        self.load.wait_until_each_has_one()
        # Whose opinion of which node or pair: [(when, what)], changes only.
        self.seen, began = {}, time.monotonic()
        self.began = began + WINDOW_S
        self.watch(self.began)
        # By luck a window may hold more than the clients' pace.
        self.row.rate_before = min(CLIENTS / PERIOD_S, self.load.rate(began, self.began))

    def watch(self, until):
        """What the coordinators think of the nodes and pairs; they can be asked all the time."""
        while (left := until - time.monotonic()) > 0:
            for coordinator in COORDINATORS:
                page = self.cluster.get(coordinator, "/admin/cluster")
                for node in page["nodes"]:
                    self.saw(f"{coordinator} sees {node['name']}", node["state"])
                for pair in page["pairs"]:
                    state = "usable" if pair["is_usable"] else pair["unusable_reason"]
                    self.saw(f"{coordinator} sees {pair['prefill']} x {pair['decode']}", state)
            Event().wait(min(left, 2 * LOOK_EVERY_S))

    def saw(self, what, state):
        changes = self.seen.setdefault(what, [])
        if not changes or changes[-1][1] != state:
            changes.append((time.monotonic() - self.began, state))

    def changes(self):
        """In words, of what was not the same all the time."""
        for what, changes in self.seen.items():
            if len(changes) > 1 or changes[0][1] not in ("ready", "usable"):
                yield f"{what}: " + ", ".join(f"{state} at {at:.1f} s" for at, state in changes)

    def lost(self):
        """Nodes that somebody did not take for ready."""
        return [line for line in self.changes() if " x " not in line]

    def healed(self, untrue_s_max=UNTRUE_S_MAX):
        """Waits for what has to come after the heal, and draws up the row."""
        row, healed = self.row, time.monotonic()
        row.normal_s = self.load.seconds_to_normal(healed, row.rate_before, NORMAL_WITHIN_S)
        answers = self.load.end()
        for truth in self.truths:
            truth.end()
        ended = time.monotonic()
        try:
            self.cluster.wait_for_rest(REST_WITHIN_S)
            row.rest_s = time.monotonic() - ended
        except AssertionError as why:
            row.faults.append(str(why))
        row.count, row.outcomes = len(answers), counted(answers)
        row.longest_s = max(answer.ended - answer.began for answer in answers)
        row.untrue_s = [truth.untrue_s() for truth in self.truths]
        row.not_ready_s = [truth.not_ready_s() for truth in self.truths]
        row.dropped = self.cluster.network.dropped() - self.dropped_before
        for answer in answers:
            if answer.outcome != "ok":
                when = f"{answer.began - healed:.1f} s to {answer.ended - healed:.1f} s from the heal"
                line = f"{answer.outcome} at {when}, request {answer.id}: {answer.why}"
                print(f"{row.cut}: {line}")
                if answer.outcome != "error":
                    row.faults.append(line)
        if JUDGES_TIMES and not row.rate_before:
            row.faults.append("no right answer in the seconds before: nothing can be said")
        if JUDGES_TIMES and row.normal_s is None:
            row.faults.append(f"not back to {row.rate_before:.1f} right answers a second within {NORMAL_WITHIN_S} s")
        for truth, seconds in zip(self.truths, row.untrue_s, strict=True):
            if JUDGES_TIMES and untrue_s_max is not None and seconds > untrue_s_max + READING_S:
                whys = [answer.why for answer in truth.failed()]
                row.faults.append(f"{truth.name} said ready for {seconds:.1f} s while requests failed: {whys}")
        return row


def strike(cluster, right, cut):
    network, struck = cluster.network, Struck(cluster, right, cut.name)
    row = struck.row
    try:
        for wait_s, percent, ways in cut.steps:
            struck.watch(time.monotonic() + wait_s)
            network.lose(percent, *ways)
    finally:
        network.heal()
    struck.healed(cut.untrue_s_max)
    if not row.dropped:
        row.faults.append("no packet was dropped: nothing was cut")
    if cut.is_pair and (row.outcomes.get("error") or struck.lost()):
        row.faults.append(f"others suffered: {row.outcomes}, {struck.lost()}")
    for line in struck.changes():
        print(f"{cut.name}: {line}")
    return row
