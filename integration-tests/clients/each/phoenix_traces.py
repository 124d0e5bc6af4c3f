"""Arize Phoenix receives the traces of 20 requests; its spans must be those of the cluster's own pages."""

import json
import os
import time
import urllib.request

from rows import FOLDER, MODEL, PROGRAMS, QUESTIONS, URL, free_port, request, service, user, write

HTTP = free_port()
PHOENIX = f"http://127.0.0.1:{HTTP}"
# The exporters send every few seconds; Phoenix stores in batches.
RECEIVED_WITHIN_S = 60
COUNT = 20


def get(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


def ask(turn):
    """One chat; the row has its record's id."""
    with request("chat") as row:
        body = {"model": MODEL, "messages": user(QUESTIONS[turn % len(QUESTIONS)]), "max_tokens": 12}
        headers = {"content-type": "application/json", **row.headers}
        sent = urllib.request.Request(f"{URL}/v1/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(sent, timeout=120) as answer:
            usage = json.load(answer)["usage"]
        row.done(usage["prompt_tokens"], usage["completion_tokens"])
    return row.values["id"]


def received():
    """Phoenix's spans by trace id."""
    found, cursor = {}, ""
    while cursor is not None:
        page = get(f"{PHOENIX}/v1/projects/default/spans?limit=1000{cursor and '&cursor=' + cursor}")
        for span in page["data"]:
            found.setdefault(span["context"]["trace_id"], {})[span["context"]["span_id"]] = span
        cursor = page.get("next_cursor")
    return found


def spans_of(id):
    """(trace id, the ids of its spans) by the cluster's own page."""
    resources = get(f"{URL}/admin/traces/{id}")["resourceSpans"]
    spans = [span for of in resources for scope in of["scopeSpans"] for span in scope["spans"]]
    return spans[0]["traceId"], {span["spanId"] for span in spans}


def differs(id, theirs):
    """What Phoenix lacks or has otherwise, or None."""
    trace, ours = spans_of(id)
    spans = theirs.get(trace, {})
    if set(spans) != ours:
        missing, others = len(ours - set(spans)), len(set(spans) - ours)
        return f"Phoenix lacks {missing} of {len(ours)} spans of {trace} and has {others} others"
    record = get(f"{URL}/admin/requests/{id}")
    roots = [span["attributes"] for span in spans.values() if span.get("parent_id") is None]
    counts = [(of.get("llm.token_count.prompt"), of.get("llm.token_count.completion")) for of in roots]
    if counts != [(record["prompt_tokens"], record["output_tokens"])]:
        return f"Phoenix counts {counts}, the record {record['prompt_tokens']} and {record['output_tokens']}"
    return None


environment = {"PHOENIX_WORKING_DIR": str(FOLDER / "phoenix"), "PHOENIX_HOST": "127.0.0.1", "PHOENIX_PORT": str(HTTP)}
environment |= {"PHOENIX_GRPC_PORT": os.environ["CLIENT_PORT"], "PHOENIX_TELEMETRY_ENABLED": "false"}
with service([PROGRAMS / "phoenix", "serve"], f"{PHOENIX}/healthz", 180, **environment):
    ids = [ask(turn) for turn in range(COUNT)]
    ends = time.monotonic() + RECEIVED_WITHIN_S
    while True:
        there = received()
        wrong = [why for why in (differs(id, there) for id in ids) if why]
        if not wrong or time.monotonic() > ends:
            break
        time.sleep(1)
    for why in wrong:
        write(what="trace", id=None, is_check=True, error=why)
    print(f"{sum(map(len, there.values()))} spans of {len(there)} traces in Phoenix; {len(wrong)} traces differ")
