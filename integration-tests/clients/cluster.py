"""A cluster of baton for a client: `baton up` until the end of a block, and small requests to it."""

import json
import os
import socket
import subprocess
import urllib.error
import urllib.request

# Loading the model on a busy machine takes some seconds.
READY_WITHIN_S = 120
ENDS_WITHIN_S = 60


class Cluster:
    """One prefill and one decode node. The block gets its URL."""

    def __init__(self, baton, model, log, flags=(), env=None):
        self.command = [str(baton), "up", "--topology", "1p1d", "--model", model, "--listen", "127.0.0.1:0"]
        self.command += ["--json", "--quiet", "--start-timeout", str(READY_WITHIN_S), *flags]
        self.env, self.log = os.environ | (env or {}), log

    def __enter__(self):
        with self.log.open("w") as log:
            self.process = subprocess.Popen(self.command, env=self.env, stdout=subprocess.PIPE, stderr=log, text=True)
        # `up` gives up by itself after --start-timeout.
        line = self.process.stdout.readline()
        if not line:
            self.__exit__()
            raise SystemExit(f"`{' '.join(self.command)}` did not become ready: see {self.log}")
        return json.loads(line)["url"]

    def __exit__(self, *_error):
        self.process.terminate()
        try:
            self.process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()


def get(url, path):
    with urllib.request.urlopen(url + path, timeout=60) as answer:
        return json.load(answer)


def has_path(url, path, method):
    """Whether the server knows this path. It may refuse the empty body."""
    body = b"{}" if method == "POST" else None
    request = urllib.request.Request(url + path, body, {"content-type": "application/json"}, method=method)
    try:
        urllib.request.urlopen(request, timeout=60).close()
    except urllib.error.HTTPError as error:
        return error.code not in (404, 405)
    return True


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
