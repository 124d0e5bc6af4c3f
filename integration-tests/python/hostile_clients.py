#!/usr/bin/env python3
"""What do hostile clients do to good ones, and to the coordinator's memory?

    integration-tests/python/hostile_clients.py --baton target/release/baton --seconds 60

It starts `baton up --topology 1p1d` with the real model and three keys. Twenty good clients send a short request every two seconds, each over a connection of
its own: first alone, then beside the attackers. The attackers run in a process of their own that gets only processor time that others leave, and come from 127.0.0.2. The key of
those that ask for work may have four requests open; that of the others has no limit. All at once they
- hold 500 connections that send a header byte by byte, and 100 that send a body byte by byte, one a second;
- send headers of a mebibyte, bodies nested 200,000 deep, `n` of a million, and bodies announced with a gigabyte;
- begin HTTP/2, which the API does not speak, so that there are no streams to reset;
- ask for long streams over 200 connections and never read.
Exit status 3: a good request failed, the p99 of the good requests' times is more than twice that of alone, the coordinator's memory grew by more than 100 MiB,
a connection that sends byte by byte was kept for more than 35 s (the API gives them 30), or an attack never reached the coordinator.
"""

import argparse
import asyncio
import collections
import http.client
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse

from fairness_probe import p99
from tenant_probe import create

GOOD_CLIENTS, EVERY_S = 20, 2.0
P99_FACTOR_MAX, GROWTH_MIB_MAX, KEPT_S_MAX = 2.0, 100, 35.0
ATTACKERS_FROM = "127.0.0.2"


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--baton", default="target/release/baton")
    parse.add_argument("--model", default="smollm2-135m")
    parse.add_argument("--seconds", type=int, default=60, help="of each half [60]")
    parse.add_argument("--threads", type=int, help="threads of each node (`baton up --threads-per-node`) [as many as cores]")
    parse.add_argument("--attack", nargs=3, metavar=("URL", "KEY", "KEY"), help=argparse.SUPPRESS)
    args = parse.parse_args()
    if args.attack:
        # On other machines they would take nothing of these processors: here they get what is left.
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        print(json.dumps(asyncio.run(attack(*args.attack, args.seconds))))
        return
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "keys.toml")
        good = create(args.baton, file, "good")
        bad = [create(args.baton, file, "loud"), create(args.baton, file, "greedy", "--concurrent-requests", "4")]
        command = [args.baton, "up", "--topology", "1p1d", "--model", args.model, "--listen", "127.0.0.1:0", "--json", "--quiet"]
        command += ["--threads-per-node", str(args.threads)] if args.threads else []
        cluster = subprocess.Popen([*command, "--api-keys", file], stdout=subprocess.PIPE, text=True)
        try:
            said = json.loads(cluster.stdout.readline())
            memory = Memory(coordinator(said))
            asked(said["url"], good, 5)
            alone = asked(said["url"], good, args.seconds)
            memory.start()
            words = [sys.executable, __file__, "--seconds", str(args.seconds + 10), "--attack", said["url"], *bad]
            attackers = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
            time.sleep(5)
            beside = asked(said["url"], good, args.seconds)
            attacks = json.loads(attackers.communicate()[0])
            grown_mib = memory.most_mib()
            after = asked(said["url"], good, 5)
        finally:
            cluster.send_signal(signal.SIGINT)
            cluster.wait(timeout=60)
    sys.exit(0 if told(alone, beside, after, attacks, grown_mib) else 3)


def told(alone, beside, after, attacks, grown_mib):
    for name, times in (("alone", alone), ("beside the attackers", beside), ("afterwards", after)):
        failed = [answer for answer in times if isinstance(answer, str)]
        worked = [answer for answer in times if not isinstance(answer, str)]
        print(f"good clients {name}: {len(times)} sent, {len(failed)} failed {collections.Counter(failed) or ''}, p99 {p99(worked) * 1e3:.0f} ms")
    kept = 0.0
    for name, attack in attacks.items():
        print(f"{name}: {attack['opened']} connections, kept {attack['kept_s']:.1f} s at most, answers {attack['answers']}")
        if name.startswith("slow"):
            kept = max(kept, attack["kept_s"])
    print(f"the coordinator's resident memory grew by {grown_mib:.0f} MiB at most")
    has_failed = any(isinstance(answer, str) for answer in alone + beside + after)
    is_fast = not has_failed and p99(beside) <= P99_FACTOR_MAX * p99(alone)
    have_attacked = all(attack["opened"] for attack in attacks.values())
    return is_fast and grown_mib <= GROWTH_MIB_MAX and kept <= KEPT_S_MAX and have_attacked


def coordinator(said):
    return next(process["pid"] for process in said["processes"] if process["name"] == "coordinator")


class Memory:
    """Samples the resident memory of a process ten times a second."""

    def __init__(self, pid):
        self.pid, self.samples = pid, []

    def resident_mib(self):
        with open(f"/proc/{self.pid}/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)

    def start(self):
        self.before, self.stopped = self.resident_mib(), threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while not self.stopped.wait(0.1):
            self.samples.append(self.resident_mib())

    def most_mib(self):
        self.stopped.set()
        self.thread.join()
        return max(self.samples) - self.before


def asked(url, key, seconds):
    """Seconds that each request of the good clients took, or what went wrong."""
    answers, begun = [], time.perf_counter()

    def client(place):
        for turn in range(int(seconds / EVERY_S)):
            due = begun + turn * EVERY_S + place * EVERY_S / GOOD_CLIENTS
            time.sleep(max(0.0, due - time.perf_counter()))
            answers.append(ask(url, key, due))

    clients = [threading.Thread(target=client, args=(place,)) for place in range(GOOD_CLIENTS)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    return answers


def ask(url, key, due):
    body = json.dumps({"prompt": f"{random.random()} is", "max_tokens": 4, "ignore_eos": True, "temperature": 0})
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=60)
    try:
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json", "authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        answer.read()
        return time.perf_counter() - due if answer.status == 200 else str(answer.status)
    except OSError as error:
        return type(error).__name__
    finally:
        connection.close()


class Attack:
    def __init__(self, address, until):
        self.address, self.until = address, until
        self.opened, self.kept_s, self.answers = 0, 0.0, collections.Counter()

    async def repeat(self, one, pause_s):
        while time.monotonic() < self.until:
            begun = time.monotonic()
            try:
                made = socket.socket()
                made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                made.setblocking(False)
                made.bind((ATTACKERS_FROM, 0))
                await asyncio.get_running_loop().sock_connect(made, self.address)
                reader, writer = await asyncio.open_connection(sock=made)
                self.opened, begun = self.opened + 1, time.monotonic()
                await asyncio.wait_for(one(self, reader, writer), max(0.1, self.until - begun))
                writer.close()
            except asyncio.TimeoutError:
                writer.close()
            except OSError as error:
                self.answers[type(error).__name__] += 1
            self.kept_s = max(self.kept_s, time.monotonic() - begun)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))

    async def status(self, reader):
        line = await reader.readline()
        self.answers[line.split(b" ")[1].decode() if line.startswith(b"HTTP/") else "closed"] += 1

    async def drip(self, reader, writer):
        """One byte a second until the server has had enough of it."""
        answer = asyncio.ensure_future(self.status(reader))
        while not answer.done():
            writer.write(b"1")
            await writer.drain()
            await asyncio.wait([answer], timeout=1.0)


async def attack(url, loud, greedy, seconds):
    # Connections end in the middle of everything here.
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    where = urllib.parse.urlsplit(url)
    address, until = (where.hostname, where.port), time.monotonic() + seconds

    def post(length, *more, key=loud):
        lines = ["POST /v1/completions HTTP/1.1", f"host: {where.netloc}", f"authorization: Bearer {key}", "content-type: application/json"]
        return "\r\n".join([*lines, f"content-length: {length}", *more, "", ""]).encode()

    def sends(data):
        async def one(attack, reader, writer):
            answer = asyncio.ensure_future(attack.status(reader))
            writer.write(data)
            await writer.drain()
            await answer
        return one

    def body(text):
        return sends(post(len(text)) + text.encode())

    async def slow_header(attack, reader, writer):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-slow: ")
        await attack.drip(reader, writer)

    async def slow_body(attack, reader, writer):
        writer.write(post(100_000))
        await attack.drip(reader, writer)

    async def never_reads(attack, reader, writer):
        text = json.dumps({"prompt": f"{random.random()}", "max_tokens": 1500, "ignore_eos": True, "stream": True})
        writer.write(post(len(text), key=greedy) + text.encode())
        await attack.status(reader)
        writer.transport.pause_reading()
        await asyncio.sleep(30)

    kinds = {
        "slow headers": (slow_header, 500, 1.0),
        "slow bodies": (slow_body, 100, 1.0),
        "headers of a mebibyte": (sends(post(0, "x-large: " + "a" * (1 << 20))), 1, 0.2),
        "deep JSON": (body('{"prompt": ' + "[" * 200_000), 1, 0.2),
        "n of a million": (body('{"prompt": "a", "n": 1000000}'), 1, 0.2),
        "bodies of a gigabyte": (sends(post(1 << 30) + b"a" * 65_536), 1, 0.2),
        "HTTP/2": (sends(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)), 4, 0.05),
        "streams that nobody reads": (never_reads, 200, 1.0),
    }
    attacks = {name: Attack(address, until) for name in kinds}
    await asyncio.gather(*(attacks[name].repeat(one, pause_s) for name, (one, count, pause_s) in kinds.items() for _ in range(count)))
    return {name: {"opened": one.opened, "kept_s": one.kept_s, "answers": dict(one.answers)} for name, one in attacks.items()}


if __name__ == "__main__":
    main()
