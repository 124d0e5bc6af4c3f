"""Requests as a coordinator would remember them (docs/reference/records.md): made up from a seed, with figures that add up."""

import random
import time

MODEL = "smollm2-135m"
PREFILL_NODES = ["prefill-0", "prefill-1"]
DECODE_NODES = ["decode-0", "decode-1"]
KV_BYTES_PER_TOKEN = 23040
CLOCKS = {
    "prefill-0": (0.021, 0.05),
    "prefill-1": (-0.34, 0.08),
    "decode-0": (0.112, 0.04),
    "decode-1": (1.9, 0.31),
}
LIMITS = {"chat": (300, 50), "async-batch": (3000, 200)}
COORDINATOR_STAGES = ["parse", "tokenize", "queue", "route", "reserve", "dispatch", "first_token_return", "egress"]


def hex_of(draw, digits):
    return f"{draw.getrandbits(4 * digits):0{digits}x}"


def make(seq, received_unix_ms, **fixed):
    """One ended request; `fixed` overrides what was drawn before anything is derived from it."""
    draw = random.Random(seq * 7919 + 13)
    lane = "batch" if draw.random() < 0.2 else "interactive"
    prompt = int(draw.lognormvariate(5.0, 0.55)) + 8
    output = int(draw.lognormvariate(4.0, 0.7)) + 2
    cached = (prompt // 3 // 16) * 16 if draw.random() < 0.25 else 0
    queue = draw.choice([0.1, 0.1, 0.2, 0.4, draw.expovariate(1 / 30)])
    plan = {"lane": lane, "prompt_tokens": prompt, "output_tokens": output, "cached_tokens": cached, "queue": queue}
    plan |= {"step": draw.gauss(5.8, 0.4), "stalls": [], "outcome": "ok", "attempts": 1, "failed_legs": [], "prompts": 0, "id": None}
    plan |= {
        "prefill_node": draw.choice(PREFILL_NODES),
        "decode_node": draw.choice(DECODE_NODES),
        "early": 0.0,
        "error": None,
    }
    if draw.random() < 0.012:
        gap = draw.uniform(40, 900)
        plan["stalls"] = [
            (
                draw.randrange(2, output + 2),
                gap,
                draw.choice(["prefill_chunk", "step_time", "transfer_tail", "preemption", "egress_back_pressure"]),
            )
        ]
    if draw.random() < 0.008:
        plan["outcome"] = draw.choice(["cancelled", "queue_full", "kv_transfer_failed", "timeout"])
    plan |= fixed
    # The one pair of the mock's cluster that cannot be used.
    if (plan["prefill_node"], plan["decode_node"]) == ("prefill-1", "decode-1"):
        plan["decode_node"] = "decode-0"
    return derive(seq, received_unix_ms, plan, draw)


def ttft_stages(plan, draw):
    def small(top):
        return round(draw.uniform(0.02, top), 3)

    fresh = plan["prompt_tokens"] - plan["cached_tokens"]
    stages = [
        ("parse", small(0.2)),
        ("tokenize", small(0.9)),
        ("queue", round(plan["queue"], 3)),
        ("route", small(0.06)),
        ("reserve", small(0.5)),
    ]
    stages += [
        ("dispatch", small(0.4)),
        ("prefill_queue", round(draw.expovariate(1 / 3), 3)),
        ("prefill_forward", round(6 + fresh * 0.53, 3)),
    ]
    return [*stages, ("first_token_return", small(0.5)), ("egress", small(0.3))]


def stage_rows(stages, phase, plan):
    on_decode = {"commit", "decode_queue", "decode"}

    def process(stage):
        if stage in COORDINATOR_STAGES:
            return "coordinator"
        return plan["decode_node"] if stage in on_decode else plan["prefill_node"]

    return [{"stage": stage, "phase": phase, "ms": ms, "process": process(stage)} for stage, ms in stages]


def derive(seq, received_unix_ms, plan, draw):
    stages = ttft_stages(plan, draw)
    refused = plan["outcome"] in ("queue_full",)
    unattributed = round(draw.uniform(0.01, 0.4), 3)
    ttft = None if refused else round(sum(ms for _, ms in stages) + unattributed, 3)
    tokens = 0 if refused else plan["output_tokens"]
    stalls, extra = [], 0.0
    for token, gap, cause in plan["stalls"]:
        at = (ttft or 0) + token * plan["step"] + extra
        words = {
            "prefill_chunk": f"a chunk of 512 prompt tokens ran in the same step and took {gap:.0f} ms",
            "preemption": "preempted for 3 blocks, computed again",
            "transfer_tail": "the last KV frames had not arrived",
            "step_time": "the step itself was slow",
            "egress_back_pressure": "the reader did not take the tokens",
        }[cause]
        stalls.append(
            {
                "choice": 0,
                "token": token,
                "at_ms": round(at, 1),
                "gap_ms": round(gap, 1),
                "cause": cause,
                "words": words,
            }
        )
        extra += gap
    decode = round(max(0, tokens - 1) * plan["step"] + extra, 3)
    transfer = round(1.2 + plan["prompt_tokens"] * 0.006, 3)
    e2e = round(0.8 + plan["queue"] if refused else ttft + decode + 3.1, 3)
    limits = LIMITS["chat" if plan["lane"] == "interactive" else "async-batch"]
    itl_max = round(max([plan["step"] * 1.4, *(gap for _, gap, _ in plan["stalls"])]), 3)
    breached = [
        name for name, value, limit in [("ttft", ttft or 0, limits[0]), ("itl", itl_max, limits[1])] if value > limit
    ]
    slowest = max(stages, key=lambda stage: stage[1])
    rest = [("transfer_tail", 0.9), ("commit", 0.4), ("decode_queue", 0.6), ("decode", decode), ("egress", 0.7)]
    rows = stage_rows(stages, "ttft", plan) + (stage_rows(rest, "rest", plan) if not refused else [])
    errors = {
        "queue_full": (429, "The waiting queue is full. Try again after the time in Retry-After, or add nodes."),
        "timeout": (504, "The deadline passed before the answer was complete."),
        "kv_transfer_failed": (502, "The KV transfer from prefill-1 broke twice: connection reset"),
    }
    status, error = errors.get(plan["outcome"], (499 if plan["outcome"] == "cancelled" else 200, None))
    return {
        "seq": seq,
        "id": plan["id"] or f"req-{hex_of(draw, 12)}",
        "trace_id": hex_of(draw, 32),
        "response_id": f"chatcmpl-{hex_of(draw, 24)}",
        "received_unix_ms": received_unix_ms,
        "endpoint": "chat",
        "model": MODEL,
        "lane": plan["lane"],
        "is_streaming": True,
        "state": "ended",
        "outcome": plan["outcome"],
        "status": status,
        "error": plan["error"] or error,
        "prompt_tokens": plan["prompt_tokens"],
        "output_tokens": tokens,
        "cached_tokens": plan["cached_tokens"],
        "prefill_node": None if refused else plan["prefill_node"],
        "decode_node": None if refused else plan["decode_node"],
        "route_reason": "least-loaded: 0 waiting, 2 running; prefix 0 tokens",
        "local_prefill": None,
        "attempts": plan["attempts"],
        "preemptions": sum(cause == "preemption" for _, _, cause in plan["stalls"]),
        "transport": None if refused else "shm-direct",
        "kv_bytes": 0 if refused else plan["prompt_tokens"] * KV_BYTES_PER_TOKEN,
        "kv_transfer_ms": None if refused else transfer,
        "queue_ms": round(plan["queue"], 3),
        "ttft_ms": ttft,
        "tpot_ms": round(decode / (tokens - 1), 3) if tokens > 1 else None,
        "itl_p50_ms": round(plan["step"], 3) if tokens > 1 else None,
        "itl_max_ms": itl_max if tokens > 1 else None,
        "e2e_ms": e2e,
        "unattributed_ms": None if refused else unattributed,
        "last_token_ms": None if refused else round(e2e - 0.1, 1),
        "last_token_to_end_ms": None if refused else 0.05,
        "stall_count": len(stalls),
        "slo": "chat" if plan["lane"] == "interactive" else "async-batch",
        "breached": breached,
        "slow_because": None
        if refused
        else f"{slowest[0]} took {slowest[1]:.0f} ms of {ttft:.0f} ms to the first token",
        "_detail": {
            "stages": rows,
            "stalls": stalls,
            "failed_legs": plan["failed_legs"],
            "prompts": [one_prompt(at, rows, plan) for at in range(plan["prompts"])],
            "clocks": clocks(),
        },
        "_early": plan["early"],
    }


def one_prompt(at, rows, plan):
    """Of a request with several; the second was recomputed on its decode node."""
    return {
        "choices": [at],
        "prompt_tokens": plan["prompt_tokens"],
        "output_tokens": plan["output_tokens"],
        "cached_tokens": 0,
        "prefill_node": None if at == 1 else plan["prefill_node"],
        "decode_node": plan["decode_node"],
        "route_reason": "least-loaded",
        "local_prefill": "transfer_failed" if at == 1 else None,
        "attempts": 2 if at == 1 else 1,
        "preemptions": 0,
        "transport": None if at == 1 else "shm-direct",
        "kv_bytes": 0 if at == 1 else plan["prompt_tokens"] * KV_BYTES_PER_TOKEN,
        "kv_transfer_ms": None if at == 1 else 4.0,
        "stages": [row for row in rows if row["stage"] not in ("parse", "tokenize", "egress")],
    }


def clocks():
    return [{"node": node, "offset_ms": offset, "error_ms": error} for node, (offset, error) in CLOCKS.items()]


def running(record):
    """The same request while its first tokens flow."""
    now = {
        "state": "streaming",
        "outcome": None,
        "status": None,
        "error": None,
        "output_tokens": 1,
        "e2e_ms": record["ttft_ms"],
        "tpot_ms": None,
        "itl_p50_ms": None,
        "itl_max_ms": None,
        "stall_count": 0,
        "breached": [],
        "slow_because": None,
    }
    return record | now


def summary(record):
    return {key: value for key, value in record.items() if not key.startswith("_")}


# What a hostile or careless client might send as its x-request-id, and an error text to match.
MARKUP = '<img src=x onerror="window.hacked=1">'


def notable(first_seq, now_ms):
    """Requests that every view must show well, newest last."""
    kinds = [
        {
            "id": "demo-slow-prefill",
            "prompt_tokens": 1900,
            "cached_tokens": 0,
            "output_tokens": 90,
            "lane": "interactive",
        },
        {
            "id": "demo-retried",
            "attempts": 2,
            "prompt_tokens": 640,
            "failed_legs": ["decode:decode-1:connection_lost"],
            "decode_node": "decode-0",
            "queue": 61.0,
        },
        {"id": "demo-early-span", "prompt_tokens": 420, "early": 2.4, "prefill_node": "prefill-1"},
        {"id": MARKUP, "outcome": "kv_transfer_failed", "error": f"The KV transfer broke: {MARKUP}"},
        {"id": "demo-several-prompts", "prompt_tokens": 300, "output_tokens": 16, "prompts": 3, "prefill_node": "prefill-0"},
        {
            "id": "demo-stalls",
            "prompt_tokens": 512,
            "cached_tokens": 0,
            "output_tokens": 64,
            "lane": "interactive",
            "stalls": [(17, 78.0, "prefill_chunk"), (41, 120.0, "preemption")],
        },
    ]
    defaults = {"stalls": [], "outcome": "ok", "decode_node": "decode-0"}
    return [
        make(first_seq + at, now_ms - (len(kinds) - at) * 900, **(defaults | kind)) for at, kind in enumerate(kinds)
    ]


def history(count):
    """`count` records, oldest first; the last few are the notable ones."""
    now_ms = time.time() * 1000
    extra = notable(count - 5, now_ms)
    return [make(seq, now_ms - (count - seq) * 700.0 - 4000) for seq in range(count - len(extra))] + extra
