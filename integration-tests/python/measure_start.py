"""How long the nodes of `baton up` take from their start to ready, and what memory the processes of one `up` hold together.

    python integration-tests/python/measure_start.py BATON [BATON ...] -- [flags of `baton up`]

Starts `baton up` ten times (REPEATS) with each binary in turn, so that whatever else the machine does meets all of them alike.
A node's time is from the launcher's line "started" to its line "ready". CPU is the node's own user and system time by then.
PSS is the sum over all processes of the `up`, from /proc/PID/smaps_rollup, when it is ready and again after one answer.
"""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request

REPEATS = int(os.environ.get("REPEATS", "10"))
EVENT = re.compile(r"^ *[0-9.]+ s  (\S+): (started as \S+, pid (\d+)|ready)$")
TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def pss_mb(pids):
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            total += next(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
    return total / 1024


def ask(url, model):
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["text"]


def one_start(binary, flags):
    command = [binary, "up", "--quiet", "--json", "--listen=127.0.0.1:0", *flags]
    begun = time.monotonic()
    up = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started, found = {}, {}
    for line in up.stderr:
        now = time.monotonic()
        event = EVENT.match(line)
        if event and event[3]:
            started[event[1]] = (now, int(event[3]))
        elif event and event[1] in started:
            at, pid = started[event[1]]
            found[event[1]] = {"ready_s": now - at, "cpu_s": cpu_seconds(pid)}
        elif "ready in" in line:
            break
    found["up"] = {"ready_s": time.monotonic() - begun, "cpu_s": 0.0}
    ready = json.loads(up.stdout.readline())
    pids = [up.pid] + [process["pid"] for process in ready["processes"]]
    found["up"]["pss_ready_mb"] = pss_mb(pids)
    found["text"] = ask(ready["url"], ready["model"])
    found["up"]["pss_after_mb"] = pss_mb(pids)
    up.send_signal(signal.SIGINT)
    up.communicate()
    return found


def main():
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    binaries, flags = sys.argv[1:split], sys.argv[split + 1 :]
    runs = {binary: [] for binary in binaries}
    for _ in range(REPEATS):
        for binary in binaries:
            runs[binary].append(one_start(binary, flags))
    for binary, all_of in runs.items():
        print(f"{binary}: n = {len(all_of)}, answers {sorted({run.pop('text') for run in all_of})}")
        for name in all_of[0]:
            for figure in all_of[0][name]:
                values = [run[name][figure] for run in all_of]
                middle = statistics.median(values)
                print(f"  {name:12} {figure:13} median {middle:8.2f}  min {min(values):8.2f}  max {max(values):8.2f}")


main()
