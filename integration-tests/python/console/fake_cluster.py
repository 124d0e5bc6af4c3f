"""The cluster page, `/metrics` and `/admin/slo` of a made-up coordinator, out of its made-up requests."""

import math
import random
import time

from fake_requests import CLOCKS, DECODE_NODES, LIMITS, MODEL, PREFILL_NODES

TTFT_EDGES = [
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.15,
    0.2,
    0.25,
    0.3,
    0.4,
    0.5,
    0.6,
    0.75,
    0.8,
    1.0,
    1.5,
    2.5,
    3.0,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
]
ITL_EDGES = [0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5]
BLOCKS = {"prefill": 1456, "decode": 2912}
# How long an order keeps a node away. A real node takes as long as its requests.
DRAIN_S = 6.0
ROLES = ["prefill", "decode", "co-located"]


class Cluster:
    def __init__(self):
        self.began = time.monotonic()
        self.kv_bytes = {(p, d): 10_000_000_000 for p in PREFILL_NODES for d in DECODE_NODES}
        self.handoffs = {pair: 1800 for pair in self.kv_bytes}
        self.drains_until = {}

    def handed_over(self, record):
        pair = record["prefill_node"], record["decode_node"]
        if pair in self.kv_bytes:
            self.kv_bytes[pair] += record["kv_bytes"]
            self.handoffs[pair] += 1

    def is_draining(self, name):
        return name == "decode-1" or time.monotonic() < self.drains_until.get(name, 0)

    def order(self, name, next_role, is_forced):
        """Status and answer of `POST /admin/nodes/...`. The node is back in its old role after a while."""
        if name not in PREFILL_NODES + DECODE_NODES:
            return 404, {"error": {"message": f"No node is called `{name}`.", "code": "node_not_found"}}
        others = [other for other in DECODE_NODES if other != name and not self.is_draining(other)]
        if name in DECODE_NODES and not others and not is_forced:
            words = f"`{name}` is the only node that decodes. Without it no request is answered."
            return 409, {"error": {"message": words, "code": "last_decode_node"}}
        self.drains_until[name] = time.monotonic() + DRAIN_S
        return 202, {"node": name, "state": "draining"} | ({"next_role": next_role} if next_role else {})

    def node(self, name, role):
        wave = math.sin(time.monotonic() / 9 + len(name) + ord(name[-1]))
        total = BLOCKS[role]
        active, cached = int(total * (0.22 + 0.14 * wave)), int(total * 0.18)
        blocks = {
            "active": active,
            "cached": cached,
            "reserved": 24 if role == "decode" else 0,
            "in_transfer": 31 + int(9 * wave),
            "quarantined": 8 if name == "decode-1" else 0,
        }
        offset, error = CLOCKS[name]
        return {
            "name": name,
            "epoch": f"43c2974e5f33cd{ord(name[-1]):02x}",
            "role": role,
            "roles": ROLES if name != "prefill-0" else ["prefill"],
            "state": "draining" if self.is_draining(name) else "ready",
            "address": f"127.0.0.1:{43080 + ord(name[-1])}",
            "version": "0.1.0",
            "transports": ["shm", "grpc"],
            "lease_left_ms": 7000 + int(2900 * abs(wave)),
            "lease_age_ms": 12,
            "coordinators": 3,
            "running": 3 + int(3 * wave),
            "waiting": 1 if wave > 0.6 else 0,
            "permits_available": 4096 if role == "prefill" else 1800,
            "kv_blocks": {"free": total - sum(blocks.values())} | blocks,
            "block_tokens": 16,
            "clock": {"offset_ms": offset, "error_ms": error},
        }

    def page(self, unfinished):
        pairs = [
            {
                "prefill": p,
                "decode": d,
                "is_usable": (p, d) != ("prefill-1", "decode-1"),
                "unusable_reason": "handshake refused: block size 16 here, 32 there"
                if (p, d) == ("prefill-1", "decode-1")
                else None,
                "transport": None if (p, d) == ("prefill-1", "decode-1") else "shm-direct" if d == "decode-0" else "grpc",
                "kv_bytes_total": total,
                "handoffs_total": self.handoffs[p, d],
            }
            for (p, d), total in self.kv_bytes.items()
        ]
        nodes = [self.node(name, "prefill") for name in PREFILL_NODES] + [
            self.node(name, "decode") for name in DECODE_NODES
        ]
        return {
            "coordinator": {
                "name": "coordinator",
                "version": "0.1.0",
                "uptime_s": int(time.monotonic() - self.began) + 812,
                "listen": "127.0.0.1:8080",
                "model": MODEL,
                "readiness": "ready",
                "not_ready_because": None,
                "unsplit_because": None,
                "waiting": {"interactive": 0, "batch": 2},
                "unfinished": unfinished,
                "trace_viewer_url": "https://jaeger.example/trace/{trace_id}",
            },
            # The nodes are connected to one more coordinator than etcd names.
            "membership": {
                "kind": "etcd",
                "etcd": "etcd://10.0.0.1:2379/made-up",
                "registered": True,
                "is_stale": False,
                "nodes": PREFILL_NODES + DECODE_NODES,
                "coordinators": ["coordinator", "coordinator-1"],
                "skipped_records": 0,
                "trouble": None,
            },
            "nodes": nodes,
            "pairs": pairs,
        }


def histogram(name, edges, samples_by_lane):
    lines = [f"# HELP {name} made up", f"# TYPE {name} histogram"]
    for lane, samples in samples_by_lane.items():
        for edge in [*edges, math.inf]:
            label = "+Inf" if edge == math.inf else edge
            exemplar = ' # {trace_id="0af7651916cd43dd8448eb211c80319c"} 0.12' if edge == 0.3 else ""
            lines.append(
                f'{name}_bucket{{le="{label}",lane="{lane}"}} {sum(value <= edge for value in samples)}{exemplar}'
            )
        lines += [f'{name}_sum{{lane="{lane}"}} {sum(samples)}', f'{name}_count{{lane="{lane}"}} {len(samples)}']
    return lines


def metrics(records):
    """The newest records only: enough to look real, and quick."""
    ttft, itl = {}, {}
    for record in [r for r in records if r["outcome"] == "ok"][-400:]:
        lane = record["lane"]
        # The batch lane stays below 100 samples: its percentiles must be grey.
        if lane == "batch" and len(ttft.get(lane, [])) >= 60:
            continue
        draw = random.Random(record["seq"])
        ttft.setdefault(lane, []).append(record["ttft_ms"] / 1000)
        itl.setdefault(lane, []).extend(max(0.001, draw.gauss(record["itl_p50_ms"], 1.3)) / 1000 for _ in range(8))
        itl[lane].extend(stall["gap_ms"] / 1000 for stall in record["_detail"]["stalls"])
    return "\n".join(
        [
            *histogram("baton_ttft_seconds", TTFT_EDGES, ttft),
            *histogram("baton_itl_seconds", ITL_EDGES, itl),
            "# EOF",
            "",
        ]
    )


def slo(records):
    recent = [record for record in records if record["outcome"] is not None][-2000:]
    profiles = []
    for name, lane in [("chat", "interactive"), ("async-batch", "batch")]:
        own = [record for record in recent if record["lane"] == lane]
        bad = {kind: sum(kind in record["breached"] for record in own) for kind in ("ttft", "itl")}
        failed = sum(record["outcome"] not in ("ok", "cancelled") for record in own)
        good = sum(record["outcome"] == "ok" and not record["breached"] for record in own)
        share_bad = 1 - good / max(1, len(own))
        lanes = [
            {
                "lane": lane,
                "total": len(own),
                "good": good,
                "breaches": bad | {"incomplete": failed, "hard_timeout": 0, "5xx": failed},
                "burn_5m": 0.6,
                "burn_1h": round(share_bad / 0.005, 2),
                "budget_left": round(1 - share_bad / 0.005, 3) if name == "chat" else 0.62,
            }
        ]
        profiles.append({"name": name, "ttft_ms_max": LIMITS[name][0], "itl_ms_max": LIMITS[name][1], "lanes": lanes})
    budgets = {"queue": 50, "tokenize": 10, "prefill_forward": 280, "egress": 15}
    stages = []
    for stage, budget in budgets.items():
        times = sorted(
            row["ms"]
            for record in recent
            for row in record["_detail"]["stages"]
            if row["stage"] == stage and row["phase"] == "ttft"
        )
        stages.append(
            {"stage": stage, "budget_ms": budget, "p99_ms": times[int(len(times) * 0.99)], "count": len(times)}
        )
    return {
        "objective": 0.995,
        "profiles": profiles,
        "stages": [*stages, {"stage": "reserve", "budget_ms": None, "p99_ms": 0.5, "count": 41}],
    }
