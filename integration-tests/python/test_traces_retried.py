"""Mixed requests while three in ten transfers break: every trace is whole, and the stages of every TTFT sum to it.

    BATON_MIXED_REQUESTS=200 BATON_MIXED_AT_ONCE=4      instead of 40, one after the other

needs a `baton` with failpoints (scripts/build-failpoints; scripts/test has one).
"""

import copy
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from traces.checks import incomplete, left_over, misplaced, unanswered
from traces.mixed import ANSWERED_WITHIN_S, BREAKS, UNATTRIBUTED_MS_MAX, WORDS, Run, send, whole
from traces.processes import NotYet, arm, by_hand, up, wait_until

REQUESTS = int(os.environ.get("BATON_MIXED_REQUESTS", "40"))
AT_ONCE = int(os.environ.get("BATON_MIXED_AT_ONCE", "1"))
STOPPED_WITHIN_S = 20


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    env = {
        "BATON_FAILPOINTS": str(folder),
        "BATON_LOCAL_PREFILL_BELOW_TOKENS": "8",
        # The budget's ratio would turn most retries into errors.
        "BATON_RETRIES_FREE_PER_MINUTE": "1000",
    }
    with up(folder, "2p2d", env) as cluster:
        for node in ("prefill-0", "prefill-1"):
            arm(folder, node, BREAKS)
        yield Run(cluster.get, cluster.url, REQUESTS, AT_ONCE)


def test_every_trace_is_whole_and_its_stages_sum_to_ttft(run):
    print(run.said())
    assert run.is_good(), run.said()
    assert len(run.traces) == REQUESTS


def test_some_were_retried_and_say_what_failed(run):
    again = run.retried()
    assert again, f"no transfer broke: {run.ways()}"
    for request in again:
        # Of several prompts each is tried by itself: the list is everybody's, the number that of the one tried most.
        retries = [prompt["attempts"] - 1 for prompt in request["prompts"] or [request]]
        assert len(request["failed_legs"]) == sum(retries) and max(retries) == request["attempts"] - 1, request
        assert all(leg.endswith(":transfer") for leg in request["failed_legs"]), request["failed_legs"]
    ways = " ".join(run.ways())
    for way in ("split", "prefill node alone", "local (short)"):
        assert way in ways, ways


def test_the_spans_of_an_attempt_that_failed_say_so_and_no_others(run):
    """The call to the node that failed_legs names, and the node's own span below it, of that attempt."""
    for trace in run.traces.values():
        calls = [span for span in trace["spans"] if span["kind"] == "client" and "attempt" in span["attributes"]]
        assert calls or trace["request"]["attempts"] == 1, trace
        failed = [f"{span['name']}:{span['attributes']['node'].split('@')[0]}:{span['attributes']['error.type']}" for span in calls if span["error"]]
        # Spans are in the order of their start, over all prompts.
        assert Counter(failed) == Counter(trace["request"]["failed_legs"]), calls
        answers = [span for span in trace["spans"] if span["kind"] == "server" and span["parent_span_id"] in {call["span_id"] for call in calls if call["error"]}]
        assert len(answers) >= len(failed) and all(span["error"] for span in answers), answers
        root, is_ok = trace["spans"][0], trace["request"]["outcome"] == "ok"
        assert root["parent_span_id"] is None and bool(root["error"]) != is_ok, root
        last = max((int(call["attributes"]["attempt"]) for call in calls), default=0)
        of_last = {call["span_id"] for call in calls if int(call["attributes"]["attempt"]) == last}
        wrong = [span for span in trace["spans"] if span["error"] and {span["span_id"], span["parent_span_id"]} & of_last]
        assert not (is_ok and wrong), wrong


def is_call(span):
    """Of the coordinator to a node, for an attempt."""
    return span["kind"] == "client" and "attempt" in span["attributes"]


def failed_leg(call):
    """A call that failed, in the words of `failed_legs`."""
    return f"{call['name']}:{call['attributes']['node'].split('@')[0]}:{call['attributes']['error.type']}"


# Whoever notices first that a node was killed: the coordinator, before or after the node's first word, or the decode node
# whose pair it was. That one stands still, nobody but the coordinator can say: its lease runs out.
NOTICED = {
    "killed": ["prefill:{}:unreachable", "prefill:{}:connection_lost", "decode:decode-0:transfer"],
    "stopped": ["prefill:{}:node_lost"],
}


def stopped(cluster, folder, nodes, point):
    """The one of these nodes that has stopped itself at the point; the others are told not to."""
    running = {process.name: process for process in cluster.running if process.name in nodes}

    def look():
        found = [name for name, node in running.items() if node.is_stopped()]
        if not found:
            raise NotYet("all run")
        return found[0]

    victim = wait_until(f"one of {nodes} to stand still at {point}", STOPPED_WITHIN_S, look)
    for name in set(nodes) - {victim}:
        arm(folder, name, f"{point}=off")
    return victim


@pytest.mark.parametrize("fate", NOTICED)
def test_a_node_that_is_gone_leaves_one_root_and_no_orphan(tmp_path, fate):
    """Its own spans are gone with it: the call that it did not answer is there and says why, and the way of the second
    attempt is whole."""
    env, nodes = {"BATON_FAILPOINTS": str(tmp_path)}, ["prefill-0", "prefill-1"]
    with by_hand(tmp_path, {"prefill": env}, prefill_nodes=2) as cluster, ThreadPoolExecutor(1) as pool:
        for name in nodes:
            arm(tmp_path, name, "mid-chunk=1*return(stop)")
        model = cluster.get("/v1/models")["data"][0]["id"]
        body = {"prompt": " ".join(WORDS[:100]), "max_tokens": 5, "ignore_eos": True}
        answer = pool.submit(send, cluster.url, model, fate, body)
        victim = stopped(cluster, tmp_path, nodes, "mid-chunk")
        if fate == "killed":
            cluster.kill(victim)
        answer.result(ANSWERED_WITHIN_S)
        if fate == "stopped":
            cluster.kill(victim)
        trace = whole(cluster.get, fate, faults_of_the_living)
    judge_retried(trace, victim, [leg.format(victim) for leg in NOTICED[fate]])
    assert list(unanswered(trace["spans"])) == ["the call prefill has 0 answers"]


def test_a_stream_that_moved_has_one_trace_and_its_stall_says_so(tmp_path):
    """The decode node is killed when its client has had a dozen tokens: the rest comes from the other one."""
    env, nodes = {"BATON_FAILPOINTS": str(tmp_path)}, ["decode-0", "decode-1"]
    with by_hand(tmp_path, {"decode": env}, decode_nodes=2) as cluster, ThreadPoolExecutor(1) as pool:
        for name in nodes:
            arm(tmp_path, name, "mid-decode=12*off->1*return(stop)")
        model = cluster.get("/v1/models")["data"][0]["id"]
        body = {"prompt": " ".join(WORDS[:100]), "max_tokens": 40, "ignore_eos": True, "stream": True}
        answer = pool.submit(send, cluster.url, model, "moved", body)
        victim = stopped(cluster, tmp_path, nodes, "mid-decode")
        cluster.kill(victim)
        answer.result(ANSWERED_WITHIN_S)
        trace = whole(cluster.get, "moved", faults_of_the_living)
    judge_retried(trace, victim, [f"decode:{victim}:connection_lost"])
    assert list(unanswered(trace["spans"])) == ["the call decode has 0 answers", "the call decode.open has 0 answers"]
    request = trace["request"]
    assert request["output_tokens"] == 40 and request["outcome"] == "ok", request
    causes = [stall["cause"] for stall in request["stalls"]]
    # A busy machine can make a step, a handoff or a token's way long, and then that stall is told as well. But nobody else has
    # a prompt or needs blocks here.
    assert causes.count("migration") == 1 and not {"prefill_chunk", "preemption"} & set(causes), request["stalls"]


def judge_retried(trace, victim, noticed):
    """The attempt failed in one of these words, and the stages of the whole are those of what the client saw."""
    request = trace["request"]
    failed = request["failed_legs"]
    assert request["attempts"] == 2, request
    # Two of those that have noticed it may both have said so before the attempt ended.
    assert 1 <= len(failed) <= 2 and len(set(failed)) == len(failed) and set(failed) <= set(noticed), failed
    calls_that_failed = [failed_leg(span) for span in trace["spans"] if is_call(span) and span["error"]]
    assert sorted(calls_that_failed) == sorted(failed), trace["spans"]
    assert {left["node"] for left in trace["not_asked"]} <= {victim}
    assert left_over(request) <= UNATTRIBUTED_MS_MAX, request


def faults_of_the_living(trace):
    return [fault for fault in incomplete(trace) if not is_of_the_dead(fault)]


def is_of_the_dead(fault):
    return fault.startswith("not asked: ") or fault.endswith(" has 0 answers")


def test_the_checks_find_what_is_wrong(run):
    """In copies of a trace: a span gone, a parent gone, a node's clock off, a stage too short."""
    is_plain = lambda request: request["transport"] and request["attempts"] == 1 and not request["prompts"]  # noqa: E731
    split = next(trace for trace in run.traces.values() if is_plain(trace["request"]))
    assert not incomplete(split)

    def damaged(damage):
        trace = copy.deepcopy(split)
        damage(trace, {(span["name"], span["kind"]): span for span in trace["spans"]})
        return trace

    for name in ("prefill.forward", "decode.loop", "admission"):
        assert incomplete(damaged(lambda trace, of: trace["spans"].remove(of[name, "internal"])))
    for key in (("prefill", "server"), ("kv.send", "client"), ("decode", "client")):
        assert incomplete(damaged(lambda trace, of: trace["spans"].remove(of[key])))
    assert incomplete(damaged(lambda trace, of: of["parse", "internal"].update(parent_span_id=None)))
    assert incomplete(damaged(lambda trace, of: trace.update(orphan_count=1)))
    assert incomplete(damaged(lambda trace, of: trace["not_asked"].append({"node": "decode-1", "why": "gone"})))

    def shift(node, by_ms):
        def damage(trace, _):
            for span in trace["spans"]:
                if span["process"] == node:
                    span["start_ms"] += by_ms
                    span["end_ms"] += by_ms

        return damage

    for node in ("prefill_node", "decode_node"):
        for by_ms in (-5, 150):
            assert list(misplaced(damaged(shift(split["request"][node], by_ms)))), (node, by_ms)
    request = copy.deepcopy(split["request"])
    request["stages"][0]["ms"] -= 2
    with pytest.raises(AssertionError):
        left_over(request)
