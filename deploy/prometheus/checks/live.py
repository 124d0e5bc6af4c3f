"""The checks against a running cluster: a real Prometheus scrapes it with our configuration and answers every query."""

import json
import math
import re
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import yaml

from . import promql, queries
from .expected import PENDING, QUIET

PROMETHEUS_YML = queries.DEPLOY / "prometheus/prometheus.yml"
REPOSITORY = queries.DEPLOY.parent
# Until every target was scraped this often: a rate needs two samples, the rules one more round.
SCRAPES = 4
WAIT_S_MAX = 40
# Labels that a scrape adds, and the names Prometheus makes itself.
TARGET_LABELS = {"job", "instance", "node", "role"}
OWN_METRICS = {"up", "ALERTS"}


def failures(prometheus, processes, url, log):
    """`processes`: dictionaries with name, role and address. Sends requests to `url` meanwhile; both lanes need some."""
    with tempfile.TemporaryDirectory(prefix="baton-prometheus-") as folder, load(url) as sent:
        config = Path(folder) / "prometheus.yml"
        config.write_text(yaml.safe_dump(configuration(processes)))
        with running(prometheus, config, folder, log) as server:
            server.wait_for_scrapes(len(processes))
            found = check(server, processes)
    if sent["failed"]:
        found.append(f"{sent['failed']} of {sent['failed'] + sent['ok']} requests failed, first: {sent['error']}")
    if not found:
        print(f"ok: {sent['ok']} requests sent meanwhile")
    return found


def configuration(processes):
    """Ours, with the cluster's addresses, each second, so that a short run has enough samples."""
    config = yaml.safe_load(PROMETHEUS_YML.read_text())
    config["global"].update(scrape_interval="1s", scrape_timeout="1s", evaluation_interval="1s")
    config["rule_files"] = [str(path) for path in queries.RULES]
    for job in config["scrape_configs"]:
        role = job["job_name"].removeprefix("baton-")
        # Nodes that do both phases are decode nodes to Prometheus.
        mine = [p for p in processes if p["role"] == role or (role == "decode" and p["role"] not in ("coordinator", "prefill"))]
        has_names = "labels" in job["static_configs"][0]
        job["static_configs"] = [
            {"targets": [p["address"]]} | ({"labels": {"node": p["name"], "role": role}} if has_names else {}) for p in mine
        ]
    return config


class Server:
    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path, **query):
        address = f"{self.url}{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as refused:
            raise ValueError(json.load(refused)["error"]) from refused

    def query(self, expr, **options):
        data = self.get("/api/v1/query", query=expr, **options)
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(series["metric"], float(series["value"][1])) for series in data["result"]]

    def wait_for_scrapes(self, targets):
        ends = time.monotonic() + WAIT_S_MAX
        while True:
            try:
                scraped = [value for _, value in self.query("sum_over_time(up[5m])")]
                # The rules' own rounds begin at a moment of their group's within a second.
                if len(scraped) == targets and min(scraped) >= SCRAPES:
                    return
                seen = f"{len(scraped)} of {targets} targets, scraped {scraped} times"
            except (OSError, ValueError) as error:
                seen = str(error)
            if time.monotonic() > ends:
                raise RuntimeError(f"not scraped often enough within {WAIT_S_MAX} s: {seen}")
            time.sleep(0.2)


@contextmanager
def running(prometheus, config, folder, log):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [prometheus, f"--config.file={config}", f"--storage.tsdb.path={folder}/data", "--log.level=warn"]
    words.append(f"--web.listen-address=127.0.0.1:{port}")
    with open(log, "w") as output:
        server = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield Server(port)
    except RuntimeError as error:
        raise RuntimeError(f"{error}\nPrometheus said: {Path(log).read_text()[-2000:]}") from error
    finally:
        server.terminate()
        server.wait(timeout=20)


@contextmanager
def load(url):
    """Two clients, one for each lane, that send one short request after another until the block ends."""
    stop, sent = threading.Event(), {"ok": 0, "failed": 0, "error": None}
    with urllib.request.urlopen(url + "/v1/models", timeout=10) as answer:
        model = json.load(answer)["data"][0]["id"]

    def client(lane):
        number = 0
        while not stop.is_set():
            number += 1
            body = {"model": model, "prompt": f"{lane} {number}: Once upon a time", "max_tokens": 6, "stream": True}
            headers = {"content-type": "application/json", "x-lane": lane}
            request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    answer.read()
                sent["ok"] += 1
            except OSError as error:
                sent["failed"] += 1
                sent["error"] = sent["error"] or f"{lane}: {error}"
            stop.wait(0.1)

    clients = [threading.Thread(target=client, args=(lane,)) for lane in ("interactive", "batch")]
    for thread in clients:
        thread.start()
    try:
        yield sent
    finally:
        stop.set()
        for thread in clients:
            thread.join()


def check(server, processes):
    found = rule_health(server)
    known = Known(server, processes)
    for query in queries.all_queries():
        try:
            series = server.query(query.expr)
        except ValueError as error:
            found.append(f"{query}: {error}")
            continue
        selectors, groupings = promql.read(query.expr)
        wrong = known.wrong(selectors, groupings)
        if not wrong and not series and query.kind != "alert" and not any(known.may_be_absent(s.metric) for s in selectors):
            wrong = ["returns nothing"]
        if query.kind == "keda":
            wrong += one_number(server, query, series)
        found += [f"{query}: {text}" for text in wrong]
    paging = [labels for labels, _ in server.query('ALERTS{severity="page"}')]
    found += [f"alert on a healthy cluster: {labels}" for labels in without_cause(paging, missed(server))]
    landed = sorted(set(PENDING) & known.names)
    if landed:
        print(f"note: no longer pending, delete from deploy/prometheus/checks/expected.py: {', '.join(landed)}")
    if not found:
        print(f"ok: {len(queries.all_queries())} queries against {len(processes)} scraped processes")
    return found


def missed(server):
    """(SLO, lane) of the requests that missed their SLO meanwhile, by the raw counters: the rules are what is checked."""
    count = "sum by (slo, lane) (max_over_time({0}[5m]) - min_over_time({0}[5m]))"
    total, good = (
        {(labels["slo"], labels["lane"]): value for labels, value in server.query(count.format(metric))}
        for metric in ("baton_slo_total", "baton_slo_good_total")
    )
    return {key for key, value in total.items() if value > good.get(key, 0)}


def without_cause(alerts, missed):
    """The alerts that nothing explains. A slow machine misses an SLO, and then the alert that says so is right."""
    late = [labels for labels in alerts if (labels.get("slo"), labels.get("lane")) in missed]
    for labels in late:
        missed_what = f"requests of lane {labels['lane']} missed the SLO {labels['slo']}"
        print(f"note: {labels['alertname']} is {labels['alertstate']}: {missed_what}")
    return [labels for labels in alerts if labels not in late]


def rule_health(server):
    groups = server.get("/api/v1/rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    found = [f"rule {rule['name']}: {rule['lastError']}" for rule in rules if rule["health"] == "err"]
    if len(rules) != len(list(queries.rules())):
        found.append(f"Prometheus has {len(rules)} rules, the files {len(list(queries.rules()))}")
    return found


def one_number(server, query, series):
    """KEDA wants exactly one number, on an idle cluster and without any data too. An hour ago there was nothing."""
    found = []
    for when, result in (("now", series), ("without data", server.query(query.expr, time=time.time() - 3600))):
        if len(result) != 1 or not math.isfinite(result[0][1]):
            found.append(f"{when} it is not one finite number: {result}")
    return found


class Known:
    """Which metrics and labels there are: what the processes say they export, and what was scraped of it."""

    def __init__(self, server, processes):
        self.server = server
        self.names = set(server.get("/api/v1/label/__name__/values"))
        self.recorded = {rule["record"]: rule["expr"] for rule in queries.rules() if "record" in rule}
        self.declared = set()
        for process in processes:
            with urllib.request.urlopen(f"http://{process['address']}/metrics", timeout=10) as answer:
                declared = re.findall(r"(?m)^# TYPE (\S+) counter$", answer.read().decode())
            self.declared.update(name + "_total" for name in declared)

    def may_be_absent(self, metric):
        if metric in self.recorded:
            return any(self.may_be_absent(s.metric) for s in promql.read(self.recorded[metric])[0])
        # A quiet counter's first event gives it one sample, of which a rate shows nothing either.
        return metric in QUIET or (metric in PENDING and metric not in self.names)

    def labels(self, selector):
        """(labels its series can have, complaint)"""
        metric = selector.metric
        series = self.server.query(str(selector))
        if series:
            return set().union(*(labels for labels, _ in series)), None
        if metric in self.recorded:
            read, groupings = promql.read(self.recorded[metric])
            excused = self.may_be_absent(metric)
            inherited = set().union(*(self.labels(s)[0] for s in read)) if not groupings else groupings
            return inherited, None if excused else f"{selector}: recorded, but without a series"
        if metric in PENDING and metric not in self.names:
            return PENDING[metric] | TARGET_LABELS, None
        if metric in QUIET:
            return QUIET[metric][0] | TARGET_LABELS, self.undeclared(metric)
        if metric in OWN_METRICS:
            return TARGET_LABELS, None
        if metric in self.names:
            return set(), f"{selector}: the metric is there, but no series has these labels"
        return set(), f"{metric}: no process exports it"

    def undeclared(self, metric):
        """A quiet counter: its name must at least stand in the exposition's types, or in the source that makes it."""
        labels, path = QUIET[metric]
        source = REPOSITORY / path
        if metric in self.declared or not source.exists():
            return None
        text = source.read_text()
        name = metric.removesuffix("_total")
        missing = [label for label in labels if not re.search(rf"\b{label}\b", text)]
        if f'"{name}"' not in text or missing:
            return f"{metric}: {path} does not declare it with {sorted(labels)}"
        return None

    def wrong(self, selectors, groupings):
        found, all_labels = [], set()
        for selector in selectors:
            labels, complaint = self.labels(selector)
            all_labels |= labels
            if complaint:
                found.append(complaint)
                continue
            unknown = {label for label, _, _ in selector.matchers} - labels - {"le"}
            found += [f"{selector}: no label {label}" for label in sorted(unknown)]
        unknown = groupings - all_labels - {"le"}
        return found + ([] if found else [f"groups by {label}, which no series has" for label in sorted(unknown)])
