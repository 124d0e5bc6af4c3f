"""What a client's script in Python tells the runner: one JSON line for each request, with its times as the client saw them."""

import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

URL, MODEL, TOKENIZER = os.environ["BATON_URL"], os.environ["BATON_MODEL"], os.environ["BATON_TOKENIZER"]
# Where the script may write, and the programs that were installed for it.
FOLDER, PROGRAMS = Path(os.environ["CLIENT_FOLDER"]), Path(os.environ["CLIENT_PROGRAMS"])
# Paths that only newer servers have; see `OPTIONAL` in the runner.
OFFERED = os.environ["BATON_OFFERED"].split(",")
QUESTIONS = [
    "What is the capital of France? Answer in one short sentence.",
    "Name three primary colours.",
    "Tell me a story about a lighthouse.",
    "How many legs has a spider?",
]
# Longer than the context of any model that the tests use.
TOO_LONG = "word " * 40_000
PLACE = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["place", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": PLACE}}
WEATHER_QUESTION = "How will the weather be in Rome in the next two days?"


def user(text):
    return [{"role": "user", "content": text}]


class Row:
    """One request as its client saw it. `headers` go with it, so that its record is found by its id."""

    def __init__(self, what):
        self.values = {"what": what, "id": f"client-{uuid.uuid4().hex[:16]}", "error": None}
        self.headers = {"x-request-id": self.values["id"]}
        self.began = time.perf_counter()

    def elapsed_ms(self):
        return (time.perf_counter() - self.began) * 1000

    def begin(self):
        """Only now: what came before was preparation."""
        self.began = time.perf_counter()

    def first(self):
        """The client has the first token; later calls change nothing."""
        self.values.setdefault("ttft_ms", self.elapsed_ms())

    def done(self, prompt_tokens, output_tokens):
        """The client has the whole answer, and these counts in it."""
        self.values |= {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
        self.values.setdefault("e2e_ms", self.elapsed_ms())


def write(**values):
    with open(os.environ["CLIENT_ROWS"], "a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")


@contextlib.contextmanager
def request(what):
    """An exception becomes the row's error: the requests that follow are still worth sending."""
    row = Row(what)
    try:
        yield row
        assert row.values.get("output_tokens") is not None, "the client shows no count of tokens"
    except Exception as why:  # noqa: BLE001
        row.values["error"] = f"{type(why).__name__}: {why}"[:500]
    write(**row.values)


@contextlib.contextmanager
def refused(what, kind, holds=""):
    """A request that the server must refuse, so that the client raises `kind` with `holds` as its code or in its text."""
    row = Row(what)
    row.values["is_refused"] = True
    try:
        yield row
        row.values["error"] = "it was not refused"
    except kind as why:
        if holds not in f"{why} {getattr(why, 'code', '')}":
            row.values["error"] = f"{type(why).__name__} without {holds!r}: {why}"[:500]
    except Exception as why:  # noqa: BLE001
        row.values["error"] = f"{type(why).__name__}, not {kind.__name__}: {why}"[:500]
    write(**row.values)


def tool(words, limit_s, **environment):
    """Runs a program of the client in its folder, with its output in a file there."""
    # aiperf takes no tokenizer folder where HF_HUB_OFFLINE is set, so it is not set for all.
    with (FOLDER / "output.txt").open("a") as output:
        output.write(f"$ {' '.join(map(str, words))}\n")
        output.flush()
        subprocess.run(
            list(map(str, words)), cwd=FOLDER, env=os.environ | environment, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, timeout=limit_s, check=True,
        )


@contextlib.contextmanager
def service(words, ready_url, limit_s, **environment):
    """A server that belongs to the client, from the moment it answers at `ready_url`."""
    with (FOLDER / "service.txt").open("w") as output:
        process = subprocess.Popen(
            list(map(str, words)), cwd=FOLDER, env=os.environ | environment, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT,
        )
    try:
        ends = time.monotonic() + limit_s
        while not answers(ready_url):
            assert process.poll() is None, f"{words[0]} ended with {process.returncode}: see {FOLDER}/service.txt"
            assert time.monotonic() < ends, f"{words[0]} was not ready within {limit_s} s"
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def answers(url):
    try:
        return urllib.request.urlopen(url, timeout=5).status == 200
    except OSError:
        return False


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
