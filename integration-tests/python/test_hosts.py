"""The shipped processes on seven hosts with their own addresses, whose cables are cut: T13, T14 and etcd's part of T12.

    BATON_HOSTS_FULL=1        every link, each way, losses and the swizzle: eight minutes instead of one and a half
    BATON_HOSTS_SEED=N        the swizzle of an earlier run

Hosts are network namespaces (hosts/network.py): root, or `unshare --map-root-user`, and what scripts/get-nftables fetches.
"""

import os
import random
import socket
import time
from contextlib import suppress

import pytest

from hosts.cluster import COORDINATORS, DECODE, ETCD_LEASE_S, NODES, PREFILL, one_node, seven_hosts
from hosts.cuts import OF_A_PAIR, Struck, both, cut, loss, strike, swizzle, table, three_ways
from hosts.load import DEADLINE_S, LOOK_EVERY_S, Right
from hosts.network import Network
from traces.checks import incomplete
from traces.processes import NotYet, wait_until

IS_FULL = os.environ.get("BATON_HOSTS_FULL") == "1"
SEED = int(os.environ.get("BATON_HOSTS_SEED") or random.SystemRandom().getrandbits(16))
UNPLUGGED_S = 10


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with seven_hosts(tmp_path_factory.mktemp("hosts")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def right(hosts, tmp_path_factory):
    with one_node(hosts.network, tmp_path_factory.mktemp("alone")) as address:
        # An odd number: else a client, and a coordinator, would get only the greedy or only the sampled ones.
        return Right(address, 7)


def packets_that_arrive(network, source, target, count=200):
    """Of `count` sent by one host to another at once, fewer than a socket's buffer holds."""
    with network[target].entered():
        ear = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with network[source].entered():
        mouth = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with ear, mouth:
        ear.bind((network[target].address, 0))
        ear.settimeout(0.2)
        for _ in range(count):
            with suppress(OSError):
                mouth.sendto(b"packet", ear.getsockname())
        arrived = 0
        with suppress(TimeoutError):
            while arrived < count:
                ear.recv(100)
                arrived += 1
    return arrived


def test_hosts_are_apart_and_cables_are_cut():
    """What all the rest relies on."""
    interfaces = socket.if_nameindex()
    network = Network(["left", "right", "third"])
    arrive = lambda *way: packets_that_arrive(network, *way)  # noqa: E731
    there, back, aside = ("left", "right"), ("right", "left"), ("left", "third")
    assert [arrive(*way) for way in (there, back, aside)] == [200, 200, 200]
    network.lose(100, there)
    assert [arrive(*way) for way in (there, back, aside)] == [0, 200, 200] and network.dropped() == 200
    network.lose(30, back)
    assert arrive(*there) == 0 and 100 < arrive(*back) < 180
    network.heal()
    network.unplug("right")
    assert [arrive(*way) for way in (there, back, aside)] == [0, 0, 200]
    network.plug("right")

    def look():
        if (arrived := [arrive(*way) for way in (there, back)]) != [200, 200]:
            raise NotYet(arrived)

    # The kernel looks at a cable that comes back once a second at most.
    wait_until("the cable to carry again", 5, look)
    assert socket.if_nameindex() == interfaces, "the machine's own network was touched"


@pytest.mark.parametrize("name", COORDINATORS)
def test_a_request_crosses_hosts(hosts, right, name):
    """Prefilled on one host, decoded on another, asked of a third: the tokens of one node."""

    def counts():
        committed = hosts.metric(name, "baton_handoffs_total", transport="grpc", outcome="committed")
        return committed, hosts.metric(name, "baton_handoffs_total"), hosts.metric(name, "baton_local_prefills_total")

    count, before = len(right.bodies), counts()
    answers = [right.ask(hosts.address(name), turn) for turn in range(count)]
    assert [answer.outcome for answer in answers] == ["ok"] * count, answers
    assert [after - was for after, was in zip(counts(), before, strict=True)] == [count, count, 0]
    addresses = {node["name"]: node["address"].partition(":")[0] for node in hosts.get(name, "/admin/cluster")["nodes"]}
    assert addresses == {node: hosts.network[node].address for node in NODES}

    def look():
        trace = hosts.get(name, f"/admin/traces/{answers[-1].id}?view=waterfall")
        if found := incomplete(trace):
            raise NotYet("; ".join(found))
        return trace

    where = {span["process"] for span in wait_until("a whole trace", DEADLINE_S, look)["spans"]}
    assert len(where) == 3 and name in where and where & set(PREFILL) and where & set(DECODE), where


def links_to_cut():
    nothing_to_decode = both("coordinator-0", "decode-0") + both("coordinator-0", "decode-1")
    if not IS_FULL:
        yield cut("prefill-0 x decode-0", both("prefill-0", "decode-0"), **OF_A_PAIR)
        yield cut("decode-0 -> coordinator-0", [("decode-0", "coordinator-0")])
        yield cut("coordinator-0 x decode-*", nothing_to_decode)
        yield loss(30, 4)
        return
    # Longer than the ten seconds after which a pair is known to be silent.
    yield from three_ways("prefill-0", "decode-0", hold_s=15, **OF_A_PAIR)
    yield from three_ways("coordinator-0", "prefill-0")
    yield from three_ways("coordinator-0", "decode-0")
    yield cut("coordinator-0 x prefill-*", both("coordinator-0", "prefill-0") + both("coordinator-0", "prefill-1"))
    yield cut("coordinator-0 x decode-*", nothing_to_decode)
    for member in ("coordinator-0", "prefill-0", "decode-0"):
        yield from three_ways(member, "etcd")
    yield loss(5, 8)
    yield loss(30, 8)
    for turn in range(3):
        yield swizzle(SEED + turn)


def test_links_are_cut_and_heal(hosts, right):
    rows = []
    for one in links_to_cut():
        rows.append(strike(hosts, right, one))
        print(rows[-1].said(), flush=True)
    print(table(rows))
    assert not [fault for row in rows for fault in row.faults], f"{table(rows)}\n{hosts.logs()}"


def test_etcd_unplugged_costs_no_request(hosts, right):
    before, noticed = hosts.registered(), set()
    struck = Struck(hosts, right, f"etcd unplugged for {UNPLUGGED_S} s")
    hosts.network.unplug("etcd")
    try:
        ends = time.monotonic() + UNPLUGGED_S
        while time.monotonic() < ends:
            struck.watch(time.monotonic() + LOOK_EVERY_S)
            noticed |= {name for name in COORDINATORS if hosts.get(name, "/admin/cluster")["membership"]["is_stale"]}
    finally:
        hosts.network.plug("etcd")
    plugged = time.monotonic()

    def look():
        # Its own leases went on: whoever stands there came after it was unplugged.
        now = hosts.registered()
        back = {name for name, revision in now.items() if revision > max(before.values())}
        if back != {*COORDINATORS, *NODES}:
            raise NotYet(f"{now} after {before}")
        for name in COORDINATORS:
            found = hosts.get(name, "/admin/cluster")["membership"]
            if not found["registered"] or found["is_stale"] or sorted(found["nodes"]) != sorted(NODES):
                raise NotYet(f"{name}: {found}")

    # The line is two leases; a busy CI machine has its time-outs to get through.
    wait_until("all to be registered again", (2 if IS_FULL else 15) * ETCD_LEASE_S, look)
    registered_s = time.monotonic() - plugged
    row = struck.healed()
    print(table([row]), f"\nall registered again {registered_s:.1f} s after the plug")
    assert not row.faults and set(row.outcomes) == {"ok"}, f"{table([row])}\n{hosts.logs()}"
    assert noticed == set(COORDINATORS), f"only {noticed} noticed that etcd was gone"
    assert not struck.lost(), f"evicted: {struck.lost()}"
