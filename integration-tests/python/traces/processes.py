"""baton's processes for the tests of its traces: `baton up`, or the three started by hand. Ended with the test."""

import json
import os
import socket
import subprocess
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
# Loading the model on a busy machine; it takes a second or two on an idle one.
READY_WITHIN_S = 60
# A drain of nothing, twice over.
ENDS_WITHIN_S = 20
LOOK_EVERY_S = 0.02


class NotYet(Exception):
    """What a wait still waits for."""


def wait_until(what, limit_s, look):
    """The value that `look` returns once it no longer raises."""
    ends = time.monotonic() + limit_s
    while True:
        try:
            return look()
        except (NotYet, OSError) as why:
            assert time.monotonic() < ends, f"{what}: not within {limit_s} s: {why}"
        time.sleep(LOOK_EVERY_S)


def executable(name="baton"):
    """$BATON_BIN, or one that was built beside it."""
    baton = os.environ.get("BATON_BIN")
    assert baton, "BATON_BIN is not set: give the path of the `baton` to test, or run scripts/test"
    return Path(baton).with_name(name)


def target():
    return Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))


def fetched(script, folder):
    """The `name=value` lines of one of the scripts that fetch a program into target/."""
    words = [REPOSITORY / "scripts" / script, target() / folder]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{script} could not get it, so nothing was checked:\n{done.stderr}"
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


class Running:
    """A process whose stdout and stderr go to files in the test's folder."""

    def __init__(self, folder, name, words, env=None):
        self.name, self.out, self.err = name, folder / f"{name}.out", folder / f"{name}.err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                list(map(str, words)), stdin=subprocess.DEVNULL, stdout=out, stderr=err, env={**os.environ, **(env or {})}
            )

    def lines(self):
        """The JSON lines on its stdout; a process that has ended will write no more."""
        text = self.out.read_text()
        if self.process.poll() is not None:
            raise AssertionError(f"{self.name} ended with {self.process.returncode}: {self.err.read_text()[-2000:]}")
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def line(self, is_wanted):
        def look():
            found = [line for line in self.lines() if is_wanted(line)]
            if not found:
                raise NotYet(f"{self.name} wrote {self.lines()}")
            return found[0]

        return wait_until(f"{self.name} to be ready", READY_WITHIN_S, look)

    def is_stopped(self):
        """As under SIGSTOP."""
        state = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        return state == "T"

    def end(self):
        """SIGTERM, and SIGKILL for one that does not obey; says whether it did."""
        self.process.terminate()
        try:
            self.process.wait(ENDS_WITHIN_S)
            return True
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(ENDS_WITHIN_S)
            return False


class Cluster:
    def __init__(self, url, running):
        self.url, self.running = url, running

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.load(answer)

    def kill(self, name):
        """SIGKILL, and no longer one of the cluster."""
        found = next(process for process in self.running if process.name == name)
        self.running.remove(found)
        found.process.kill()
        found.process.wait(ENDS_WITHIN_S)

    def end(self):
        """Drained and flushed; a second call does nothing."""
        running, self.running = self.running, []
        killed = [process.name for process in running if not process.end()]
        assert not killed, f"{killed} did not end within {ENDS_WITHIN_S} s of SIGTERM"

    def wait_for_pairs(self, count):
        def look():
            ready = self.get("/ready")
            if ready.get("usable_pairs") != count:
                raise NotYet(str(ready))

        wait_until(f"{count} pairs over which KV can move", READY_WITHIN_S, look)


@contextmanager
def ended(cluster):
    try:
        yield cluster
        cluster.end()
    finally:
        for process in cluster.running:
            process.process.kill()


@contextmanager
def up(folder, topology, env=None):
    words = [executable(), "up", "--topology", topology, "--listen", "127.0.0.1:0", "--json", "--quiet"]
    running = Running(folder, "up", words, env)
    with ended(Cluster("", [running])) as cluster:
        cluster.url = running.line(lambda line: "url" in line)["url"]
        prefill, decode = topology.removesuffix("d").split("p")
        cluster.wait_for_pairs(int(prefill) * int(decode))
        yield cluster


@contextmanager
def by_hand(folder, env_of=None, prefill_nodes=1, decode_nodes=1):
    """The three with the files of deploy/local, on free ports; `prefill-1`, `decode-1` and on are further nodes. `env_of`:
    more environment, by role."""
    env_of, model = env_of or {}, os.environ.get("BATON_MODEL") or pulled()
    with ended(Cluster("", [])) as cluster:

        def start(role, program, *flags, name=None):
            words = [executable(program), "--config", REPOSITORY / f"deploy/local/{role}.toml", "--model", model]
            running = Running(folder, name or role, [*words, "--listen", "127.0.0.1:0", *flags], env_of.get(role))
            cluster.running.insert(0, running)
            return running

        def node(role, name):
            return start(role, f"baton-{role}-node", "--coordinators", at["control"], "--threads", "1", "--name", name, name=name)

        coordinator = start("coordinator", "baton-coordinator", "--control-listen", "127.0.0.1:0")
        at = coordinator.line(lambda line: line["event"] == "listening")
        cluster.url = "http://" + at["http"]
        counts = {"decode": decode_nodes, "prefill": prefill_nodes}
        nodes = [node(role, f"{role}-{i}") for role, count in counts.items() for i in range(count)]
        for one in nodes:
            one.line(lambda line: line["event"] == "ready")
        cluster.wait_for_pairs(prefill_nodes * decode_nodes)
        yield cluster


def pulled():
    words = [executable(), "model", "pull", "smollm2-135m"]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=True).stdout.strip()


def arm(folder, name, line):
    """Arms a failpoint of the process `name` of an `up` that was started with BATON_FAILPOINTS=folder."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        client.connect(str(Path(folder) / f"{name}.sock"))
        client.sendall(f"{line}\n".encode())
        answer = client.makefile().readline()
    assert answer == "ok\n", f"{name} does not take {line!r}: {answer!r}"
