#!/usr/bin/env python3
"""Stands in for `baton serve-*` in the launcher's tests: announces, answers /ready, drains when stdin ends.

FAKE_DIE=NAME       that process complains on stderr and exits 7 instead of getting ready
FAKE_STUBBORN=NAME  that process ignores the end of stdin
FAKE_SILENT=NAME    that process never says that it is ready
FAKE_LEAVE=NAME     that process exits 0 once it is ready, as after a drain
FAKE_READY=P,D,N    `/ready` says that P prefill and D decode nodes are ready, and N pairs usable
FAKE_LOG=FILE       each process appends `start NAME` and `drain NAME`
"""
import http.server
import json
import os
import sys
import threading

flags = dict(a[2:].split("=", 1) for a in sys.argv[2:] if a.startswith("--") and "=" in a)
role = sys.argv[1].removeprefix("serve-")
name = flags["name"]


def log(what):
    if os.environ.get("FAKE_LOG"):
        with open(os.environ["FAKE_LOG"], "a") as file:
            file.write(f"{what} {name}\n")


def say(**event):
    print(json.dumps(event), flush=True)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/v1/models":
            self.wfile.write(b'{"data":[{"id":"fake"}]}')
        if self.path == "/ready":
            counts = map(int, os.environ.get("FAKE_READY", "99,99,9801").split(","))
            names = ("prefill_nodes", "decode_nodes", "usable_pairs")
            self.wfile.write(json.dumps(dict(zip(names, counts))).encode())
        if self.path == "/metrics":
            self.wfile.write(b'baton_kv_blocks{state="free"} 40\nbaton_kv_blocks{state="active"} 2\n')

    def log_message(self, *_):
        pass


log("start")
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
address = f"127.0.0.1:{server.server_address[1]}"
if os.environ.get("FAKE_DIE") == name:
    print("first complaint", file=sys.stderr)
    print("the model file is broken", file=sys.stderr)
    sys.exit(7)
if role == "coordinator":
    say(event="listening", role=role, name=name, http=address, control="127.0.0.1:1")
else:
    assert flags["coordinators"] == "127.0.0.1:1", flags
    say(event="listening", role=role, name=name, address=address)
if os.environ.get("FAKE_SILENT") != name:
    say(event="ready", role=role, name=name)
print("serving", file=sys.stderr, flush=True)
if os.environ.get("FAKE_LEAVE") == name:
    sys.exit(0)
sys.stdin.read()
log("drain")
if os.environ.get("FAKE_STUBBORN") == name:
    threading.Event().wait()
