"""The operating kit in deploy/, as its users have it: the real promtool, a real Prometheus, a running cluster.

BATON_UP_JSON names a file with what `baton up --json` printed for the cluster at BATON_BASE_URL: Prometheus needs the
addresses of its nodes too. scripts/test sets both.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
# Of one command; the whole file takes less than a minute.
SECONDS_MAX = 120


@pytest.fixture(scope="module")
def tools():
    """Environment that names promtool and prometheus: those in PATH, else Debian's, fetched into target/."""
    found = {"PROMTOOL": shutil.which("promtool"), "PROMETHEUS": shutil.which("prometheus")}
    if not all(found.values()):
        target = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))
        fetched = run([REPOSITORY / "scripts/get-prometheus", target / "prometheus"])
        if fetched.returncode:
            pytest.fail(
                "promtool and prometheus are not in PATH and could not be fetched, so the kit was NOT checked. "
                f"scripts/get-prometheus said:\n{fetched.stderr}"
            )
        found = {name.upper(): path for name, path in (line.split("=", 1) for line in fetched.stdout.splitlines())}
    return os.environ | found


@pytest.fixture(scope="module")
def up_json():
    path = os.environ.get("BATON_UP_JSON")
    if not path:
        pytest.fail("BATON_UP_JSON is not set: give the file with what `baton up --json` printed, or run scripts/test")
    started = json.loads(Path(path).read_text().splitlines()[0])
    base = os.environ.get("BATON_BASE_URL", "").rstrip("/").removesuffix("/v1")
    assert started["url"] == base, "BATON_UP_JSON is about another cluster than BATON_BASE_URL"
    return path


@pytest.fixture(scope="module")
def dashboard():
    return json.loads((DEPLOY / "grafana/baton.json").read_text())


def run(words, **options):
    return subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=SECONDS_MAX, **options)


def check(deploy, *words, env):
    return run([sys.executable, deploy / "prometheus/check", *words], env=env)


# ---- prometheus ---------------------------------------------------------------------------------------------------


def test_every_rule_and_query_works_on_this_cluster(tools, up_json):
    done = check(DEPLOY, "--up", up_json, env=tools)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("ok: promtool check config", "ok: promtool check rules", "ok: promtool test rules"):
        assert line in done.stdout


def test_the_check_finds_what_is_wrong(tools, up_json, tmp_path):
    """In a copy: a metric, a label, a label's value and a grouping that do not exist, a syntax error, and KEDA's NaN."""
    deploy = tmp_path / "deploy"
    shutil.copytree(DEPLOY, deploy)
    broken = [
        ("prometheus/rules/alerts.yml", "baton_pair_up == 0", "baton_pair_upp == 0"),
        ("prometheus/rules/alerts.yml", 'baton_queue_requests{lane="batch"}', 'baton_queue_requests{lain!="batch"}'),
        ("prometheus/rules/alerts.yml", 'role="decode",state="ready"', 'role="decode",state="redy"'),
        ("prometheus/rules/recording.yml", "sum by (le, lane) (rate(baton_itl", "sum by (le, line) (rate(baton_itl"),
        ("grafana/baton.json", "vector($ttft_slo)", "vector($ttft_sloo)"),
        ("keda/decode.yaml", 'rate(baton_itl_seconds_bucket{lane="interactive"}[2m]))) >= 0) or vector(0)', "x[2m]))))"),
    ]
    for path, old, new in broken:
        text = (deploy / path).read_text()
        assert text.count(old) == 1, f"{path}: {old}"
        (deploy / path).write_text(text.replace(old, new))
    # promtool has nothing to say to most of these; the real Prometheus has.
    done = check(deploy, "--up", up_json, env=tools | {"PROMTOOL": "/bin/true"})
    assert done.returncode == 1, done.stdout + done.stderr
    for name in ("baton_pair_upp", "lain", "redy", "line", "Time to first token, D", "itl-p99-seconds"):
        assert any(name in line for line in done.stderr.splitlines() if line.startswith("FAILED")), (name, done.stderr)


def test_an_slo_alert_needs_requests_that_missed_it():
    """The two cores of a test machine are sometimes too slow for an SLO. That is no mistake in the kit."""
    burn = {"alertname": "BatonSloBurnPage", "alertstate": "pending", "slo": "chat", "lane": "interactive"}
    pair = {"alertname": "BatonPairDown", "alertstate": "firing"}
    sys.path.insert(0, str(DEPLOY / "prometheus"))
    try:
        from checks import live
    finally:
        sys.path.pop(0)
    assert live.without_cause([burn, pair], {("chat", "interactive")}) == [pair]
    assert live.without_cause([burn], {("chat", "batch"), ("code", "interactive")}) == [burn]


def test_the_unit_tests_can_fail(tools, tmp_path):
    """In a copy: a threshold, a duration and a link that are wrong, each in one alert."""
    deploy = tmp_path / "deploy"
    shutil.copytree(DEPLOY, deploy)
    alerts = deploy / "prometheus/rules/alerts.yml"
    text = alerts.read_text()
    for old, new in [
        ('rate1h{lane="batch"} > 14.4', 'rate1h{lane="batch"} > 144'),
        ("for: 30s\n        labels: { severity: warning, lane: batch }", "for: 5m\n        labels: { severity: warning, lane: batch }"),
        ("#batonpairdown", "#gone"),
    ]:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    alerts.write_text(text)
    done = check(deploy, env=tools)
    assert done.returncode == 1, done.stdout + done.stderr
    for blamed in ("BatonSloBurnPage", "BatonQueueLong", "BatonPairDown: runbook_url"):
        assert blamed in done.stderr, (blamed, done.stderr)


def test_a_missing_promtool_is_no_pass(tools):
    env = {name: value for name, value in tools.items() if name not in ("PROMTOOL", "PROMETHEUS")}
    done = check(DEPLOY, env=env | {"PATH": "/nonexistent"})
    assert done.returncode == 4, done.stdout + done.stderr
    assert "NOTHING WAS CHECKED" in done.stderr and "scripts/get-prometheus" in done.stderr


def test_the_scrape_configuration_is_about_the_local_one():
    jobs = {job["job_name"]: job["static_configs"][0] for job in load("prometheus/prometheus.yml")["scrape_configs"]}
    assert set(jobs) == {"baton-coordinator", "baton-prefill", "baton-decode"}
    for role in ("coordinator", "prefill", "decode"):
        process = tomllib.loads((DEPLOY / f"local/{role}.toml").read_text())
        assert jobs[f"baton-{role}"]["targets"] == [process["listen"]]
        if role != "coordinator":
            assert jobs[f"baton-{role}"]["labels"] == {"node": process["name"], "role": role}


def load(path):
    return yaml.safe_load((DEPLOY / path).read_text())


# ---- grafana ------------------------------------------------------------------------------------------------------


def test_the_dashboard_is_whole(dashboard):
    panels = dashboard["panels"]
    assert dashboard["schemaVersion"] >= 38, "Grafana 10"
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert {variable["name"] for variable in dashboard["templating"]["list"]} >= {"datasource", "lane", "node"}
    for panel in panels:
        if panel["type"] == "row":
            continue
        assert panel["title"] and panel["description"], panel["title"]
        for part in (panel, *panel["targets"]):
            assert part["datasource"]["uid"] == "${datasource}", panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert refs and len(set(refs)) == len(refs), panel["title"]


def test_panels_do_not_overlap(dashboard):
    for panel in dashboard["panels"]:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24, panel["title"]
    for one, other in itertools.combinations(dashboard["panels"], 2):
        a, b = one["gridPos"], other["gridPos"]
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"] or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart, (one["title"], other["title"])


def test_the_dashboard_is_in_the_order_of_a_request(dashboard):
    rows, first = [], []
    for panel in sorted(dashboard["panels"], key=lambda panel: (panel["gridPos"]["y"], panel["gridPos"]["x"])):
        if panel["type"] == "row":
            rows.append(panel["title"].split()[0].rstrip(":").lower())
        elif len(rows) == 1:
            first.append(panel)
    assert rows == ["promise", "prefill", "decode", "kv", "kv", "requests"]
    assert [panel["type"] for panel in first] == ["timeseries", "timeseries", "gauge", "heatmap"]
    assert [target["legendFormat"] for target in first[0]["targets"]] == ["P99", "P95", "P50", "SLO"]


# ---- keda and otel ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_scaled_object_is_what_keda_takes(role):
    scaled = load(f"keda/{role}.yaml")
    assert (scaled["apiVersion"], scaled["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    spec = scaled["spec"]
    assert spec["scaleTargetRef"]["name"] == scaled["metadata"]["name"] == f"baton-{role}"
    assert (spec["minReplicaCount"], spec["maxReplicaCount"], spec["pollingInterval"]) == (2, 80, 15)
    assert "cooldownPeriod" not in spec and "fallback" not in spec
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleUp"]["stabilizationWindowSeconds"] == 30
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] == 120
    names = [trigger["name"] for trigger in spec["triggers"]]
    assert len(set(names)) == len(names)
    for trigger in spec["triggers"]:
        metadata = trigger["metadata"]
        assert trigger["type"] == "prometheus" and "metricName" not in metadata
        assert metadata["serverAddress"].startswith("http") and float(metadata["threshold"]) > 0
        # Only a count is shared out over the replicas; latencies and ratios are compared as they are.
        expected = "AverageValue" if trigger["name"] == "waiting-per-node" else "Value"
        assert trigger["metricType"] == expected
        assert "vector(0)" in metadata["query"], "a number when idle"
    assert "waiting-per-node" in names and len(names) > 1


def test_the_collector_is_wired_up():
    collector = load("otel/collector.yaml")
    service = collector["service"]
    assert set(collector["receivers"]["otlp"]["protocols"]) == {"grpc", "http"}
    pipeline = service["pipelines"]["traces"]
    for kind in ("receivers", "processors", "exporters"):
        assert set(pipeline[kind]) == set(collector[kind]), f"{kind}: defined and used are the same"
    assert set(service["extensions"]) == set(collector["extensions"])
    order = pipeline["processors"]
    assert order[0] == "memory_limiter" and order[-1] == "batch"
    assert order.index("filter/probes") < order.index("tail_sampling")
    conditions = " ".join(collector["processors"]["filter/probes"]["traces"]["span"])
    assert all(path in conditions for path in ("health", "ready", "metrics"))
    policies = {policy["type"]: policy for policy in collector["processors"]["tail_sampling"]["policies"]}
    assert policies["status_code"]["status_code"] == {"status_codes": ["ERROR"]}
    assert {"latency", "ottl_condition", "probabilistic"} <= set(policies)
    for policy in policies.values():
        assert policy["type"] in policy, f"{policy['name']} has no settings of its type"
