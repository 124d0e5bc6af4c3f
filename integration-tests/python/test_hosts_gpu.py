"""Two nodes on GPUs of two hosts, with nothing open between them but the ports of docs/how-to/deploy-gpus.md.

The GPUs are those of the false driver, and NCCL is its double (scripts/false-cuda): $BATON_FALSE_CUDA names their folder. Hosts are
network namespaces (hosts/network.py).
"""

import os
import re
from contextlib import contextmanager
from pathlib import Path

import pytest

from hosts import tiny_model
from hosts.asking import ask
from hosts.cluster import CONTROL_PORT, PORTS, READY_WITHIN_S, Cluster, ended
from hosts.network import Network
from traces.processes import NotYet, wait_until

# As the Rust tests (integration-tests/tests/cluster/gpu.rs), which have mostly compiled them before.
TARGET = Path(os.environ.get("CARGO_TARGET_DIR") or Path(__file__).resolve().parents[2] / "target")
KERNELS = TARGET / "tmp" / "compiled-kernels"
HOSTS = ("coordinator-0", "prefill-0", "decode-0", "client")
# What net.ipv4.ip_local_port_range leaves to NCCL.
NCCL_PORTS = (42000, 42063)
# A communicator that is not made is waited for 15 s (kv-transfer/src/device/mod.rs: `communicator_wait`), then the decode node
# computes the prompt.
DEADLINE_S = 60
# Several chunks of a step's 32 tokens.
PROMPT = [(7 * at * at + 31 * at) % tiny_model.VOCABULARY for at in range(70)]
FEW = ["--device", "cuda:0", "--kv-cache-memory", "1MiB", "--max-num-batched-tokens", 32, "--max-num-seqs", 4]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    folder = os.environ.get("BATON_FALSE_CUDA")
    assert folder, "BATON_FALSE_CUDA is not set: it names the folder that scripts/false-cuda makes"
    monkeypatch.setenv("BATON_CUDA_PATH", folder)
    monkeypatch.setenv("BATON_KERNEL_CACHE", str(KERNELS))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")


class TwoHosts(Cluster):
    def __init__(self, network, folder, model):
        super().__init__(network, folder)
        self.model = model
        self.control = f"{network['coordinator-0'].address}:{CONTROL_PORT}"

    def start_gpu(self, name, transport):
        self.start_node(name, *FEW, "--transports", transport, "--coordinators", self.control)

    def wait_for(self, names, but_epochs=()):
        """The epochs of the nodes with these names, once all are ready and none is in an old life."""

        def look():
            nodes = self.get("coordinator-0", "/admin/cluster")["nodes"]
            epochs = [node["epoch"] for node in nodes if node["name"] in names and node["state"] == "ready"]
            if len(epochs) != len(names) or set(epochs) & set(but_epochs):
                raise NotYet(nodes)
            return epochs

        return wait_until(f"{names} to be ready", READY_WITHIN_S, look)

    def wait_for_pair(self):
        """Nodes are ready before the pair between them: until it is usable, the decode node computes prompts itself."""

        def look():
            pairs = self.get("coordinator-0", "/admin/cluster")["pairs"]
            if not any(pair["is_usable"] for pair in pairs):
                raise NotYet(pairs)

        wait_until("a pair to be usable", READY_WITHIN_S, look)

    def start_prefill_again(self, transport):
        before = self.wait_for(["prefill-0"])
        assert self.running["prefill-0"].end(), "it did not obey"
        self.start_gpu("prefill-0", transport)
        self.wait_for(["prefill-0"], before)

    def tokens(self):
        body = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, "temperature": 0}
        answer = ask(self.address("coordinator-0"), body, DEADLINE_S)
        assert answer.outcome == "ok", f"{answer}\n{self.logs()}"
        return answer.tokens

    def handoffs(self, transport):
        return self.metric("coordinator-0", "baton_handoffs_total", transport=transport, outcome="committed")


@contextmanager
def two_hosts(folder, model, transport):
    network = Network(HOSTS)
    for name in ("prefill-0", "decode-0"):
        network[name].set_ports(*NCCL_PORTS)
    nccl = f"{NCCL_PORTS[0]}-{NCCL_PORTS[1]}" if transport == "nccl" else None
    network.open_only([PORTS["coordinator"], CONTROL_PORT, PORTS["prefill"], PORTS["decode"], *([nccl] if nccl else [])])
    with network["client"].entered(), ended(TwoHosts(network, folder, model)) as cluster:
        cluster.start_coordinator("coordinator-0")
        for name in ("prefill-0", "decode-0"):
            cluster.start_gpu(name, transport)
        cluster.wait_for(["prefill-0", "decode-0"])
        cluster.wait_for_pair()
        yield cluster


@pytest.fixture(scope="module")
def right():
    """The tokens of the first way that is tried. `cluster/gpu.rs` compares them with those of one node."""
    return []


@pytest.mark.parametrize(
    ("transport", "closed"), [("nccl", f"{NCCL_PORTS[0]}-{NCCL_PORTS[1]}"), ("grpc", str(PORTS["decode"]))]
)
def test_a_handoff_crosses_hosts_by_the_documented_ports_and_a_closed_one_is_named(tmp_path, model, right, transport, closed):
    with two_hosts(tmp_path, model, transport) as cluster:
        tokens = cluster.tokens()
        assert cluster.handoffs(transport) == 1, cluster.logs()
        assert (right or tokens) == tokens
        right[:] = tokens
        # The pair of its next life has no connection yet.
        cluster.network.close(closed, ("prefill-0", "decode-0"))
        cluster.start_prefill_again(transport)
        if transport == "nccl":
            # Its communicator is made for the first handoff, over the ports that are closed. The pair itself is of gRPC.
            cluster.wait_for_pair()
        assert cluster.tokens() == right, "the decode node computes the prompt itself"
        assert cluster.handoffs(transport) == 1, cluster.logs()
        first, _, last = closed.partition("-")
        address = re.escape(cluster.network["decode-0"].address)

        def look():
            said = re.findall(rf"{address}:(\d+)", cluster.running["prefill-0"].err.read_text())
            if not [port for port in said if int(first) <= int(port) <= int(last or first)]:
                raise NotYet(cluster.logs())

        wait_until("an error that names the port", READY_WITHIN_S, look)
