"""What a client saw beside the records of the server (docs/reference/records.md)."""

import statistics
import time
import urllib.parse
from collections import Counter

from cluster import get

# A record ends up to two seconds after its answer; this is far more.
ENDS_WITHIN_S = 20
# The server reads its clock after it has written to the socket. On a busy machine another process may run between the two, for
# a few time slices of Linux (3 ms each) at most: so much may a record's time be above the client's.
PREEMPTED_MS = 10.0
# How much later than the server the median of a client may be, unless a row says that its load is more than the machine can do.
# A client in Python takes some milliseconds and a proxy in Python some tens, on the two cores that the model computes on.
MEDIAN_LATER_MS_MAX = 100.0
PAGE = 1000
COUNTS = ("prompt_tokens", "output_tokens")
TIMES = ("ttft_ms", "e2e_ms", "last_token_ms")


def compared(url, rows, newest_before):
    """Counts, errors of the client, differences of times, and faults: where client and records do not agree."""
    records = records_after(url, newest_before)
    ok = [record for record in records if record["outcome"] == "ok"]
    # A row may be a check, which is no request.
    refused = [row for row in rows if row.get("is_refused")]
    asked = [row for row in rows if not row.get("is_refused") and not row.get("is_check")]
    pairs, faults = paired(asked, records)
    # Requests that the client sends before its own measurement, as its script knows.
    expected = len(asked) + sum(row.get("prepares", 0) for row in rows)
    ids = {record["id"] for record in ok}
    faults += [f"{row['what']} {row['id']} was not refused" for row in refused if row["id"] in ids]
    if len(ok) != expected:
        faults.append(f"{len(asked)} requests, {expected} with the client's preparation, and {len(ok)} records that ended well")
    counts = [(row, record, key) for row, record in pairs for key in COUNTS if row.get(key) is not None]
    unequal = [(row, record, key) for row, record, key in counts if row[key] != record[key]]
    for row, record, key in unequal:
        faults.append(f"{row['what']} {row.get('id')}: {key} {row[key]}, its record {record['seq']} has {record[key]}")
    found = {
        "requests": len(asked),
        "refused": len(refused),
        "kinds": Counter(row["what"] for row in rows),
        "errors": [f"{row['what']} {row.get('id')}: {row['error']}" for row in rows if row.get("error")],
        "records": len(records),
        "records_ok": len(ok),
        "tokens_known": len(counts),
        "tokens_equal": len(counts) - len(unequal),
        "output_tokens": sum(record["output_tokens"] or 0 for record in ok),
    }
    calm = [pair for pair in pairs if not pair[0].get("is_crowded")]
    crowded = [pair for pair in pairs if pair[0].get("is_crowded")]
    for key in TIMES:
        found[key] = differences(calm, key, faults)
        found[f"crowded_{key}"] = differences(crowded, key, faults)
        if found[key] and found[key]["median_later_ms"] > MEDIAN_LATER_MS_MAX:
            faults.append(f"the median {key} of the client is {found[key]['median_later_ms']} ms above the records'")
    return found | {"faults": faults}


def records_after(url, newest_before):
    """All records that are newer, once none of them still runs."""
    ends = time.monotonic() + ENDS_WITHIN_S
    while True:
        found, before = [], None
        while True:
            query = {"limit": PAGE} | ({} if before is None else {"before": before})
            page = get(url, f"/admin/requests?{urllib.parse.urlencode(query)}")
            newer = [record for record in page["records"] if record["seq"] > newest_before]
            found += newer
            before = page["next_before"]
            if before is None or len(newer) < len(page["records"]):
                break
        if all(record["state"] == "ended" for record in found) or time.monotonic() > ends:
            return found
        time.sleep(0.1)


def paired(rows, records):
    """Each row with its record, by the id of the request or of the answer; faults where there is none."""
    of_id = {record[key]: record for record in records for key in ("id", "response_id") if record[key]}
    named = [(row, of_id.get(row["id"])) for row in rows if row.get("id")]
    pairs = [pair for pair in named if pair[1]]
    faults = [f"{row['what']} {row['id']} has no record" for row, record in named if record is None]
    ok = [record for record in records if record["outcome"] == "ok"]
    unnamed = [row for row in rows if not row.get("id")]
    # Where a client says when its requests began, on this machine's clock, earlier ones are its preparation.
    begins = min((row["start_unix_ms"] for row in unnamed if "start_unix_ms" in row), default=0)
    return pairs + ranked(unnamed, [record for record in ok if record["received_unix_ms"] >= begins]), faults


def ranked(rows, records):
    """For a client that shows no ids: its k-th smallest values beside the k-th smallest of the records. Where each time of the
    server is at most the client's, this holds for the sorted ones too."""
    made = [({"what": row["what"]}, {"seq": None}) for row in rows[: len(records)]]
    for key in COUNTS + TIMES:
        theirs = sorted(row[key] for row in rows if row.get(key) is not None)
        ours = sorted(record[key] for record in records if record[key] is not None)
        if len(theirs) == len(ours) == len(made):
            for (row, record), one, other in zip(made, theirs, ours):
                row[key], record[key] = one, other
    return made


def differences(pairs, key, faults):
    """Both medians, and how much later than the server the clients were. A time of the server above the client's is a fault."""
    found = [(row, record) for row, record in pairs if row.get(key) is not None and record.get(key) is not None]
    for row, record in found:
        if row[key] < record[key] - PREEMPTED_MS:
            faults.append(f"{row['what']} {row.get('id')}: {key} {row[key]:.3f}, its record has {record[key]:.3f}")
    if not found:
        return None
    later = [row[key] - record[key] for row, record in found]
    figures = {
        "client_median_ms": statistics.median(row[key] for row, _ in found),
        "record_median_ms": statistics.median(record[key] for _, record in found),
        "min_later_ms": min(later), "median_later_ms": statistics.median(later), "max_later_ms": max(later),
    }
    return {"n": len(found)} | {name: round(ms, 3) for name, ms in figures.items()}
