"""rotel, an OpenTelemetry collector that is not ours: started on free ports, and what it says it received."""

import math
import re
import socket
from contextlib import contextmanager

from traces.processes import NotYet, Running, fetched, wait_until

# Ports are found free and then taken by rotel: somebody else may be quicker.
STARTS_MAX = 5
LISTENS_WITHIN_S = 20
KINDS = {1: "SPAN_KIND_INTERNAL", 2: "SPAN_KIND_SERVER", 3: "SPAN_KIND_CLIENT"}
STATES = {0: "STATUS_CODE_UNSET", 1: "STATUS_CODE_OK", 2: "STATUS_CODE_ERROR"}
# One line of its detailed debug log.
PAIR = re.compile(r"^ +-> ([^:]+?): (Str|Int|Double|Bool|Slice)\((.*)\)$")
FIELD = re.compile(r"^ +(Trace ID|Parent ID|ID|Name|Kind|Status code|Status message) +: ?(.*)$")
TIME = re.compile(r"^(Start|End) time: (\d+)$")
DETAIL = re.compile(r"^ +-> (Name|Timestamp|Trace ID|ID|TraceState|DroppedAttributesCount|Attributes:): ?(.*)$")
HEADING = re.compile(r"^(ResourceSpans|ScopeSpans|Span|SpanEvent|SpanLink) #\d+$|^(Resource attributes|Attributes|Events|Links):$")
# Its own log lines are coloured; the scope and its schema are the same for all.
IGNORED = re.compile(r"^\x1b\[|^(Resource|ScopeSpans) SchemaURL: |^InstrumentationScope |^$")
FIELDS = {"Trace ID": "trace", "ID": "id", "Parent ID": "parent", "Name": "name", "Kind": "kind", "Status code": "state", "Status message": "message"}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Rotel:
    def __init__(self, running, ports):
        self.running = running
        self.grpc, self.http = (f"http://127.0.0.1:{port}" for port in ports)

    def spans(self):
        """{span id: span} of all that it has received so far; the last one may be half written while it runs."""
        text = self.running.out.read_text()
        return received(text[: text.rfind("\n") + 1].splitlines())


@contextmanager
def rotel(folder):
    program = fetched("get-rotel", "rotel")
    env = {"LD_LIBRARY_PATH": program["library_path"]} if program["library_path"] else {}
    words = [program["rotel"], "start", "--exporter", "blackhole", "--debug-log", "traces", "--debug-log-verbosity", "detailed"]
    for _ in range(STARTS_MAX):
        ports = (free_port(), free_port())
        at = ["--otlp-grpc-endpoint", f"127.0.0.1:{ports[0]}", "--otlp-http-endpoint", f"127.0.0.1:{ports[1]}"]
        running = Running(folder, "rotel", [*words, *at], env)
        try:
            if listens(running, ports):
                yield Rotel(running, ports)
                return
        finally:
            running.end()
    raise AssertionError(f"rotel does not start: {running.out.read_text()[-1000:]}{running.err.read_text()[-2000:]}")


def listens(running, ports):
    """False when it ended instead, which it does on a port that is taken."""

    def look():
        if running.process.poll() is None:
            for port in ports:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return running.process.poll() is None

    return wait_until("rotel to listen", LISTENS_WITHIN_S, look)


def received(lines):
    """Reads its debug log. Strict: a line of an unknown form is an error, so that nothing goes uncompared."""
    spans, resource, span, into, attributes = {}, {}, None, None, None
    for line in lines:
        if heading := HEADING.match(line):
            name = heading.group(1) or heading.group(2)
            if name == "ResourceSpans":
                resource, span = {}, None
            elif name == "Resource attributes":
                attributes = resource
            elif name == "Span":
                span = into = {"resource": resource, "attributes": {}, "events": [], "links": []}
            elif name == "Attributes":
                attributes = span["attributes"]
            elif name == "SpanEvent":
                into = {"attributes": {}}
                attributes = into["attributes"]
                span["events"].append(into)
            elif name == "SpanLink":
                into = {}
                span["links"].append(into)
        elif field := FIELD.match(line):
            span[FIELDS[field.group(1)]] = field.group(2)
            if field.group(1) == "ID":
                assert field.group(2) not in spans, f"span {field.group(2)} was received twice"
                spans[field.group(2)] = span
        elif time := TIME.match(line):
            span[time.group(1).lower()] = int(time.group(2))
        elif pair := PAIR.match(line):
            attributes[pair.group(1)] = value(*pair.groups()[1:])
        elif detail := DETAIL.match(line):
            into[detail.group(1)] = detail.group(2)
        else:
            assert IGNORED.match(line), f"a line of rotel's that this test does not know: {line!r}"
    return spans


class Double(float):
    """Equal but for the last bit: the coordinator reads a node's spans as JSON, and serde_json may be off by so much."""

    def __eq__(self, other):
        return math.isclose(self, other, rel_tol=1e-15)

    def __ne__(self, other):
        return not self == other

    __hash__ = None


def value(kind, text):
    return kind, {"Str": str, "Slice": str, "Int": int, "Double": Double, "Bool": lambda word: word == "true"}[kind](text)


def shown(otlp):
    """The same of OTLP JSON, as `/admin/traces/{id}` has it."""
    spans = {}
    for of_resource in otlp["resourceSpans"]:
        resource = attributes_of(of_resource["resource"]["attributes"])
        for span in (span for scope in of_resource["scopeSpans"] for span in scope["spans"]):
            status = span["status"]
            spans[span["spanId"]] = {
                "resource": resource, "attributes": attributes_of(span["attributes"]),
                "trace": span["traceId"], "id": span["spanId"], "parent": span["parentSpanId"], "name": span["name"],
                "kind": KINDS[span["kind"]], "state": STATES[status["code"]], "message": status["message"],
                "start": int(span["startTimeUnixNano"]), "end": int(span["endTimeUnixNano"]),
                "events": [
                    {"Name": event["name"], "Timestamp": event["timeUnixNano"], "DroppedAttributesCount": "0", "Attributes:": "",
                     "attributes": attributes_of(event["attributes"])}
                    for event in span["events"]
                ],
                "links": [
                    {"Trace ID": link["traceId"], "ID": link["spanId"], "TraceState": link["traceState"], "DroppedAttributesCount": "0"}
                    for link in span["links"]
                ],
            }
    return spans


def attributes_of(pairs):
    texts = lambda raw: ", ".join(f"Str({one['stringValue']})" for one in raw["values"])  # noqa: E731
    kinds = {"stringValue": ("Str", str), "intValue": ("Int", int), "doubleValue": ("Double", Double), "boolValue": ("Bool", bool)}
    kinds["arrayValue"] = ("Slice", texts)
    out = {}
    for pair in pairs:
        ((name, raw),) = pair["value"].items()
        kind, made = kinds[name]
        out[pair["key"]] = (kind, made(raw))
    return out


def wait_for(rotel, ids, limit_s):
    """All spans that rotel has, once the wanted ones are among them."""

    def look():
        assert rotel.running.process.poll() is None, f"rotel ended: {rotel.running.err.read_text()[-2000:]}"
        spans = rotel.spans()
        if missing := set(ids) - set(spans):
            raise NotYet(f"{len(missing)} of {len(ids)} spans were not received")
        return spans

    return wait_until("rotel to receive every span", limit_s, look)
