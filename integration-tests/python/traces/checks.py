"""What is wrong with a waterfall (`/admin/traces/{id}?view=waterfall`): spans that are missing, or not where they belong."""

from collections import Counter

# Times are rounded to a microsecond, and a process reads its two clocks one after the other.
READING_MS = 0.2
# The streams between coordinator and node are closed one after the other, once the last token is out.
CLOSED_WITHIN_MS = 100


def incomplete(trace):
    """One root, every parent there, every node asked, every span of the way that the request went."""
    spans, request, found = trace["spans"], trace["request"], []
    roots = [span for span in spans if span["parent_span_id"] is None]
    if len(roots) != 1 or trace["orphan_count"]:
        found.append(f"{len(roots)} roots, {trace['orphan_count']} orphans")
    if trace["not_asked"]:
        found.append(f"not asked: {trace['not_asked']}")
    if len({span["span_id"] for span in spans}) != len(spans):
        found.append("two spans have one id")
    names = Counter((span["name"], span["kind"]) for span in spans)
    for key, count in expected(request).items():
        if names[key] != count:
            found.append(f"{names[key]} spans {key} instead of {count}")
    found.extend(unanswered(spans))
    sends = {span["span_id"] for span in spans if span["name"] == "kv.send"}
    for span in spans:
        if span["name"] == "kv.recv" and not (len(span["links"]) == 1 and set(span["links"]) <= sends):
            found.append(f"kv.recv links to {span['links']}")
    return found


def expected(request):
    """What is certain: of attempts that failed, only that each was admitted and routed."""
    is_plain = not request["failed_legs"]
    count = Counter({(name, "internal"): 1 for name in ("parse", "tokenize", "egress")})
    for prompt in request["prompts"] or [request]:
        count.update(of_one_prompt(prompt, is_plain))
    return count


def of_one_prompt(prompt, is_plain):
    has = lambda key: int(isinstance(prompt[key], str))  # noqa: E731
    prefill, decode, handoff = has("prefill_node"), has("decode_node"), has("transport")
    # Of a request that its client left.
    attempts = max(prompt["attempts"], 1)
    count = {"admission": attempts, "route": attempts}
    if is_plain:
        count |= {"prefill.queue": 1, "prefill.forward": 1, "decode.queue": decode, "decode.loop": decode}
    count = {(name, "internal"): number for name, number in count.items()}
    if is_plain:
        count |= {("kv.send", "client"): handoff}
        for kind in ("client", "server"):
            count |= {("prefill", kind): prefill, ("decode", kind): decode, ("decode.open", kind): decode}
    return count | {("kv.recv", "server"): handoff}


def unanswered(spans):
    """Every call of the coordinator has one answer in a node, its only child of that name."""
    for call in spans:
        if call["kind"] == "client" and call["name"] in ("prefill", "decode", "decode.open"):
            answers = [s for s in spans if s["parent_span_id"] == call["span_id"] and s["kind"] == "server"]
            if [answer["name"] for answer in answers] != [call["name"]]:
                yield f"the call {call['name']} has {len(answers)} answers"


def misplaced(trace):
    """Spans that stick out of their parents, or begin before what they follow, by more than the clocks' stated errors."""
    error = {clock["node"]: clock["error_ms"] for clock in trace["clocks"]}
    by_id = {span["span_id"]: span for span in trace["spans"]}

    def slack(one, other):
        between = 0 if one["process"] == other["process"] else error.get(one["process"], 0) + error.get(other["process"], 0)
        return READING_MS + between

    for span in trace["spans"]:
        if span["start_ms"] > span["end_ms"]:
            yield f"{told(span)} ends before it begins"
        parent = by_id.get(span["parent_span_id"])
        if parent is None:
            continue
        if span["start_ms"] < parent["start_ms"] - slack(span, parent):
            yield f"{told(span)} begins before its parent {told(parent)}"
        after = 0 if span["kind"] == "internal" else CLOSED_WITHIN_MS
        if span["end_ms"] > parent["end_ms"] + slack(span, parent) + after:
            yield f"{told(span)} ends after its parent {told(parent)}"
    for earlier, later in follows(trace):
        (one, at), (other, then) = earlier, later
        if one[at] > other[then] + slack(one, other):
            yield f"{told(other)}: its {then} is before the {at} of {told(one)}"


def follows(trace):
    """Pairs of marks of a request of one attempt, in the order of docs/reference/stages.md."""
    of = {(span["name"], span["kind"]): span for span in trace["spans"]}
    is_local = trace["request"]["prefill_node"] is None
    start = lambda name, kind="internal": (of.get((name, kind)), "start_ms")  # noqa: E731
    end = lambda name, kind="internal": (of.get((name, kind)), "end_ms")  # noqa: E731
    chain = [end("parse"), start("tokenize"), end("tokenize"), start("admission"), end("admission"), start("route"), end("route")]
    chain += [start("decode.open", "client"), start("decode.open", "server")]
    if not is_local:
        chain += [end("decode.open", "client"), start("prefill", "client"), start("prefill", "server")]
    chain += [start("prefill.queue"), end("prefill.queue"), start("prefill.forward"), end("prefill.forward"), start("egress")]
    kv = [start("prefill.forward"), start("kv.send", "client"), start("kv.recv", "server"), end("kv.recv", "server"), start("decode.queue")]
    decode = [end("decode.queue"), start("decode.loop"), end("decode.loop"), end("egress")]
    # With local prefill the first step that drew a token is the prompt's own.
    first = [] if is_local else [end("decode.queue"), start("decode.first_step"), end("decode.first_step"), end("decode.loop")]
    for line in (chain, kv, decode, first):
        there = [mark for mark in line if mark[0] is not None]
        yield from zip(there, there[1:])


def told(span):
    return f"{span['name']} of {span['process']} [{span['start_ms']}, {span['end_ms']}]"


def left_over(request):
    """TTFT less its stages, recomputed; what the record says must be the same."""
    assert request["ttft_ms"] is not None, f"{request['id']} has no TTFT"
    stages = sum(stage["ms"] for stage in request["stages"] if stage["phase"] == "ttft")
    left = request["ttft_ms"] - stages
    said = request["unattributed_ms"]
    # Each of a dozen stages is rounded to a microsecond.
    assert said is not None and abs(left - said) < 0.02, f"{request['id']}: the stages leave {left} ms, the record says {said}"
    return abs(left)
