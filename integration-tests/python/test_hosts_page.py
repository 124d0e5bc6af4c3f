"""The page about three hosts, as an operator follows it: its commands as printed, each on its host, with the page's own addresses.

Hosts are network namespaces (hosts/network.py). Only the paths of the model and of the certificates and the start of etcd by systemd are
replaced.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

from hosts.network import Network
from traces.processes import REPOSITORY, NotYet, Running, executable, fetched, pulled, wait_until

HOSTS = ("A", "B", "C")
MODEL = "/usr/local/share/baton/smollm2-135m.gguf"
CERTIFICATES = "/etc/baton"
READY_WITHIN_S, ANSWERS_WITHIN_S = 60, 60


def section():
    page = (REPOSITORY / "deploy/README.md").read_text()
    return page.partition("## Three hosts with etcd\n")[2].partition("\n## ")[0]


def blocks():
    return re.findall(r"^```\n(.*?)^```$", section(), flags=re.M | re.S)


def block_with(words):
    (found,) = [block for block in blocks() if words in block]
    return found


class Hosts:
    """The three, and what runs on them."""

    def __init__(self, folder):
        self.network, self.folder, self.running = Network(HOSTS, "10.0.0"), folder, []
        # A model's name is that of its file.
        self.model = folder / Path(MODEL).name
        self.model.symlink_to(pulled())
        self.env = os.environ | {"PATH": f"{executable().parent}:{os.environ['PATH']}"}
        # As the page does before it copies them.
        for make in re.findall(r"^target/release/(baton certs .*)$", block_with("certs init"), flags=re.M):
            subprocess.run(make.split(), cwd=folder, env=self.env, check=True, timeout=ANSWERS_WITHIN_S)

    def here(self, text):
        return text.replace(MODEL, str(self.model)).replace(CERTIFICATES, str(self.folder / "certs"))

    def bash(self, host, text):
        return [*self.network[host].prefix(), "bash", "-e", "-o", "pipefail", "-c", self.here(text)]

    def start(self, name, words, **env):
        self.running.append(Running(self.folder, name, words, self.env | env))
        return self.running[-1]

    def start_process(self, host, command):
        """A process of the page, under its name."""
        name = re.search(r"--name (\S+)", command)[1]
        return self.start(name, self.bash(host, command.replace("baton serve-", "exec baton serve-")))

    def start_etcd(self):
        """With what the page writes into /etc/default/etcd."""
        settings = re.findall(r"^(ETCD_\w+)=(\S+)$", block_with("/etc/default/etcd"), flags=re.M)
        settings = {name: self.here(value) for name, value in settings}
        assert {"ETCD_LISTEN_CLIENT_URLS", "ETCD_CLIENT_CERT_AUTH", "ETCD_TRUSTED_CA_FILE"} <= set(settings), settings
        program = fetched("get-etcd", "etcd")["etcd"]
        self.start("etcd", [*self.network["A"].prefix(), program, "--data-dir", self.folder / "etcd-data"], **settings)

    def said(self, host, text):
        """What a command prints, which must succeed."""
        words = self.bash(host, text)
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=ANSWERS_WITHIN_S, check=False)
        if done.returncode:
            raise NotYet(f"on {host}: {text}\n{done.stdout}{done.stderr}")
        return done.stdout


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    hosts = Hosts(tmp_path_factory.mktemp("page"))
    yield hosts
    obeyed = [process.end() for process in reversed(hosts.running)]
    assert all(obeyed), obeyed


def test_three_hosts_become_a_cluster_by_the_commands_of_the_page(hosts):
    hosts.start_etcd()
    health = re.search(r"^curl .*health", block_with("/etc/default/etcd"), flags=re.M)[0]
    for host, name in zip(HOSTS, ("coordinator-0", "prefill-0", "decode-0")):
        own = health.replace("coordinator-0", name)
        wait_until("etcd", READY_WITHIN_S, lambda host=host, own=own: hosts.said(host, own))
    with pytest.raises(NotYet):
        hosts.said("B", re.sub(r"--cert .* --key \S+", "", health))
    for host in HOSTS:
        hosts.start_process(host, block_with(f"# on {host}\n"))
    asked = block_with("baton status --url")
    status = asked.splitlines()[0]
    for host in HOSTS:
        wait_until("the cluster to be ready", READY_WITHIN_S, lambda host=host: hosts.said(host, status))
    for host in HOSTS:
        said = hosts.said(host, asked)
        for words in ("Paris", "coordinator-0", "prefill-0", "decode-0", "kv.recv"):
            assert words in said, f"on {host}: no {words!r} in\n{said}"
        handoffs = re.search(r"^baton_handoffs_total.*grpc.* ([0-9.]+)$", said, flags=re.M)
        assert float(handoffs[1]) >= 1, said


def test_a_process_without_its_address_ends_at_once_and_says_what_it_needs(hosts):
    command = re.sub(r"--advertise \S+", "", block_with("# on B\n"))
    with pytest.raises(NotYet, match="advertise"):
        # B has such a process already.
        hosts.said("A", command)


def test_a_process_without_a_certificate_ends_at_once_and_names_the_ways_out(hosts):
    command = re.sub(r"--tls-\w+ \S+", "", block_with("# on B\n")).replace("\\\n", " ")
    with pytest.raises(NotYet, match="baton certs init.*insecure"):
        hosts.said("A", command)


def test_etcd_on_another_host_is_not_asked_in_plain_text(hosts):
    # Each on a host where its ports are free.
    for host, at in (("A", "C"), ("B", "A")):
        command = block_with(f"# on {host}\n").replace("etcds://", "etcd://").replace("\\\n", " ")
        with pytest.raises(NotYet, match="plain text.*etcds://.*insecure"):
            hosts.said(at, command)


def test_nobody_hears_a_node_without_a_certificate_but_probes(hosts):
    """What the page says of a node's port: encrypted, probes for everybody, the rest for those who belong to the cluster."""
    ask = "curl -s -o /dev/null -w %{http_code}"
    assert hosts.said("B", f"{ask} -k https://10.0.0.3:7420/ready") == "200"
    assert hosts.said("B", f"{ask} -k https://10.0.0.3:7420/metrics") == "403"
    own = "--cert /etc/baton/prefill-0.crt --key /etc/baton/prefill-0.key"
    assert hosts.said("B", f"{ask} -k {own} https://10.0.0.3:7420/metrics") == "403"
    own = "--cert /etc/baton/coordinator-0.crt --key /etc/baton/coordinator-0.key"
    assert hosts.said("A", f"{ask} -k {own} https://10.0.0.3:7420/metrics") == "200"
    with pytest.raises(NotYet):
        hosts.said("B", "curl -sf http://10.0.0.3:7420/ready")


def test_two_tenants_use_it_over_tls_by_the_commands_of_the_page(hosts):
    """The last of this file: the coordinator starts anew."""
    issue = re.search(r"^target/release/(baton certs issue certs api/.*)$", section(), flags=re.M)[1]
    subprocess.run(issue.split(), cwd=hosts.folder, env=hosts.env, check=True, timeout=ANSWERS_WITHIN_S)
    said = hosts.said("A", block_with("# keys, on A\n") + "declare -p RED BLUE OPS")
    keys = "\n".join(line for line in said.splitlines() if line.startswith("declare ")) + "\n"
    before = next(process for process in hosts.running if process.name == "coordinator-0")
    assert before.end()
    hosts.running.remove(before)
    hosts.start_process("A", block_with("# again on A"))
    ready = f"{keys}\nBATON_CA={CERTIFICATES}/ca.crt BATON_API_KEY=$OPS baton status --url https://10.0.0.1:8000"
    wait_until("the cluster to be ready", READY_WITHIN_S, lambda: hosts.said("A", ready))
    said = hosts.said("A", keys + block_with("# ask, on A\n"))
    for words in ("prefill-0", "decode-0", "missing_api_key"):
        assert words in said, said
    first, again, other = map(int, re.findall(r'"cached_tokens":(\d+)', said))
    assert first == other == 0 < again, said
