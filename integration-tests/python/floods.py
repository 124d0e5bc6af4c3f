"""A program, not a test: what a flood of large bodies costs the coordinator and its other clients.

    BATON_BIN=target/release/baton python3 integration-tests/python/floods.py [SECONDS]

Starts `baton up` with 1p1d and the real model. First 20 good clients run alone, then beside 100 clients that send 4 MiB of digits
to /tokenize and of [0,0,...] to /v1/completions, half of which leave without reading. The flood comes from a process of the lowest priority: it stands for other machines, and must not
take the processors of this one from the servers that it floods. Meanwhile /health is asked all the time, and
a prompt at 90 % of the context has to get the answer that it got before. Then 4,096 idle sockets of one address: another address
and the probes have to be answered. Prints each figure beside its line, and exits with 1 when one is over it.
"""

import json
import multiprocessing
import os
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

GOOD_CLIENTS, BAD_CLIENTS, BODY_BYTES, IDLE_SOCKETS = 20, 100, 4 << 20, 4096
SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
CONTEXT_TOKENS = 2048
LONG_PROMPT = "word " * (CONTEXT_TOKENS * 9 // 10)


def rss_mib(pid):
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))


def ask(url, path, body, timeout=120):
    data = json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, headers={"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.load(answer)


def complete(url, prompt, max_tokens):
    body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return ask(url, "/v1/completions", body)["choices"][0]["text"]


def good_clients(url, seconds):
    """Seconds of each short completion, over all clients."""
    took, failed = [], []

    def client(number):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            began = time.monotonic()
            try:
                complete(url, f"Client {number} says", 4)
            except (OSError, urllib.error.URLError) as error:
                failed.append(repr(error))
            took.append(time.monotonic() - began)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(GOOD_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return took, failed


def bad_client(address, number, over, statuses):
    digits = b'{"prompt": "' + b"7" * (BODY_BYTES - 100) + b'"}'
    zeros = b'{"model": "smollm2-135m", "prompt": [' + b"0," * ((BODY_BYTES - 100) // 2) + b"0]}"
    path, body = (b"/tokenize", digits) if number % 2 else (b"/v1/completions", zeros)
    head = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    while not over.is_set():
        try:
            with socket.create_connection(address, timeout=60) as connection:
                connection.sendall(head % (path, len(body)) + body)
                if number % 4 < 2:
                    answer = connection.recv(64)
                    statuses.append(answer.split(b" ")[1].decode() if b" " in answer else "closed")
        except OSError:
            statuses.append("broken")
        # A client that is refused comes again, and not in a tight loop.
        over.wait(0.2)


def flood(address, over, answers):
    """The bad clients, until `over`; then the statuses that those got who waited for one."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    statuses = []
    threads = [threading.Thread(target=bad_client, args=(address, n, over, statuses)) for n in range(BAD_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers.put(statuses)


def health_watch(url, over, worst):
    while not over.is_set():
        began = time.monotonic()
        try:
            urllib.request.urlopen(url + "/health", timeout=20).read()
        except OSError as error:
            worst.append((99.0, repr(error)))
        worst.append((time.monotonic() - began, ""))
        over.wait(0.02)


def p99(values):
    return statistics.quantiles(values, n=100)[98]


def idle_sockets(address, url):
    """Whether probes and another address are answered beside idle sockets of this address."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    idle = [socket.create_connection(address) for _ in range(IDLE_SOCKETS)]
    time.sleep(0.5)
    probe = urllib.request.urlopen(url + "/health", timeout=20).status
    with socket.create_connection(address, source_address=("127.0.0.2", 0), timeout=20) as other:
        other.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        models = int(other.recv(64).split(b" ")[1])
    for connection in idle:
        connection.close()
    return probe, models


def main():
    up = [os.environ.get("BATON_BIN", "target/release/baton"), "up", "--listen", "127.0.0.1:0", "--max-model-len", str(CONTEXT_TOKENS), "--json"]
    process = subprocess.Popen(up, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        url = json.loads(process.stdout.readline())["url"]
        host, port = url.removeprefix("http://").split(":")
        children = subprocess.run(["pgrep", "-P", str(process.pid), "-f", "serve-coordinator"], capture_output=True, text=True)
        coordinator = int(children.stdout.split()[0])
        return judge(url, (host, int(port)), coordinator)
    finally:
        process.terminate()
        process.wait()


def judge(url, address, coordinator):
    expected = complete(url, LONG_PROMPT, 8)
    alone, alone_failed = good_clients(url, SECONDS)
    before = rss_mib(coordinator)
    over, answers, health, most = multiprocessing.Event(), multiprocessing.Queue(), [], [before]
    flooding = multiprocessing.Process(target=flood, args=(address, over, answers))
    flooding.start()
    threads = [threading.Thread(target=health_watch, args=(url, over, health))]
    long_answers = []
    threads.append(threading.Thread(target=lambda: long_answers.append(complete(url, LONG_PROMPT, 8))))

    def memory_watch():
        while not over.is_set():
            most[0] = max(most[0], rss_mib(coordinator))
            over.wait(0.02)

    threads.append(threading.Thread(target=memory_watch))
    for thread in threads:
        thread.start()
    beside, beside_failed = good_clients(url, SECONDS)
    over.set()
    for thread in threads:
        thread.join()
    statuses = answers.get()
    flooding.join()
    probe, models = idle_sockets(address, url)
    counts = {status: statuses.count(status) for status in sorted(set(statuses))}
    print(f"flood: answers {counts}; good requests {len(alone)} alone, {len(beside)} beside it")
    rows = [
        ("coordinator's memory grows by", most[0] - before, "MiB", 100),
        ("/health at worst", max(health)[0], "s", 1),
        ("p99 of good clients, beside / alone", p99(beside) / p99(alone), "times", 2),
        ("good requests that failed", len(alone_failed) + len(beside_failed), "", 0),
        ("answers at 90 % of the context that differ", sum(answer != expected for answer in long_answers or [None]), "", 0),
        ("refusals of probes or of another address, beside idle sockets", int(probe != 200) + int(models != 200), "", 0),
    ]
    for words, figure, unit, line in rows:
        print(f"{'ok ' if figure <= line else 'RED'} {words}: {figure:.2f} {unit} (line {line})")
    return 0 if all(figure <= line for _, figure, _, line in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
