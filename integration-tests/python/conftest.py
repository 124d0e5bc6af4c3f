"""A running cluster, as its users have it: an address and the official client. BATON_BASE_URL names it."""

import os
import re
import time
import urllib.request

import openai
import pytest

# States in which a block belongs to some request; `free` and `cached` do not.
HELD_STATES = ("active", "reserved", "in_transfer", "quarantined")
BLOCKS_LINE = re.compile(r"^baton_kv_blocks\{([^}]*)\} (\S+)$")


def pytest_configure(config):
    config.addinivalue_line("markers", "mock: needs the console's mock server, not a real cluster")
    for program in ("helm", "compose", "hadolint", "systemd", "prometheus", "kubernetes_schemas"):
        config.addinivalue_line("markers", f"{program}: needs this program; scripts/get-{program.replace('_', '-')} fetches it")


def pytest_collection_modifyitems(config, items):
    """With a real cluster the tests that need the mock are no part of the run: not skipped, which would look like passed."""
    if os.environ.get("BATON_CONSOLE_URL"):
        left_out = [item for item in items if item.get_closest_marker("mock")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


class Cluster:
    def __init__(self, url):
        self.url = url.rstrip("/").removesuffix("/v1")

    def client(self, **options):
        # No retries: a test must see the first answer.
        return openai.OpenAI(base_url=self.url + "/v1", api_key="unused", max_retries=0, timeout=120, **options)

    def async_client(self):
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="unused", max_retries=0, timeout=120)

    def metrics(self):
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as answer:
            return answer.read().decode()

    def held_blocks(self):
        """{(node, role, state): blocks} of the coordinator's view of every node, held states only."""
        held = {}
        for line in self.metrics().splitlines():
            match = BLOCKS_LINE.match(line)
            if match:
                labels = dict(re.findall(r'(\w+)="([^"]*)"', match.group(1)))
                if labels["state"] in HELD_STATES:
                    held[labels["node"], labels["role"], labels["state"]] = float(match.group(2))
        assert held, "the coordinator's /metrics has no baton_kv_blocks{node,role,state}"
        return held

    def wait_until_idle(self, limit_s):
        """Seconds until no node holds a block for any request; fails after limit_s."""
        began = time.monotonic()
        while True:
            busy = {key: blocks for key, blocks in self.held_blocks().items() if blocks}
            took = time.monotonic() - began
            if not busy:
                return took
            assert took < limit_s, f"still held after {took:.2f} s: {busy}"
            time.sleep(0.02)


@pytest.fixture(scope="session")
def cluster():
    url = os.environ.get("BATON_BASE_URL")
    if not url:
        pytest.fail("BATON_BASE_URL is not set: start `baton up` and give its URL, or run scripts/test")
    return Cluster(url)


@pytest.fixture(scope="session")
def client(cluster):
    return cluster.client()


@pytest.fixture(scope="session")
def model(client):
    return client.models.list().data[0].id
