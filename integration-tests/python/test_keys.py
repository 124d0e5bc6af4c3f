"""API keys as users have them: made by `baton keys`, sent by OpenAI's client, by baton's own verbs and by a browser that signs in."""

import ipaddress
import os
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import openai
import pytest

pytest.importorskip("playwright.sync_api", reason="pip install playwright (no browser download needed)")
from playwright.sync_api import expect, sync_playwright  # noqa: E402

from traces.processes import Cluster, NotYet, Running, ended, executable, wait_until  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
LIMIT_MS = 20_000
# The coordinator looks at its file each second.
REVOKED_WITHIN_S = 10


def baton(words, key=None):
    """What a verb of baton did; with no key of this session's environment."""
    environment = {name: value for name, value in os.environ.items() if name not in ("BATON_API_KEY", "BATON_API_KEYS")}
    if key:
        environment["BATON_API_KEY"] = key
    return subprocess.run([executable(), *words], env=environment, capture_output=True, text=True, timeout=60, check=False)


class Guarded:
    def __init__(self, folder):
        self.folder, self.file = folder, folder / "keys.toml"
        self.keys = {
            "user": self.create("user", "--tenant", "house"),
            "ops": self.create("ops", "--scope", "admin,inference,metrics"),
            "mate": self.create("mate", "--tenant", "house"),
            "house": self.create("house"),
            "trial": self.create("trial", "--requests-per-minute", "1"),
        }
        words = [executable(), "up", "--topology", "1p1d", "--engine", "stand-in", "--served-model-name", "stand-in"]
        words += ["--listen", "127.0.0.1:0", "--json", "--api-keys", self.file]
        self.running = Running(folder, "up", words)
        self.ready = self.running.line(lambda line: "url" in line)
        self.cluster = Cluster(self.ready["url"], [self.running])
        self.url = self.cluster.url

    def create(self, name, *more):
        done = baton(["keys", "create", name, "--file", self.file, *more])
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def client(self, key, path="/v1"):
        return openai.OpenAI(base_url=self.url + path, api_key=key, max_retries=0, timeout=60)

    def complete(self, key):
        return self.client(key).completions.create(model="stand-in", prompt="Say something.", max_tokens=4)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    started = Guarded(tmp_path_factory.mktemp("guarded"))
    with ended(started.cluster):
        # What `baton up` asks at its start looks like no attack.
        header = {"Authorization": f"Bearer {started.keys['ops']}"}
        with urllib.request.urlopen(urllib.request.Request(started.url + "/metrics", headers=header), timeout=20) as metrics:
            assert 'baton_key_refusals_total{reason="missing_api_key"} 0\n' in metrics.read().decode()
        yield started


def test_openais_client_gets_the_errors_that_it_knows(guarded):
    assert guarded.complete(guarded.keys["user"]).usage.completion_tokens == 4
    with pytest.raises(openai.AuthenticationError) as unknown:
        guarded.complete("baton-unknown")
    assert unknown.value.code == "invalid_api_key"
    with pytest.raises(openai.PermissionDeniedError) as beyond:
        guarded.client(guarded.keys["user"], "/admin").get("/cluster", cast_to=object)
    assert beyond.value.code == "scope_missing"
    guarded.complete(guarded.keys["trial"])
    with pytest.raises(openai.RateLimitError) as over:
        guarded.complete(guarded.keys["trial"])
    assert 0 < int(over.value.response.headers["retry-after"]) <= 60


def test_batons_verbs_send_the_operators_key(guarded):
    at = ["--url", guarded.url]
    without = baton(["status", *at])
    assert without.returncode == 1 and "BATON_API_KEY" in without.stderr, without
    for words in (["status", *at], ["nodes", *at], ["trace", "--slowest", "1", *at], ["chat", *at, "Hello"]):
        done = baton(words, guarded.keys["ops"])
        assert done.returncode == 0, (words, done.stdout, done.stderr)
    listed = baton(["keys", "list", "--file", guarded.file])
    assert [line.split()[0] for line in listed.stdout.splitlines()[1:6]] == ["user", "ops", "mate", "house", "trial"], listed


def test_a_revoked_key_is_refused_while_the_coordinator_runs(guarded):
    key = guarded.create("guest")

    def works():
        try:
            guarded.complete(key)
        except openai.AuthenticationError as refused:
            raise NotYet(refused) from refused

    def is_refused():
        try:
            guarded.complete(key)
        except openai.AuthenticationError:
            return
        raise NotYet("it is taken")

    wait_until("the new key", REVOKED_WITHIN_S, works)
    done = baton(["keys", "revoke", "guest", "--file", guarded.file])
    assert done.returncode == 0, done.stderr
    wait_until("the end of the key", REVOKED_WITHIN_S, is_refused)


def test_a_tenant_finds_no_prompt_of_another(guarded):
    prompt = "The prompt of one tenant, long enough for some blocks. " * 20

    def cached(key, **more):
        answer = guarded.client(key).completions.create(model="stand-in", prompt=prompt, max_tokens=1, **more)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached(guarded.keys["user"]) == 0, "nobody has sent it yet"
    assert cached(guarded.keys["user"]) > 100, "its own"
    assert cached(guarded.keys["ops"]) == 0, "another tenant's"
    assert cached(guarded.keys["ops"]) > 100
    assert cached(guarded.keys["mate"]) > 100, "a second key of the first tenant"
    assert cached(guarded.keys["house"]) == 0, "a key that is only called as the tenant"
    salted = {"extra_body": {"cache_salt": "mine"}}
    assert cached(guarded.keys["user"], **salted) == 0, "the request has a salt of its own"
    assert cached(guarded.keys["user"], **salted) > 100


@pytest.mark.parametrize(("percent", "is_kept"), [(50, True), (100, False)])
def test_a_flood_of_one_tenant_leaves_the_prompts_of_another_in_the_cache(tmp_path, percent, is_kept):
    file = tmp_path / "keys.toml"
    keys = {}
    for name in ("quiet", "flood"):
        done = baton(["keys", "create", name, "--file", file])
        assert done.returncode == 0, done.stderr
        keys[name] = done.stdout.strip()
    words = [executable(), "up", "--topology", "1c", "--engine", "stand-in", "--served-model-name", "stand-in"]
    words += ["--listen", "127.0.0.1:0", "--json", "--api-keys", file]
    # Room for 1,024 tokens: a block of 16 has 2 KiB in the stand-in.
    words += ["--kv-cache-memory", "128KiB", "--tenant-cache-percent", str(percent)]
    running = Running(tmp_path, "up", words)
    cluster = Cluster(running.line(lambda line: "url" in line)["url"], [running])
    with ended(cluster):

        def cached(key, prompt):
            client = openai.OpenAI(base_url=cluster.url + "/v1", api_key=keys[key], max_retries=0, timeout=60)
            usage = client.completions.create(model="stand-in", prompt=prompt, max_tokens=1).usage
            return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens

        prompt = "The prompt of a quiet tenant, long enough for some blocks. " * 15
        cached("quiet", prompt)
        flooded = sum(cached("flood", f"Prompt {number} of a flood. " * 20)[0] for number in range(20))
        assert flooded > 2_500, "more than twice what the node has room for"
        assert (cached("quiet", prompt)[1] > 100) == is_kept


def test_the_console_asks_for_a_key_and_comes_back_to_its_view(guarded):
    found = subprocess.run([ROOT / "scripts" / "get-chromium"], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    with sync_playwright() as playwright:
        # Chromium's sandbox refuses to run as root, and the pages are ours.
        chromium = playwright.chromium.launch(executable_path=found.stdout.strip(), args=["--no-sandbox"])
        page = chromium.new_page()
        page.set_default_timeout(LIMIT_MS)
        expect.set_options(timeout=LIMIT_MS)
        page.goto(f"{guarded.url}/ui/#/requests")
        page.get_by_label("API key").fill("baton-wrong")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert")).to_contain_text("does not know the API key")
        page.get_by_label("API key").fill(guarded.keys["ops"])
        page.keyboard.press("Enter")
        expect(page).to_have_url(f"{guarded.url}/ui/#/requests")
        expect(page.locator(".grid-body .grid-row").first).to_be_visible()
        expect(page.locator("#live")).to_contain_text("live")
        page.goto(f"{guarded.url}/ui/#/playground")
        # Whoever leaves a browser must not believe that a session has ended which has not.
        page.route("**/session", lambda route: route.abort())
        page.get_by_role("button", name="Sign out").click()
        expect(page.locator("#toast")).to_be_visible()
        expect(page.get_by_label("API key")).to_have_count(0)
        page.unroute("**/session")
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("API key")).to_be_visible()
        chromium.close()


def test_operators_can_have_an_address_of_their_own(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [executable(), "up", "--topology", "1c", "--engine", "stand-in", "--served-model-name", "stand-in"]
    running = Running(tmp_path, "up", [*words, "--listen", "127.0.0.1:0", "--json"], {"BATON_ADMIN_LISTEN": f"127.0.0.1:{port}"})
    cluster = Cluster(running.line(lambda line: "url" in line)["url"], [running])
    with ended(cluster):
        for path, is_for_clients in (("/v1/models", True), ("/ready", True), ("/version", True), ("/admin/cluster", False),
                                     ("/metrics", False), ("/ui/", False), ("/session", False), ("/server_info", False)):
            assert status(f"http://127.0.0.1:{port}{path}") == 200, path
            assert status(cluster.url + path) == (200 if is_for_clients else 404), path
        # Orders need the right address, too.
        reset = urllib.request.Request(cluster.url + "/admin/reset_prefix_cache", b"", method="POST")
        assert status(reset) == 404


def status(what):
    try:
        with urllib.request.urlopen(what, timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as refused:
        return refused.code


def listening(pid):
    """Addresses at which a process listens: its sockets in state LISTEN (0A), as the kernel lists them."""
    links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
    own = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    found = []
    for table, size in (("tcp", 4), ("tcp6", 16)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in own:
                host, port = columns[1].split(":")
                # Words of the machine's order of bytes.
                words = [bytes.fromhex(host)[at : at + 4][::-1] for at in range(0, size, 4)]
                found.append((str(ipaddress.ip_address(b"".join(words))), int(port, 16)))
    return sorted(found)


def test_nothing_listens_but_what_was_announced(guarded):
    rows = guarded.ready["processes"]
    assert {row["role"] for row in rows} == {"coordinator", "prefill", "decode"}, rows
    for row in rows:
        host, port = row["address"].rsplit(":", 1)
        found = listening(row["pid"])
        assert (host, int(port)) in found, (row, found)
        # A coordinator has the address that nodes join, too. It is told to them alone.
        assert len(found) == (2 if row["role"] == "coordinator" else 1), (row, found)
        assert {address for address, _ in found} == {"127.0.0.1"}, (row, found)


def test_no_key_is_in_a_log_or_in_the_printed_configuration(guarded):
    written = "".join(path.read_text(errors="replace") for path in guarded.folder.rglob("*") if path.is_file())
    assert "listens on" in written, "the logs of the cluster are not in this folder"
    for name, key in guarded.keys.items():
        assert key not in written and key.removeprefix("baton-") not in written, f"the key of {name}"
    printed = baton(["serve-coordinator", "--api-keys", guarded.file, "--model", "m.gguf", "--print-config"])
    assert printed.returncode == 0 and str(guarded.file) in printed.stdout, printed
