"""The shipped processes on seven hosts with their own addresses, whose cables are cut: T13, T14 and etcd's part of T12.

    BATON_HOSTS_FULL=1        every link, each way, losses and the swizzle: eight minutes instead of one and a half
    BATON_HOSTS_SEED=N        the swizzle of an earlier run

Hosts are network namespaces (hosts/network.py): root, or `unshare --map-root-user`, and what scripts/get-nftables fetches.
"""

import os
import random
import time

import pytest

from hosts.cluster import COORDINATORS, DECODE, ETCD_LEASE_S, NODES, PREFILL, one_node, seven_hosts
from hosts.cuts import Struck, both, cut, loss, strike, swizzle, table, three_ways, undisturbed
from hosts.load import DEADLINE_S, LOOK_EVERY_S, Right
from traces.checks import incomplete
from traces.processes import NotYet, wait_until

IS_FULL = os.environ.get("BATON_HOSTS_FULL") == "1"
SEED = int(os.environ.get("BATON_HOSTS_SEED") or random.SystemRandom().getrandbits(16))
# Until the binary with --membership is there.
IS_EMBEDDED = os.environ.get("BATON_HOSTS_EMBEDDED") == "1"
USED = COORDINATORS[:1] if IS_EMBEDDED else COORDINATORS
UNPLUGGED_S = 10
OUTPUT_TOKENS = 64


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with seven_hosts(tmp_path_factory.mktemp("hosts"), IS_EMBEDDED) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def right(hosts, tmp_path_factory):
    with one_node(hosts.network, tmp_path_factory.mktemp("alone")) as address:
        return Right(address, 12)


def test_a_request_crosses_hosts(hosts, right):
    """Prefilled on one host, decoded on another, asked of a third: the tokens of one node."""
    for name in USED:
        count = len(right.bodies) // 2
        answers = [right.ask(hosts.address(name), turn) for turn in range(count)]
        assert [answer.outcome for answer in answers] == ["ok"] * count, answers
        assert hosts.metric(name, "baton_handoffs_total", transport="grpc", outcome="committed") == count
        assert hosts.metric(name, "baton_handoffs_total") == count
        assert hosts.metric(name, "baton_local_prefills_total") == 0
        addresses = {node["name"]: node["address"].partition(":")[0] for node in hosts.get(name, "/admin/cluster")["nodes"]}
        assert addresses == {node: hosts.network[node].address for node in NODES}

        def look():
            trace = hosts.get(name, f"/admin/traces/{answers[-1].id}?view=waterfall")
            if found := incomplete(trace):
                raise NotYet("; ".join(found))
            return trace

        spans = wait_until("a whole trace", DEADLINE_S, look)["spans"]
        where = {span["process"] for span in spans}
        assert len(where) == 3 and name in where and where & set(PREFILL) and where & set(DECODE), where


def links_to_cut():
    etcd = [] if IS_EMBEDDED else [*three_ways("coordinator-0", "etcd"), *three_ways("prefill-0", "etcd"), *three_ways("decode-0", "etcd")]
    nothing_to_decode = both("coordinator-0", "decode-0") + both("coordinator-0", "decode-1")
    if not IS_FULL:
        yield cut("prefill-0 x decode-0", both("prefill-0", "decode-0"), is_pair=True)
        yield cut("decode-0 -> coordinator-0", [("decode-0", "coordinator-0")])
        yield cut("coordinator-0 x decode-*", nothing_to_decode)
        yield loss(30, 4, not IS_EMBEDDED)
        return
    # Longer than the ten seconds after which a pair is known to be silent.
    yield from three_ways("prefill-0", "decode-0", hold_s=15, is_pair=True)
    yield from three_ways("coordinator-0", "prefill-0")
    yield from three_ways("coordinator-0", "decode-0")
    yield cut("coordinator-0 x prefill-*", both("coordinator-0", "prefill-0") + both("coordinator-0", "prefill-1"))
    yield cut("coordinator-0 x decode-*", nothing_to_decode)
    yield from etcd
    yield loss(5, 8, not IS_EMBEDDED)
    yield loss(30, 8, not IS_EMBEDDED)
    for turn in range(3):
        yield swizzle(SEED + turn, not IS_EMBEDDED)


def test_links_are_cut_and_heal(hosts, right):
    rows = [undisturbed(hosts, right, USED)]
    for one in links_to_cut():
        rows.append(strike(hosts, right, USED, one, rows[0].rate))
        print(rows[-1].said(), flush=True)
    print(table(rows))
    assert not [fault for row in rows for fault in row.faults], f"{table(rows)}\n{hosts.logs()}"


@pytest.mark.skipif(IS_EMBEDDED, reason="no etcd without --membership")
def test_etcd_unplugged_costs_no_request(hosts, right):
    struck = Struck(hosts, right, USED, f"etcd unplugged for {UNPLUGGED_S} s", 1)
    row, stale = struck.row, set()
    hosts.network.unplug("etcd")
    try:
        ends = time.monotonic() + UNPLUGGED_S
        while time.monotonic() < ends:
            struck.watch(time.monotonic() + LOOK_EVERY_S)
            stale |= {name for name in COORDINATORS if hosts.membership(name)["is_stale"]}
    finally:
        hosts.network.plug("etcd")
    plugged = time.monotonic()

    def look():
        for name in COORDINATORS:
            found = hosts.membership(name)
            if not found["registered"] or found["is_stale"] or sorted(found["nodes"]) != sorted(NODES):
                raise NotYet(f"{name}: {found}")

    wait_until("all to be registered again", 2 * ETCD_LEASE_S, look)
    registered_s = time.monotonic() - plugged
    struck.healed()
    print(table([row]), f"\nall registered again {registered_s:.1f} s after the plug")
    assert not row.faults and set(row.outcomes) == {"ok"}, f"{table([row])}\n{hosts.logs()}"
    assert stale == set(COORDINATORS), f"only {stale} noticed that etcd was gone"
    assert not struck.lost(), f"evicted: {struck.lost()}"
