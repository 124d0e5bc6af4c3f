"""The spans of a made-up request, as `/admin/traces/{id}` gives them."""

import random

import fake_requests


class Spans:
    def __init__(self, record):
        self.draw = random.Random(record["trace_id"])
        self.record = record
        self.spans = []

    def add(self, name, process, start, end, parent=None, kind="internal", **more):
        service = "baton-" + process.split("-")[0]
        span = {
            "span_id": fake_requests.hex_of(self.draw, 16),
            "parent_span_id": parent and parent["span_id"],
            "name": name,
            "kind": kind,
            "service": service,
            "process": process,
            "depth": parent["depth"] + 1 if parent else 0,
            "start_ms": round(start, 3),
            "end_ms": round(end, 3),
            "attributes": {},
            "events": [],
            "links": [],
            "error": None,
        } | more
        self.spans.append(span)
        return span


def event(name, at, **attributes):
    return {"name": name, "at_ms": round(at, 3), "attributes": attributes}


def of(record):
    made = Spans(record)
    stages = {(row["stage"], row["phase"]): row["ms"] for row in record["_detail"]["stages"]}
    e2e = record["e2e_ms"]
    root = made.add(
        f"chat {record['model']}",
        "coordinator",
        0,
        e2e,
        kind="server",
        attributes={
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": record["model"],
            "gen_ai.usage.input_tokens": record["prompt_tokens"],
            "gen_ai.usage.output_tokens": record["output_tokens"],
            "baton.lane": record["lane"],
            "x_request_id": record["id"],
        },
    )
    at = 0.05
    for stage in ("parse", "tokenize", "queue", "route"):
        ms = stages[stage, "ttft"]
        name = "admission" if stage == "queue" else stage
        made.add(
            name,
            "coordinator",
            at,
            at + ms,
            root,
            attributes={"baton.lane": record["lane"]}
            if stage == "queue"
            else {"baton.reason": record["route_reason"]}
            if stage == "route"
            else {},
        )
        at += ms
    if record["ttft_ms"] is not None:
        legs(made, record, stages, root, at)
    return ordered(made.spans)


def legs(made, record, stages, root, at):
    prefill_node, decode_node = record["prefill_node"], record["decode_node"]
    ttft, e2e, tokens = record["ttft_ms"], record["e2e_ms"], record["prompt_tokens"]
    for leg in record["_detail"]["failed_legs"]:
        _, node, cause = leg.split(":")
        made.add(
            "decode.open",
            "coordinator",
            at - 58,
            at - 2,
            root,
            kind="client",
            error=f"{cause}: the connection to {node} was lost",
            attributes={"baton.node": node, "baton.attempt": 0},
        )
    opened = at + stages["reserve", "ttft"]
    call = made.add(
        "decode.open", "coordinator", at, opened, root, kind="client", attributes={"baton.node": decode_node}
    )
    made.add(
        "decode.open",
        decode_node,
        at + (opened - at) * 0.3,
        at + (opened - at) * 0.7,
        call,
        kind="server",
        attributes={"baton.blocks": tokens // 16 + 1},
    )
    accepted = opened + stages["dispatch", "ttft"]
    sampled = accepted + stages["prefill_queue", "ttft"] + stages["prefill_forward", "ttft"]
    call = made.add(
        "prefill", "coordinator", opened, sampled + 3.4, root, kind="client", attributes={"baton.node": prefill_node}
    )
    early = record["_early"]
    served = made.add(
        "prefill", prefill_node, (opened - early) if early else accepted, sampled + 3.2, call, kind="server"
    )
    started = accepted + stages["prefill_queue", "ttft"]
    made.add("prefill.queue", prefill_node, accepted, started, served)
    chunks = max(1, -(-tokens // 512))
    ends = [started + (sampled - started) * (n + 1) / chunks for n in range(chunks)]
    made.add(
        "prefill.forward",
        prefill_node,
        started,
        sampled,
        served,
        attributes={"baton.tokens": tokens - record["cached_tokens"], "baton.cached_tokens": record["cached_tokens"]},
        events=[event("chunk", end, tokens=min(512, tokens - n * 512)) for n, end in enumerate(ends)],
    )
    first_sent = ends[0] + 0.1 if chunks > 1 else sampled - record["kv_transfer_ms"] / 2
    send = made.add(
        "kv.send",
        prefill_node,
        first_sent,
        sampled + 2.9,
        served,
        kind="client",
        attributes={
            "baton.bytes": record["kv_bytes"],
            "baton.layers": 30,
            "baton.transport": "shm-direct",
            "baton.gb_per_s": 5.1,
        },
    )
    call = made.add(
        "decode", "coordinator", sampled + 0.2, e2e - 0.4, root, kind="client", attributes={"baton.node": decode_node}
    )
    served = made.add("decode", decode_node, sampled + 0.3, e2e - 0.6, call, kind="server")
    # The call and the receiving overlap: frames arrive while the prompt is still computed.
    made.add(
        "kv.recv",
        decode_node,
        first_sent + 0.15,
        sampled + 3.1,
        call,
        kind="server",
        links=[send["span_id"]],
        attributes={"baton.bytes": record["kv_bytes"]},
    )
    made.spans[-1]["start_ms"] = (
        max(made.spans[-1]["start_ms"], round(sampled + 0.25, 3)) if chunks == 1 else made.spans[-1]["start_ms"]
    )
    made.spans[-1]["parent_span_id"], made.spans[-1]["depth"] = root["span_id"], 1
    joined = sampled + 3.7
    made.add("decode.queue", decode_node, sampled + 3.1, joined, served)
    made.add(
        "decode.first_step",
        decode_node,
        joined,
        joined + record["itl_p50_ms"] if record["itl_p50_ms"] else joined,
        served,
    )
    events = [
        event("stall", stall["at_ms"], gap_ms=stall["gap_ms"], cause=stall["cause"])
        for stall in record["_detail"]["stalls"]
    ]
    events += [
        event("tokens", ttft + n * record["itl_p50_ms"], count=n)
        for n in range(16, record["output_tokens"], 16)
        if record["itl_p50_ms"]
    ]
    made.add(
        "decode.loop",
        decode_node,
        joined,
        max(joined, e2e - 0.8),
        served,
        attributes={"baton.steps": record["output_tokens"]},
        events=events,
    )
    made.add(
        "egress",
        "coordinator",
        sampled + stages["first_token_return", "ttft"],
        e2e - 0.05,
        root,
        attributes={"baton.back_pressure_ms": 0.7},
    )


def ordered(spans):
    """Parents before children, siblings by start."""
    children = {}
    for span in spans:
        children.setdefault(span["parent_span_id"], []).append(span)
    result = []

    def walk(parent_id):
        for span in sorted(children.get(parent_id, []), key=lambda one: one["start_ms"]):
            result.append(span)
            walk(span["span_id"])

    walk(None)
    return result


def waterfall(record):
    detail = {key: record["_detail"][key] for key in ("stages", "stalls")}
    took_part = {record["prefill_node"], record["decode_node"]}
    not_asked = [{"node": leg.split(":")[1], "why": "connection refused"} for leg in record["_detail"]["failed_legs"]]
    return {
        "trace_id": record["trace_id"],
        "request": fake_requests.summary(record) | detail,
        "spans": of(record),
        "clocks": [clock for clock in fake_requests.clocks() if clock["node"] in took_part],
        "not_asked": not_asked,
        "orphan_count": 0,
    }
