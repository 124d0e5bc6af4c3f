"""A coordinator for the console's development and tests: serves the files at /ui/ and a fake of docs/reference/records.md.

    python3 mock_server.py --port 8099 [--records 10000] [--quiet]

`POST /mock/away`, `/mock/back` and `/mock/lagged` make the server misbehave as a test asks.
"""

import argparse
import json
import queue
import random
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

sys.path.insert(0, str(Path(__file__).parent))

import fake_cluster  # noqa: E402
import fake_rates  # noqa: E402
import fake_requests  # noqa: E402
import fake_traces  # noqa: E402

CONSOLE = Path(__file__).resolve().parents[3] / "coordinator" / "console"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "default-src 'self'"
ANSWER = (
    "Of course. <b>This is plain text</b>, whatever it looks like: a lighthouse stood on the rock, "
    "and every night its keeper counted the ships. "
)
# An answer to whoever asks for Markdown: all that the console lays out, and what it must leave alone.
MARKDOWN = """# A lighthouse

It has **a lamp**, *a keeper* and `light()`.
Its snake_case_name stays, and so does 2 * 3 * 4.

1. Climb:
   - the *first* stair
   - the second
2. Look.

```python
def light(seconds):  # a line that is too long for a narrow page, so that it scrolls inside its own box
    return "**not bold**" * seconds
```

Read [more](https://example.com/lighthouse?a=1&b=2), not [this](javascript:alert) or <img src=x onerror="window.hacked=1">.
"""


class World:
    def __init__(self, count, is_quiet):
        self.lock = threading.Lock()
        self.records = fake_requests.history(count)
        self.by_id = {}
        for record in self.records:
            self.index(record)
        self.cluster = fake_cluster.Cluster()
        self.readers = []
        self.is_away = False
        if not is_quiet:
            threading.Thread(target=self.live, daemon=True).start()

    def index(self, record):
        for key in ("id", "trace_id", "response_id"):
            self.by_id[record[key]] = record
        self.by_id[str(record["seq"])] = record

    def next_seq(self):
        return self.records[-1]["seq"] + 1

    def put(self, record):
        with self.lock:
            known = next((at for at in range(-1, -51, -1) if self.records[at]["seq"] == record["seq"]), None)
            if known is None:
                self.records.append(record)
            else:
                self.records[known] = record
            self.index(record)
            if record["outcome"] is not None:
                self.cluster.handed_over(record)
        self.tell("request", fake_requests.summary(record))

    def tell(self, name, data):
        for reader in list(self.readers):
            reader.put((name, data))

    def live(self):
        """A request begins every now and then, and ends half a second later."""
        draw = random.Random(1)
        pause = threading.Event()
        while True:
            record = fake_requests.make(self.next_seq(), time.time() * 1000)
            if record["ttft_ms"] is not None:
                self.put(fake_requests.running(record))
                pause.wait(0.4)
            self.put(record)
            pause.wait(draw.uniform(0.1, 0.9))

    def page(self):
        return self.cluster.page(sum(record["outcome"] is None for record in self.records[-50:]))

    def select(self, query):
        def get(name):
            return query.get(name, [""])[0]

        chosen = [
            record for record in reversed(self.records) if not get("before") or record["seq"] < int(get("before"))
        ]
        tests = {
            "outcome": lambda r, v: r["outcome"] == v,
            "lane": lambda r, v: r["lane"] == v,
            "model": lambda r, v: r["model"] == v,
            "node": lambda r, v: v in (r["prefill_node"], r["decode_node"]),
            "breached": lambda r, v: bool(r["breached"]),
            "stalled": lambda r, v: r["stall_count"] > 0,
            "running": lambda r, v: (r["outcome"] is None) == (v == "true"),
            "slower_than_ms": lambda r, v: r["e2e_ms"] > float(v),
        }
        for name, test in tests.items():
            if get(name):
                chosen = [record for record in chosen if test(record, get(name))]
        if get("slowest") == "true":
            chosen.sort(key=lambda record: -record["e2e_ms"])
        limit = int(get("limit") or 100)
        page = chosen[:limit]
        more = len(chosen) > limit and get("slowest") != "true"
        return {
            "records": [fake_requests.summary(record) for record in page],
            "next_before": page[-1]["seq"] if more else None,
            "kept": len(self.records),
            "forgotten": 0,
        }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    world: World

    def log_message(self, *_):
        pass

    def send(self, status, body, content_type="application/json", **headers):
        body = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        for name, value in {"content-type": content_type, "content-length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def error(self, status, message):
        self.send(status, {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}})

    def do_GET(self):
        split = urlsplit(self.path)
        path, query = split.path, parse_qs(split.query)
        if path.startswith("/ui") or path == "/":
            return self.console(path)
        if self.world.is_away:
            self.close_connection = True
            return None
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if parts == ["admin", "events"]:
            return self.events()
        if parts[:2] in (["admin", "requests"], ["admin", "traces"]) and len(parts) == 3:
            return self.one(parts[1], parts[2])
        pages = {
            "/admin/requests": lambda: self.world.select(query),
            "/admin/cluster": self.world.page,
            "/admin/reports": lambda: {
                "is_enabled": True,
                "reports": [{"name": "a <b>report</b>", "bytes": 21, "modified_unix_ms": 1_764_000_000_000}],
            },
            "/admin/slo": lambda: fake_cluster.slo(self.world.records),
            "/admin/rates": fake_rates.page,
            "/v1/models": lambda: {
                "object": "list",
                "data": [{"id": fake_requests.MODEL, "object": "model", "owned_by": "baton", "max_model_len": 2048}],
            },
        }
        if parts == ["admin", "reports", "a <b>report</b>"]:
            return self.send(
                200,
                b"<!doctype html><title>r</title><script>document.title = 'ran'</script><p>figures",
                "text/html; charset=utf-8",
                content_security_policy="sandbox; default-src 'none'; frame-ancestors 'self'",
            )
        if path == "/metrics":
            return self.send(
                200,
                fake_cluster.metrics(self.world.records),
                "application/openmetrics-text; version=1.0.0; charset=utf-8",
            )
        if path in pages:
            return self.send(200, pages[path]())
        return self.error(404, f"There is no page {path}.")

    def console(self, path):
        name = path.removeprefix("/ui").strip("/") or "index.html"
        file = (CONSOLE / name).resolve()
        if CONSOLE not in file.parents or not file.is_file():
            return self.error(404, f"There is no file {path}.")
        return self.send(
            200,
            file.read_bytes(),
            TYPES.get(file.suffix, "application/octet-stream"),
            content_security_policy=POLICY,
            cache_control="no-cache",
        )

    def one(self, kind, name):
        record = self.world.by_id.get(name)
        if record is None:
            return self.error(404, f"No request {name!r} is kept.")
        if kind == "requests":
            return self.send(200, fake_requests.summary(record) | record["_detail"])
        return self.send(200, fake_traces.waterfall(record))

    def begin_stream(self):
        self.send_response(200)
        for name, value in {
            "content-type": "text/event-stream",
            "cache-control": "no-cache",
            "connection": "close",
            "x-request-id": str(uuid.uuid4()),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True

    def events(self):
        self.begin_stream()
        inbox = queue.Queue()
        self.world.readers.append(inbox)
        next_page = time.monotonic()
        try:
            while not self.world.is_away:
                now = time.monotonic()
                if now >= next_page:
                    self.event("cluster", self.world.page())
                    next_page = now + 1
                try:
                    self.event(*inbox.get(timeout=max(0.01, min(0.2, next_page - now))))
                except queue.Empty:
                    pass
        except OSError:
            pass
        finally:
            self.world.readers.remove(inbox)

    def event(self, name, data):
        text = f"event: {name}\n" if name else ""
        self.wfile.write(f"{text}data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode())
        self.wfile.flush()

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.path.startswith("/mock/"):
            what = self.path.removeprefix("/mock/")
            if what in ("away", "back"):
                self.world.is_away = what == "away"
            elif what == "lagged":
                self.world.tell("lagged", {"missed": 321})
            return self.send(200, {})
        if self.world.is_away:
            self.close_connection = True
            return None
        if self.path == "/v1/chat/completions":
            return self.chat(json.loads(body))
        split = urlsplit(self.path)
        match [unquote(part) for part in split.path.strip("/").split("/")]:
            case ["admin", "nodes", name, "drain"]:
                return self.send(*self.world.cluster.order(name, None, "force=true" in split.query))
            case ["admin", "nodes", name, "role", role]:
                return self.send(*self.world.cluster.order(name, role, "force=true" in split.query))
        return self.error(404, f"There is no page {self.path}.")

    def chat(self, asked):
        if asked.get("temperature", 0) > 2:
            return self.error(400, "temperature must be between 0 and 2, both included.")
        said = MARKDOWN if "Markdown" in asked["messages"][-1]["content"] else ANSWER * 40
        words = said.split(" ")[: asked.get("max_tokens", 256)]
        fixed = {
            "stalls": [],
            "outcome": "ok",
            "prompt_tokens": 40,
            "cached_tokens": 0,
            "output_tokens": len(words),
            "lane": "interactive",
        }
        record = fake_requests.make(self.world.next_seq(), time.time() * 1000, **fixed)
        self.begin_stream()
        self.world.put(fake_requests.running(record))
        pause = threading.Event()
        head = {
            "id": record["response_id"],
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": asked["model"],
        }
        pause.wait(record["ttft_ms"] / 1000)
        for at, word in enumerate(words):
            is_last = at == len(words) - 1
            delta = {"content": word if is_last else word + " "} | ({"role": "assistant"} if at == 0 else {})
            if not self.chunk(
                head
                | {
                    "choices": [{"index": 0, "delta": delta, "finish_reason": "length" if is_last else None}],
                    "usage": None,
                }
            ):
                return self.world.put(record | {"outcome": "cancelled", "status": 499})
            pause.wait(record["itl_p50_ms"] / 1000)
        usage = {
            "prompt_tokens": 40,
            "completion_tokens": len(words),
            "total_tokens": 40 + len(words),
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        self.world.put(record)
        self.chunk(head | {"choices": [], "usage": usage, "metrics": self.metrics_of(record)})
        return self.event(None, "[DONE]")

    def chunk(self, data):
        try:
            self.event(None, data)
            return True
        except OSError:
            return False

    def metrics_of(self, record):
        stages = {(row["stage"], row["phase"]): row["ms"] for row in record["_detail"]["stages"]}
        prefill = stages["prefill_queue", "ttft"] + stages["prefill_forward", "ttft"]
        named = {
            name: record[name]
            for name in (
                "queue_ms",
                "kv_transfer_ms",
                "ttft_ms",
                "e2e_ms",
                "prompt_tokens",
                "output_tokens",
                "cached_tokens",
                "prefill_node",
                "decode_node",
                "local_prefill",
                "route_reason",
                "attempts",
                "preemptions",
                "transport",
                "kv_bytes",
                "unattributed_ms",
            )
        }
        return named | {
            "prefill_ms": prefill,
            "decode_ms": stages["decode", "rest"],
            "tokens_per_second": round(1000 / record["tpot_ms"], 3) if record["tpot_ms"] else None,
        }


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        # A browser that leaves in the middle of an answer is no news.
        if not isinstance(sys.exception() if hasattr(sys, "exception") else sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def serve(port=0, records=10_000, is_quiet=False):
    """Starts in the background; returns the server, whose port is `server_address[1]`."""
    handler = type("BoundHandler", (Handler,), {"world": World(records, is_quiet)})
    server = Server(("127.0.0.1", port), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--port", type=int, default=8099)
    options.add_argument("--records", type=int, default=10_000)
    options.add_argument("--quiet", action="store_true", help="no new requests by themselves")
    chosen = options.parse_args()
    server = serve(chosen.port, chosen.records, chosen.quiet)
    print(f"console: http://127.0.0.1:{server.server_address[1]}/ui/", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        pass
