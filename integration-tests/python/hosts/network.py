"""Hosts that are network namespaces on one switch, and cables that can be cut: one way, both ways, a share of the packets.

Nothing of the machine's own network is touched, and nothing has a name outside: a namespace is held by a descriptor of this
process and by the processes in it, which the kernel kills with this one. So nothing is left over, whatever ends a run, and
runs beside each other do not meet.
"""

import ctypes
import json
import os
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path

from traces.processes import fetched

CLONE_NEWNET = 0x40000000
SUBNET = "10.77.0"
BRIDGE = "switch"
NEW_CONNECTION = "tcp flags & (syn | ack) == syn"
# The kernel's own limit.
PIECE_PACKETS_MAX = 65535
LIBC = ctypes.CDLL(None, use_errno=True)


def called(result):
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def new_namespace():
    """A descriptor of a new network namespace. A thread of its own makes it: this one stays where it is."""
    made = []

    def make():
        called(LIBC.unshare(CLONE_NEWNET))
        made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert made, "no network namespace could be made: root is needed (scripts/get-nftables says what is missing)"
    return made[0]


class Namespace:
    def __init__(self, tools):
        self.tools, self.descriptor = tools, new_namespace()
        self.path = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        self.ip("link", "set", "lo", "up")

    def prefix(self):
        """In front of the words of a program that is to run in here, and to die with the thread that starts it."""
        return ["nsenter", f"--net={self.path}", "setpriv", "--pdeathsig", "KILL"]

    def output_of(self, tool, *words, stdin=None):
        env = os.environ | {"LD_LIBRARY_PATH": self.tools["library_path"]}
        words = [*self.prefix(), self.tools[tool], *map(str, words)]
        done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=10, env=env, check=False)
        assert done.returncode == 0, f"{words}: {done.stderr}\n{stdin or ''}"
        return done.stdout

    def ip(self, *words):
        return self.output_of("ip", *words)

    @contextmanager
    def entered(self):
        """This thread, and those it starts meanwhile, have their sockets in here."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        called(LIBC.setns(self.descriptor, CLONE_NEWNET))
        try:
            yield
        finally:
            called(LIBC.setns(before, CLONE_NEWNET))
            os.close(before)


class Host(Namespace):
    def __init__(self, tools, subnet, number):
        super().__init__(tools)
        self.address, self.port = f"{subnet}.{number}", f"port{number}"

    def set_ports(self, first, last):
        """Those that the kernel gives to sockets whose program asks for none."""
        with self.entered():
            Path("/proc/sys/net/ipv4/ip_local_port_range").write_text(f"{first} {last}")


class Network:
    """Hosts by name, each with one cable to the switch. The packets that are to be dropped are dropped in the switch."""

    def __init__(self, names, subnet=SUBNET):
        tools = fetched("get-nftables", "nftables")
        self.switch, self.lost_percent, self.closed = Namespace(tools), {}, []
        self.switch.ip("link", "add", BRIDGE, "type", "bridge")
        self.switch.ip("link", "set", BRIDGE, "up")
        self.hosts = {name: Host(tools, subnet, number) for number, name in enumerate(names, 1)}
        for host in self.hosts.values():
            self.switch.ip("link", "add", host.port, "type", "veth", "peer", "name", "eth0", "netns", host.path)
            self.switch.ip("link", "set", host.port, "master", BRIDGE, "up")
            host.ip("address", "add", f"{host.address}/24", "dev", "eth0")
            host.ip("link", "set", "eth0", "up")
        self.nft("table bridge cuts {", "counter dropped { }", "chain forward {", "type filter hook forward priority 0", "}", "}")

    def __getitem__(self, name):
        return self.hosts[name]

    def lose(self, percent, *ways):
        """Of the packets of each way, which is a pair (from, to) of hosts' names. 0 heals it."""
        for source, target in ways:
            self.lost_percent[source, target] = percent
            # A cable of this kind carries pieces of up to 64 KiB, of which few would be lost: packets as on a wire then.
            self[source].ip("link", "set", "eth0", "gso_max_segs", 1 if 0 < percent < 100 else PIECE_PACKETS_MAX)
        self.apply()

    def heal(self):
        self.lose(0, *self.lost_percent)
        self.lost_percent.clear()

    def open_only(self, ports):
        """TCP connections to other ports of any host are refused by silence. `ports` are numbers and ranges, `first-last`."""
        self.closed.append(f"{NEW_CONNECTION} tcp dport != {{ {', '.join(map(str, ports))} }}")
        self.apply()

    def close(self, ports, way):
        """The same for these ports and one way (from, to). Connections that stand go on."""
        source, target = (self[name].address for name in way)
        self.closed.append(f"ip saddr {source} ip daddr {target} {NEW_CONNECTION} tcp dport {ports}")
        self.apply()

    def apply(self):
        """All rules at once: a transaction."""
        rules = ["flush chain bridge cuts forward"]
        rules += [f"add rule bridge cuts forward {rule} counter name dropped drop" for rule in self.closed]
        for (source, target), percent in self.lost_percent.items():
            way = f"ip saddr {self[source].address} ip daddr {self[target].address}"
            some = f"numgen random mod 100 < {percent}" if percent < 100 else ""
            if percent:
                rules.append(f"add rule bridge cuts forward {way} {some} counter name dropped drop")
        self.nft(*rules)

    def nft(self, *lines):
        self.switch.output_of("nft", "-f", "-", stdin="\n".join([*lines, ""]))

    def dropped(self):
        """Packets so far."""
        said = json.loads(self.switch.output_of("nft", "-j", "list", "counters"))
        return sum(entry["counter"]["packets"] for entry in said["nftables"] if "counter" in entry)

    def unplug(self, name):
        self.switch.ip("link", "set", self[name].port, "down")

    def plug(self, name):
        self.switch.ip("link", "set", self[name].port, "up")
