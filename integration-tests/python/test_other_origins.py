"""Pages of other origins in a real browser: they cannot drain, complete or read, and could if an operator had let them.

Two kinds of page attack a `baton up` on the same machine: one that another port serves, and one whose host name was
bound anew to this machine (DNS rebinding), so that for the browser it is of the cluster's own origin. The control gives
the same pages to a cluster whose operator allows their origins: what they do there they would do without the defence.
"""

import http.server
import json
import subprocess
import threading
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api", reason="pip install playwright (no browser download needed)")
from playwright.sync_api import sync_playwright  # noqa: E402

from traces.processes import NotYet, Running, ended, executable, wait_until, Cluster  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
# Never resolved: Chromium is told where it leads.
REBOUND = "rebound.test"
LIMIT_MS = 20_000
PAGE = "<!doctype html><title>A page from elsewhere</title><iframe name=sink></iframe>"

# What a page can try: with the headers that need nobody's permission, with those that do, by a form, and by reading.
ATTACK = """
async ({ target, node }) => {
  const prompt = JSON.stringify({ model: "stand-in", prompt: "from elsewhere", max_tokens: 2 });
  const json = { "content-type": "application/json" };
  const tries = {
    "complete, plain": ["/v1/completions", { method: "POST", mode: "no-cors", body: prompt }],
    "complete, JSON": ["/v1/completions", { method: "POST", headers: json, body: prompt }],
    "read cluster": ["/admin/cluster", {}],
    "read models": ["/v1/models", {}],
    "drain, plain": [`/admin/nodes/${node}/drain?force=true`, { method: "POST", mode: "no-cors" }],
    "drain, JSON": [`/admin/nodes/${node}/drain?force=true`, { method: "POST", headers: json, body: "{}" }],
  };
  const seen = {};
  for (const [name, [path, options]] of Object.entries(tries)) {
    try {
      const answer = await fetch(target + path, options);
      seen[name] = answer.type === "opaque" ? "sent, unread" : `${answer.status} ${await answer.text()}`;
    } catch (error) {
      seen[name] = `not sent or not read: ${error}`;
    }
  }
  const form = document.createElement("form");
  Object.assign(form, { method: "post", target: "sink", action: `${target}/admin/nodes/${node}/drain?force=true` });
  document.body.append(form);
  const sent = new Promise((resolve) => document.querySelector("iframe").addEventListener("load", resolve));
  form.submit();
  await sent;
  return seen;
}
"""
READ = "async (path) => { try { const a = await fetch(path); return `${a.status} ${await a.text()}` } catch (e) { return `${e}` } }"


class Elsewhere(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = PAGE.encode()
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def elsewhere():
    """The origin of a page that another port of this machine serves."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


@pytest.fixture(scope="module")
def page():
    found = subprocess.run([ROOT / "scripts" / "get-chromium"], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    # Chromium's sandbox refuses to run as root, and the pages are ours. Its own checks of the local network are off, since
    # not every browser has them.
    arguments = ["--no-sandbox", f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1"]
    arguments.append("--disable-features=LocalNetworkAccessChecks,LocalNetworkAccessChecksWebRTC")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found.stdout.strip(), args=arguments)
        opened = chromium.new_page()
        opened.set_default_timeout(LIMIT_MS)
        # What the attacker's server gave for this name before the name was bound anew.
        opened.route(f"http://{REBOUND}:*/page", lambda route: route.fulfill(content_type="text/html", body=PAGE))
        yield opened
        chromium.close()


def start(folder, name, env):
    words = [executable(), "up", "--topology", "2p1d", "--engine", "stand-in", "--served-model-name", "stand-in"]
    words += ["--listen", "127.0.0.1:0", "--json", "--quiet"]
    running = Running(folder, name, words, env)
    ready = running.line(lambda line: "url" in line)
    cluster = Cluster(ready["url"], [running])
    cluster.nodes = {row["name"]: row["address"] for row in ready["processes"]}
    return cluster


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """As it comes."""
    with ended(start(tmp_path_factory.mktemp("guarded"), "guarded", {})) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def allowing(tmp_path_factory, elsewhere):
    """The control: its operator lets these pages in."""
    env = {"BATON_ALLOWED_HOSTS": REBOUND, "BATON_CORS_ORIGIN": elsewhere}
    with ended(start(tmp_path_factory.mktemp("allowing"), "allowing", env)) as cluster:
        yield cluster


def port(url):
    return url.rsplit(":", 1)[1]


def attack(page, origin, target, node):
    page.goto(f"{origin}/page")
    return page.evaluate(ATTACK, {"target": target, "node": node})


def states(cluster):
    return {node["name"]: node["state"] for node in cluster.get("/admin/cluster")["nodes"]}


def answered(cluster):
    return [record["id"] for record in cluster.get("/admin/requests")["records"] if record["outcome"] == "ok"]


def assert_nothing_happened(cluster, seen):
    assert not {name: what for name, what in seen.items() if what[:2] in ("20", "50")}, seen
    assert set(states(cluster).values()) == {"ready"}, (seen, states(cluster))
    assert not answered(cluster), seen


def test_a_page_of_another_port_cannot_drain_complete_or_read(page, guarded, elsewhere):
    seen = attack(page, elsewhere, guarded.url, "prefill-0")
    print(json.dumps(seen, indent=1))
    assert_nothing_happened(guarded, seen)


def test_a_page_whose_name_was_bound_anew_cannot_drain_complete_or_read(page, guarded):
    own = f"http://{REBOUND}:{port(guarded.url)}"
    seen = attack(page, own, own, "prefill-1")
    print(json.dumps(seen, indent=1))
    assert_nothing_happened(guarded, seen)


def test_a_page_whose_name_was_bound_anew_cannot_read_a_nodes_pages(page, guarded):
    address = guarded.nodes["decode-0"]
    page.goto(f"http://{REBOUND}:{port(address)}/page")
    for path in ("/admin/blocks", f"/admin/spans/{'1' * 32}"):
        with urllib.request.urlopen(f"http://{address}{path}", timeout=20) as answer:
            assert answer.status == 200, "its address is no strange name"
        seen = page.evaluate(READ, path)
        assert seen.startswith("403"), (path, seen)
    assert page.evaluate(READ, "/health").startswith("200"), "probes may call it anything"


def test_the_control_the_same_pages_can_all_of_it_where_they_are_allowed(page, allowing, elsewhere):
    own = f"http://{REBOUND}:{port(allowing.url)}"
    for origin, target, node in ((elsewhere, allowing.url, "prefill-0"), (own, own, "prefill-1")):
        before = len(answered(allowing))
        seen = attack(page, origin, target, node)
        assert seen["complete, JSON"].startswith("200"), seen
        assert seen["read cluster"].startswith("200"), seen
        assert len(answered(allowing)) > before, seen

        def is_gone(node=node):
            if states(allowing)[node] not in ("draining", "left"):
                raise NotYet(states(allowing))

        wait_until(f"the drain of {node}", 20, is_gone)
    address = allowing.nodes["decode-0"]
    page.goto(f"http://{REBOUND}:{port(address)}/page")
    assert page.evaluate(READ, "/admin/blocks").startswith("200")
