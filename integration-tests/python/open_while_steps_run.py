"""A program, not a test: how long a decode node takes to answer `Open` while its steps run, by two binaries.

    python3 integration-tests/python/open_while_steps_run.py OLD_BATON NEW_BATON [ROUNDS] [SECONDS]

Each binary in turn runs `baton up` (1p1d, the real model). STREAMS clients ask one request after the other, so that the decode node
always computes. `reserve` is the stage from `Open` sent to `Opened` received, as each answer's metrics tell it. Beside it: what the
loop's thread of the decode node waited for a CPU each time it ran (/proc/PID/task/TID/schedstat), and the mean time between tokens.
"""

import json
import pathlib
import statistics
import subprocess
import sys
import threading
import time
import urllib.request

STREAMS, PROMPT_WORDS, OUTPUT_TOKENS = 6, 40, 48


def ask(url, number):
    words = " ".join(f"{number}w{i}" for i in range(PROMPT_WORDS))
    body = {"model": "smollm2-135m", "prompt": words, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "include_metrics": True}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["metrics"]


def loop_thread(pid):
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text().strip() == "node-loop":
            return task / "schedstat"
    raise SystemExit("the decode node has no thread called node-loop")


def waited(schedstat):
    """Nanoseconds of waiting for a CPU, and how often the thread ran."""
    _, delay, slices = map(int, schedstat.read_text().split())
    return delay, slices


def round_of(binary, seconds):
    up = [binary, "up", "--listen", "127.0.0.1:0", "--json"]
    process = subprocess.Popen(up, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        started = json.loads(process.stdout.readline())
        url = started["url"]
        pid = next(p["pid"] for p in started["processes"] if p["role"] == "decode")
        ask(url, "warm")
        schedstat = loop_thread(pid)
        before, end, answers = waited(schedstat), time.monotonic() + seconds, []

        def client(stream):
            number = 0
            while time.monotonic() < end:
                answers.append(ask(url, f"{stream}x{number}"))
                number += 1

        threads = [threading.Thread(target=client, args=(stream,)) for stream in range(STREAMS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        delay, slices = (after - was for after, was in zip(waited(schedstat), before))
        reserve = sorted(answer["stages_ttft_ms"]["reserve"] for answer in answers)
        return {
            "n": len(answers),
            "reserve_p50": statistics.median(reserve),
            "reserve_p99": reserve[int(len(reserve) * 0.99)],
            "cpu_wait": delay / max(slices, 1) / 1e6,
            "token": statistics.median((a["e2e_ms"] - a["ttft_ms"]) / (OUTPUT_TOKENS - 1) for a in answers),
            "rate": sum(answer["output_tokens"] for answer in answers) / seconds,
        }
    finally:
        process.terminate()
        process.wait()


def main():
    binaries, rounds = sys.argv[1:3], int((sys.argv[3:4] or [5])[0])
    seconds = float((sys.argv[4:5] or [15])[0])
    results = {"old": [], "new": []}
    for _ in range(rounds):
        for name, binary in zip(results, binaries):
            results[name].append(round_of(binary, seconds))
            print(name, json.dumps({key: round(value, 3) for key, value in results[name][-1].items()}), flush=True)
    for key in results["old"][0]:
        old, new = ([one[key] for one in results[name]] for name in results)
        ratio = statistics.median(b / a for a, b in zip(old, new) if a)
        print(f"{key}: old {statistics.median(old):.3f}, new {statistics.median(new):.3f}, median ratio {ratio:.3f} (n = {rounds})")


if __name__ == "__main__":
    main()
