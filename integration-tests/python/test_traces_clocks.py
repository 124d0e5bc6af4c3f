"""One process's wall clock an hour wrong: every span of a request is still in its place, and the offset is told.

libfaketime moves the wall clock alone. The monotonic clocks of two machines have nothing to do with each other anyway, and
so have baton's, which count from each process's start; and a clock that somebody sets is the wall clock.
"""

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
        assert left <= UNATTRIBUTED_MS_MAX, f"{left} ms of {trace['request']['ttft_ms']} have no stage: {trace['request']['stages']}"
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
