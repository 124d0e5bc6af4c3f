"""The shipped processes with the shipped settings, one on each host."""

import base64
import http.client
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from hosts.asking import MODEL
from hosts.network import Network
from traces.processes import REPOSITORY, NotYet, Running, executable, fetched, pulled, wait_until

COORDINATORS = ("coordinator-0", "coordinator-1")
PREFILL, DECODE = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
NODES = (*PREFILL, *DECODE)
# Two for those who ask: the one that judges, and where it learns what is right.
HOSTS = ("etcd", *COORDINATORS, *NODES, "client", "alone")
ETCD_PORT = 2379
PORTS = {"coordinator": 8000, "prefill": 7410, "decode": 7420, "etcd": ETCD_PORT}
CONTROL_PORT = 7400
# deploy/local/coordinator.toml: `lease_ms`.
LEASE_S = 5
ETCD_LEASE_S = 2
READY_WITHIN_S = 60
HELD_STATES = ("active", "reserved", "in_transfer", "quarantined")
ANSWERS_WITHIN_S = 5


class Cluster:
    def __init__(self, network, folder):
        self.network, self.folder, self.running, self.host_of = network, folder, {}, {}
        self.model = os.environ.get("BATON_MODEL") or pulled()

    def start(self, name, *words, on=None):
        host = self.host_of[name] = self.network[on or name]
        self.running[name] = Running(self.folder, name, [*host.prefix(), *words])

    def start_baton(self, name, *flags, on=None):
        role = name.split("-")[0]
        settings = ["--config", REPOSITORY / f"deploy/local/{role}.toml", "--model", self.model, "--name", name]
        # Cables are cut here. Who may call whom is for others to look at (test_hosts_page.py, tests/cluster/identity.rs).
        settings += ["--served-model-name", MODEL, "--insecure"]
        listen = f"{self.network[on or name].address}:{PORTS[role]}"
        self.start(name, executable(), f"serve-{role}", *settings, "--listen", listen, *flags, on=on)

    def start_etcd(self):
        program, url = fetched("get-etcd", "etcd")["etcd"], f"http://{self.network['etcd'].address}:{ETCD_PORT}"
        own = ["--data-dir", self.folder / "etcd-data", "--logger", "zap"]
        self.start("etcd", program, *own, "--listen-client-urls", url, "--advertise-client-urls", url)

    def start_coordinator(self, name, *flags, on=None):
        self.start_baton(name, "--control-listen", f"{self.network[on or name].address}:{CONTROL_PORT}", *flags, on=on)

    def start_node(self, name, *flags, on=None):
        # All hosts share the cores of one machine.
        self.start_baton(name, "--threads", 1, *flags, on=on)

    def end(self):
        running, self.running = list(self.running.values()), {}
        dead = [process.name for process in running if process.process.poll() is not None]
        with ThreadPoolExecutor(len(running)) as pool:
            obeyed = pool.map(Running.end, running)
        killed = [process.name for process, is_obedient in zip(running, obeyed, strict=True) if not is_obedient]
        assert not dead and not killed, f"{dead} had ended before, {killed} did not end after SIGTERM"

    def address(self, name):
        """Of a process's HTTP."""
        return self.host_of[name].address, PORTS[name.split("-")[0]]

    def ask(self, name, path, limit_s=ANSWERS_WITHIN_S, body=None):
        """(status, body)"""
        connection = http.client.HTTPConnection(*self.address(name), timeout=limit_s)
        try:
            connection.request("POST" if body else "GET", path, body)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def get(self, name, path):
        status, body = self.ask(name, path)
        if status != 200:
            raise NotYet(f"{name} answers {path} with {status}: {body}")
        return json.loads(body)

    def metric(self, name, metric, **labels):
        """The sum over the lines of a metric that have these labels."""
        total = 0.0
        for line in self.ask(name, "/metrics")[1].splitlines():
            key, _, value = line.rpartition(" ")
            if key.partition("{")[0] == metric and all(f'{label}="{text}"' in key for label, text in labels.items()):
                total += float(value)
        return total

    def held(self):
        """Nodes with blocks that belong to some request, and whose."""
        held = {}
        for node in NODES:
            report = self.get(node, "/admin/blocks")
            if any(report["blocks"][state] for state in HELD_STATES) or report["holders"]:
                held[node] = report
        return held

    def wait_for_rest(self, limit_s):
        def look():
            if held := self.held():
                raise NotYet(json.dumps(held))

        wait_until("every block to be free or cached", limit_s, look)

    def wait_for_all(self):
        """Every coordinator sees every node and every pair."""

        def look():
            for name in COORDINATORS:
                ready = self.get(name, "/ready")
                counts = [ready[key] for key in ("prefill_nodes", "decode_nodes", "usable_pairs")]
                if counts != [len(PREFILL), len(DECODE), len(PREFILL) * len(DECODE)]:
                    raise NotYet(f"{name}: {ready}")

        wait_until("a whole cluster", READY_WITHIN_S, look)

    def registered(self):
        """What stands in etcd, by the last part of its key: at which revision it came there."""
        in_base64 = lambda text: base64.b64encode(text.encode()).decode()  # noqa: E731
        span = {"key": in_base64("/baton/"), "range_end": in_base64("/baton0"), "keys_only": True}
        found = json.loads(self.ask("etcd", "/v3/kv/range", 1, json.dumps(span))[1]).get("kvs", [])
        return {base64.b64decode(entry["key"]).decode().rsplit("/", 1)[1]: int(entry["create_revision"]) for entry in found}

    def logs(self):
        """The last lines of each but for those about requests, for a test that failed."""
        told = []
        for one in self.running.values():
            lines = [line for line in one.err.read_text().splitlines() if '"target":"access"' not in line]
            told += [f"--- {one.name}", *lines[-15:]]
        return "\n".join(told)


@contextmanager
def ended(cluster):
    try:
        yield cluster
        cluster.end()
    finally:
        for process in cluster.running.values():
            process.process.kill()


@contextmanager
def one_node(network, folder):
    """A coordinator and a co-located node on one host; the address of its HTTP."""
    with ended(Cluster(network, folder)) as cluster:
        control = f"{network['alone'].address}:{CONTROL_PORT}"
        cluster.start_coordinator("coordinator-alone", on="alone")
        cluster.start_node("decode-alone", "--co-located", "--coordinators", control, on="alone")
        wait_until("the co-located node", READY_WITHIN_S, lambda: cluster.get("coordinator-alone", "/ready"))
        yield cluster.address("coordinator-alone")


@contextmanager
def seven_hosts(folder):
    network = Network(HOSTS)
    with network["client"].entered(), ended(Cluster(network, folder)) as cluster:
        cluster.start_etcd()
        membership = f"etcd://{network['etcd'].address}:2379/hosts?lease_s={ETCD_LEASE_S}"
        for name in COORDINATORS:
            control = f"{network[name].address}:{CONTROL_PORT}"
            cluster.start_coordinator(name, "--membership", membership, "--control-advertise", control)
        for name in NODES:
            cluster.start_node(name, "--coordinators", membership)
        for name in (*COORDINATORS, *NODES):
            cluster.running[name].line(lambda line: line["event"] in ("listening", "ready"))
        cluster.wait_for_all()
        yield cluster
