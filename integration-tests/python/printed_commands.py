"""The commands that a page prints, and one bash that runs a page's commands in a folder that looks like a checkout after its build."""

import os
import re
import shlex
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from deploy_files import REPOSITORY, ROLES, SECONDS_MAX, baton, run

# Of one session: starts of clusters, each with a model to load on a busy machine.
SESSION_SECONDS_MAX = 300
# For processes to end that were told to, and for their sockets to close.
LEFT_OVER_SECONDS_MAX = 10
# The ports of the pages.
PORTS = (8000, 8443, 7400, 7410, 7420)

PRELUDE = """
# With job control each command is a process group of its own, as in a terminal.
set -m
finish() {
    local status=$1 jobs ended
    jobs=$(jobs -p)
    for job in $jobs; do kill -INT -- "-$job" 2>/dev/null; done
    for job in $jobs; do
        wait "$job"; ended=$?
        # 130: by Ctrl-C.
        case $ended in 0 | 130) ;; *) echo "FAILED: what was started in $now ended with $ended"; status=1 ;; esac
    done
    exit "$status"
}
failed() { echo "FAILED: $now: status $?"; finish 1; }
wait_for() { for _ in $(seq 1200); do if "$@"; then return; fi; sleep 0.1; done; return 1; }
ready() { curl --silent --fail --output /dev/null http://127.0.0.1:8000/ready 2>/dev/null; }
ready_by_tls() { curl --silent --fail --insecure --output /dev/null https://127.0.0.1:8443/ready 2>/dev/null; }
"""
UP_LOOPBACK = """import fcntl, os, socket, struct, sys
SIOCSIFFLAGS, IFF_UP_AND_RUNNING = 0x8914, 0x41
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP_AND_RUNNING))
os.execvp(sys.argv[1], sys.argv[1:])"""
# What a build would make is there already.
CARGO = """#!/bin/sh
case "$1 $2 $3" in
    "build --release "*) exit 0 ;;
    "run --release --") shift 3; exec baton "$@" ;;
esac
echo "cargo: $*: no such command in this test" >&2
exit 1
"""
# Reads its settings as it would at its start, says them, and ends.
BATON_READS = """#!/bin/sh
"$PRINTED_BATON" "$@" --print-config || echo "baton $*" >>"$PRINTED_SETTINGS/refused"
"""


# How a command is run: as it stands, until Ctrl-C beside those that follow, or as far as it reads its settings.
PLAIN, STAYS, SETTINGS = "plain", "stays", "settings"


@dataclass(frozen=True)
class Printed:
    page: str
    line: int
    # The heading of level two that it stands under.
    section: str
    text: str

    def __str__(self):
        return f"{self.page}:{self.line}: {self.text.splitlines()[0]}"

    @property
    def code(self):
        """Without comments at the end of a line, and with a command's lines as one where backslashes say so."""
        return re.sub(r"\s+# .*$", "", self.text, flags=re.M).strip().replace("\\\n", " ")


def is_whole(text):
    """Not the start of a command that goes on in the next line: bash says so."""
    if text.rstrip("\n").endswith("\\"):
        return False
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    return done.returncode == 0 and not done.stderr


@cache
def printed(page):
    """What stands between fences without a language. Other fences hold no commands."""
    found, section, fence, start, text = [], "", None, 0, ""
    for number, line in enumerate((REPOSITORY / page).read_text().splitlines(keepends=True), 1):
        if line.startswith("```"):
            assert not text, f"{page}:{number}: the block ends within a command: {text}"
            fence = line[3:].strip() if fence is None else None
        elif fence is None:
            section = line[3:].strip() if line.startswith("## ") else section
        elif fence == "" and (text or (line.strip() and not line.startswith("#"))):
            start, text = start if text else number, text + line
            if is_whole(text):
                found.append(Printed(page, start, section, text))
                text = ""
    return found


@cache
def alone():
    """What goes before a command so that it has a network of its own, with nobody on the pages' ports. None: it cannot be had."""
    loopback = [sys.executable, "-c", UP_LOOPBACK]
    for words in (["unshare", "--net"], ["unshare", "--map-root-user", "--net"]):
        with suppress(FileNotFoundError):
            if run(*words, *loopback, "true").returncode == 0:
                return [*words, *loopback]
    return None


def checkout(folder):
    """A folder to stand in: the repository, and in target/ what its build makes."""
    root = folder / "checkout"
    (root / "target/release").mkdir(parents=True)
    for entry in REPOSITORY.iterdir():
        if entry.name not in ("target", ".git"):
            (root / entry.name).symlink_to(entry)
    built = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))
    (built / "prometheus").mkdir(parents=True, exist_ok=True)
    (root / "target/prometheus").symlink_to(built / "prometheus")
    (root / "target/release/baton").symlink_to(Path(baton()).resolve())
    for role in ROLES:
        name = f"baton-{role}" if role == "coordinator" else f"baton-{role}-node"
        beside = Path(baton()).resolve().with_name(name)
        program = root / "target/release" / name
        if beside.exists():
            program.symlink_to(beside)
        else:
            program.write_text(f'#!/bin/sh\nexec "$PRINTED_BATON" serve-{role} "$@"\n')
            program.chmod(0o755)
    for name, text in (("first/cargo", CARGO), ("settings/baton", BATON_READS)):
        program = folder / name
        program.parent.mkdir()
        program.write_text(text)
        program.chmod(0o755)
    (folder / "first/baton").symlink_to(Path(baton()).resolve())
    return root


def script(commands, ways, before="", typed=None):
    """`before` is what a page takes for granted. `typed` has what a person types into a command."""
    parts, begun = [PRELUDE, before], None
    for command in commands:
        text = command.text.rstrip("\n")
        is_background = command.code.endswith("&")
        if begun and not is_background:
            parts.append(f"wait_for {begun} || failed")
            begun = None
        parts.append(f"now='{command.page}:{command.line}'; echo \"== $now\"")
        if ways(command) == SETTINGS:
            parts.append(f'( PATH=$PRINTED_SETTINGS:$PATH\n{text}\nwait; test ! -e "$PRINTED_SETTINGS/refused" ) || failed')
        elif ways(command) == STAYS:
            parts.append(f"{{ {text}\n}} &")
            begun = "ready_by_tls" if "--api-tls" in command.code else "ready"
        else:
            answers = shlex.quote((typed or {}).get(command.code, ""))
            parts.append(f"{{ {text}\n}} <<<{answers} || failed")
        if is_background:
            out = re.search(r">\s*(\S+)\s*&$", command.code)
            begun = f"test -s {out.group(1)}" if out else "ready"
    return "\n".join([*parts, *([f"wait_for {begun} || failed"] if begun else []), "now=the end", "finish 0", ""])


def left_over(mark):
    """Processes that a session has started and that are still there."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def run_session(folder, text):
    """The exit status and what was said. No process is left, whatever happens."""
    root, mark = checkout(folder), f"PRINTED_SESSION={uuid.uuid4()}"
    home = folder / "home"
    home.mkdir()
    # An answer with an error is a failure of the command.
    (home / ".curlrc").write_text("fail\nshow-error\n")
    (home / "kv-secret").write_text("any text")
    path = f"{folder / 'first'}:{os.environ['PATH']}"
    env = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")} | {
        "HOME": str(home),
        "PATH": path,
        "BATON_CACHE_DIR": str(models()),
        "PRINTED_BATON": str(Path(baton()).resolve()),
        "PRINTED_SETTINGS": str(folder / "settings"),
        mark.split("=")[0]: mark.split("=")[1],
    }
    (folder / "session").write_text(text)
    said = folder / "said"
    try:
        with said.open("wb") as out:
            words = [*(alone() or []), "bash", str(folder / "session")]
            process = subprocess.Popen(words, cwd=root, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
            status = process.wait(SESSION_SECONDS_MAX)
        ends = time.monotonic() + LEFT_OVER_SECONDS_MAX
        while left_over(mark) and time.monotonic() < ends:
            time.sleep(0.1)
        remaining = [Path(f"/proc/{each}/cmdline").read_bytes().replace(b"\0", b" ").decode() for each in left_over(mark)]
        assert not remaining, f"still there: {remaining}\n{said.read_text(errors='replace')[-4000:]}"
        return status, said.read_text(errors="replace")
    except subprocess.TimeoutExpired:
        raise AssertionError(f"not within {SESSION_SECONDS_MAX} s:\n{said.read_text(errors='replace')[-4000:]}") from None
    finally:
        for each in left_over(mark):
            with suppress(ProcessLookupError):
                os.kill(each, 9)


@cache
def models():
    """The folder in which this machine has the example model; scripts/test has fetched it, else this does."""
    done = run(baton(), "model", "pull", "--quiet", "smollm2-135m")
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip()).parents[2]
