"""`/admin/rates` of a made-up coordinator: an hour of slots, in some of which nobody asked for anything."""

import math
import time

SLOT_S = 30
SLOTS = 120
# The last slot is open for this long.
OPEN_S = 12.0
IDLE = range(40, 46)
VALUES = ["requests_per_s", "output_tokens_per_s", "error_share", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms"]


def rates(at, seconds):
    if at in IDLE:
        return {"seconds": seconds, "requests": 0, "ttft_count": 0, "itl_count": 0} | dict.fromkeys(VALUES)
    wave = 1 + 0.4 * math.sin(at / 9)
    per_second = round(0.8 * wave, 4)
    requests = round(per_second * seconds)
    return {
        "seconds": seconds,
        "requests": requests,
        "requests_per_s": per_second,
        "output_tokens_per_s": round(62.5 * wave, 4),
        "error_share": 0.125 if at % 17 == 0 else 0.0,
        "ttft_count": requests,
        "ttft_p50_ms": round(140 * wave, 3),
        "ttft_p99_ms": round(300 * wave, 3),
        "itl_count": requests * 60,
        "itl_p50_ms": round(5.8 * wave, 3),
        "itl_p99_ms": round(19 * wave, 3),
    }


def page():
    now = time.time() * 1000
    begins = [now - OPEN_S * 1000 - (SLOTS - 1 - at) * SLOT_S * 1000 for at in range(SLOTS)]
    slots = [
        {"from_unix_ms": begin} | rates(at, OPEN_S if at == SLOTS - 1 else float(SLOT_S)) for at, begin in enumerate(begins)
    ]
    hour = rates(0, sum(slot["seconds"] for slot in slots)) | {"error_share": 0.0072}
    for count in ("requests", "ttft_count", "itl_count"):
        hour[count] = sum(slot[count] for slot in slots)
    return {"now_unix_ms": now, "slot_s": SLOT_S, "slots": slots, "hour": hour}
