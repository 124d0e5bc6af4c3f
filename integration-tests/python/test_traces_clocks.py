"""One process's wall clock an hour wrong: every span of a request is still in its place, and the offset is told; and no
lease, deadline or reservation notices.

libfaketime moves the wall clock alone. The monotonic clocks of two machines have nothing to do with each other anyway, and
so have baton's, which count from each process's start; and a clock that somebody sets is the wall clock.
"""

import json
import threading
import time

import pytest

from traces.checks import incomplete, left_over, misplaced
from traces.mixed import WORDS, send, whole
from traces.processes import NotYet, by_hand, fetched, wait_until

HOUR_MS = 3_600_000
# Between reading one clock and the other, and rounding.
READING_MS = 0.1
UNATTRIBUTED_MS_MAX = 1.0
REQUESTS = 6
# A node asks its coordinator every 2 s (service-runtime/src/clock_offset.rs), and libfaketime its file every second.
TOLD_WITHIN_S = 20
NODES = {"prefill": "prefill-0", "decode": "decode-0"}
LEASE_MS = 2000
# Longer than a lease: one that followed the clock would run out.
STEP_S = 2.5
LOOK_EVERY_S = 0.1


@pytest.fixture(scope="module")
def library():
    return fetched("get-faketime", "faketime")["libfaketime"]


def moved(library, hours):
    return {"LD_PRELOAD": library, "FAKETIME": f"{hours:+d}h", "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"}


@pytest.mark.parametrize(
    "hours",
    [{"prefill": 1}, {"prefill": -1}, {"decode": 1}, {"decode": -1}, {"coordinator": 1}, {"coordinator": -1}],
    ids=lambda hours: "-".join(f"{role}{by:+d}h" for role, by in hours.items()),
)
def test_an_hour_moves_no_span(tmp_path, library, hours):
    with by_hand(tmp_path, {role: moved(library, by) for role, by in hours.items()}) as cluster:
        in_place(cluster, "moved", hours)


def test_a_clock_that_is_set_while_it_runs_is_believed_soon(tmp_path, library):
    setting = tmp_path / "faketime"
    setting.write_text("+0s\n")
    env = moved(library, 0) | {"FAKETIME_TIMESTAMP_FILE": str(setting), "FAKETIME_CACHE_DURATION": "1"}
    del env["FAKETIME"]
    with by_hand(tmp_path, {"prefill": env}) as cluster:
        in_place(cluster, "before", {})
        # Put there whole: libfaketime reads it at any time.
        (tmp_path / "next").write_text("+1h\n")
        (tmp_path / "next").rename(setting)

        def look():
            clock = next(node["clock"] for node in cluster.get("/admin/cluster")["nodes"] if node["name"] == "prefill-0")
            if abs(clock["offset_ms"] + HOUR_MS) > clock["error_ms"] + READING_MS:
                raise NotYet(str(clock))

        wait_until("the coordinator to know the new offset", TOLD_WITHIN_S, look)
        in_place(cluster, "after", {"prefill": 1})


def test_no_lease_runs_out_by_a_clock_that_is_set(tmp_path, library):
    """Each process's clock in turn an hour ahead, then an hour behind, while the others' stay where they were set."""
    env, setting = {}, {}
    for role in ("coordinator", "prefill", "decode"):
        setting[role] = tmp_path / f"{role}.faketime"
        setting[role].write_text("+0s\n")
        env[role] = moved(library, 0) | {"FAKETIME_TIMESTAMP_FILE": str(setting[role]), "FAKETIME_CACHE_DURATION": "1"}
        del env[role]["FAKETIME"]
    env["coordinator"]["BATON_LEASE_MS"] = str(LEASE_MS)
    with by_hand(tmp_path, env) as cluster:

        def steps():
            for hours in (1, -1):
                for role, file in setting.items():
                    (tmp_path / "next").write_text(f"{hours:+d}h\n")
                    (tmp_path / "next").rename(file)
                    yield f"{role} {hours:+d}h"

        undisturbed(cluster, steps())
        # All three are an hour behind at the end: the nodes agree with the coordinator, and the clocks were set indeed.
        behind = time.time() * 1000 - cluster.get("/admin/cluster")["coordinator"]["now_unix_ms"]
        assert abs(behind - HOUR_MS) < 1000, behind
        assert_offsets(cluster, {node: 0 for node in NODES.values()}, 100)


def test_no_lease_runs_out_by_clocks_that_drift(tmp_path, library):
    """Both clocks of the prefill node run 5 % fast and both of the decode node 5 % slow, the monotonic ones too."""
    drift = {"prefill": "+0 x1.05", "decode": "+0 x0.95"}
    env = {role: {"LD_PRELOAD": library, "FAKETIME": text} for role, text in drift.items()}
    env["coordinator"] = {"BATON_LEASE_MS": str(LEASE_MS)}
    with by_hand(tmp_path, env) as cluster:
        undisturbed(cluster, [f"drifting {i}" for i in range(4)])
        # Four steps of 2.5 s have drifted by half a second at least, each its way.
        offset = {node["name"]: node["clock"]["offset_ms"] for node in cluster.get("/admin/cluster")["nodes"]}
        assert offset["prefill-0"] < -400 and offset["decode-0"] > 400, offset


def assert_offsets(cluster, wanted, within_ms):
    def look():
        clocks = {node["name"]: node["clock"]["offset_ms"] for node in cluster.get("/admin/cluster")["nodes"]}
        if any(abs(clocks[name] - offset) > within_ms for name, offset in wanted.items()):
            raise NotYet(str(clocks))

    wait_until(f"the offsets to be {wanted}", TOLD_WITHIN_S, look)


def undisturbed(cluster, steps):
    """Requests all the time, and every node looked at all the time: the same answers, the same lives, all ready."""
    model = cluster.get("/v1/models")["data"][0]["id"]
    body = {"prompt": " ".join(WORDS[:120]), "max_tokens": 12, "temperature": 0, "ignore_eos": True}

    def answer(id):
        return json.loads(send(cluster.url, model, id, body))["choices"][0]["text"]

    expected, lives = answer("before"), {node["name"]: node["epoch"] for node in cluster.get("/admin/cluster")["nodes"]}
    assert set(lives) == set(NODES.values())
    wrong, looks, over = [], [], threading.Event()

    def watch():
        try:
            while not over.wait(LOOK_EVERY_S):
                for node in cluster.get("/admin/cluster")["nodes"]:
                    looks.append(node["lease_left_ms"])
                    if node["state"] != "ready" or node["epoch"] != lives[node["name"]]:
                        wrong.append(node)
        except Exception as why:
            # Nobody hears an exception of a thread.
            wrong.append(why)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        answered = 0
        for step in steps:
            ends = time.monotonic() + STEP_S
            while time.monotonic() < ends:
                assert answer(f"{step.replace(' ', '-')}-{answered}") == expected, step
                answered += 1
    finally:
        over.set()
        watching.join()
    assert not wrong, wrong[0]
    records = cluster.get("/admin/requests?limit=1000")["records"]
    failed = [record for record in records if record["attempts"] != 1 or record["outcome"] != "ok"]
    assert not failed, failed
    print(f"{answered} answers, {len(looks)} looks, least lease left {min(looks):.0f} ms")


def in_place(cluster, prefix, hours):
    """Sends requests, and looks at the place of every span, at the offsets and at the sum of the stages."""
    model = cluster.get("/v1/models")["data"][0]["id"]
    worst, off = 0, []
    for turn in range(REQUESTS):
        text = " ".join(WORDS[turn * 97 : turn * 97 + (10, 60, 120)[turn % 3]])
        body = {"prompt": text, "max_tokens": (1, 12)[turn % 2], "stream": turn % 4 == 0, "ignore_eos": True}
        send(cluster.url, model, f"{prefix}-{turn}", body)
        trace = whole(cluster.get, f"{prefix}-{turn}", incomplete)
        wrong = list(misplaced(trace))
        assert not wrong, "\n".join(wrong)
        left = left_over(trace["request"])
        # A node's clock may be measured anew between two marks of one request. They then differ by its error.
        allowed = UNATTRIBUTED_MS_MAX + max((clock["error_ms"] for clock in trace["clocks"]), default=0.0)
        assert left <= allowed, f"{left} ms of {trace['request']['ttft_ms']} have no stage: {trace['request']['stages']}"
        worst = max(worst, left)
        off = offsets(trace, hours)
    print(f"{prefix} {hours}: offsets {off}, at most {worst:.3f} ms unattributed")


def offsets(trace, hours):
    """Of the nodes that took part, each within its stated error of the truth: what to add to its clock."""
    took_part = {span["process"] for span in trace["spans"]} - {"coordinator-0"}
    told = {clock["node"]: clock for clock in trace["clocks"]}
    assert took_part <= set(told), f"{took_part} took part, and of {set(told)} the clocks are told"
    for role, node in NODES.items():
        if node in took_part:
            truth = HOUR_MS * (hours.get("coordinator", 0) - hours.get(role, 0))
            clock = told[node]
            assert abs(clock["offset_ms"] - truth) <= clock["error_ms"] + READING_MS, f"{clock}, in truth {truth}"
            # An error of any size would make the rest of this test true.
            assert clock["error_ms"] < 20, clock
    return [(clock["node"], clock["offset_ms"], clock["error_ms"]) for clock in told.values()]
