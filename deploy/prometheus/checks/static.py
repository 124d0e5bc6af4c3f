"""The checks that need no cluster: promtool's own, and that every alert is documented and tested both ways."""

import re
import subprocess

import yaml

from . import queries

PROMETHEUS = queries.DEPLOY / "prometheus"
README = queries.DEPLOY / "README.md"
TESTS = sorted((PROMETHEUS / "tests").glob("*.yml"))
SEVERITIES = {"page", "ticket", "warning"}


def failures(promtool):
    """Lines about what is wrong; none when all is well."""
    found = []
    for words in (
        ["check", "config", PROMETHEUS / "prometheus.yml"],
        ["check", "rules", *queries.RULES],
        ["test", "rules", *TESTS],
    ):
        done = subprocess.run([promtool, *words], capture_output=True, text=True)
        # promtool can say FAILED and exit with 0 when only its lint fails.
        if done.returncode or "FAILED" in done.stdout + done.stderr:
            found.append(f"promtool {words[0]} {words[1]}:\n{done.stdout}{done.stderr}")
        else:
            print(f"ok: promtool {words[0]} {words[1]}, {len(words) - 2} file(s)")
    alerts = [rule for rule in queries.rules() if "alert" in rule]
    found += documented(alerts) + tested(alerts)
    if not found:
        print(f"ok: {len(alerts)} alerts are labelled, documented, and fire and clear in a test")
    return found


def documented(alerts):
    readme = README.read_text()
    anchors = set(re.findall(r'<a id="(\w+)"></a>', readme))
    found = []
    for alert in alerts:
        name = alert["alert"]
        if alert.get("labels", {}).get("severity") not in SEVERITIES:
            found.append(f"alert {name}: severity is none of {sorted(SEVERITIES)}")
        for field in ("summary", "description", "runbook_url"):
            if not alert.get("annotations", {}).get(field):
                found.append(f"alert {name}: no annotation {field}")
        link = f"deploy/README.md#{name.lower()}"
        if alert["annotations"].get("runbook_url") != link:
            found.append(f"alert {name}: runbook_url is not {link}")
        if name.lower() not in anchors:
            found.append(f'alert {name}: deploy/README.md has no row with <a id="{name.lower()}"></a>')
    gone = anchors - {alert["alert"].lower() for alert in alerts}
    return found + [f"deploy/README.md has a row for an alert that is gone: {name}" for name in sorted(gone)]


def tested(alerts):
    """Every alert, in every lane it exists for, fires in some test and is quiet later in the same one."""
    fires_and_clears = set()
    for path in TESTS:
        for group in yaml.safe_load(path.read_text())["tests"]:
            steps = sorted(group.get("alert_rule_test", []), key=lambda step: seconds(step["eval_time"]))
            fired = {}
            for step in steps:
                name = step["alertname"]
                for expected in step["exp_alerts"]:
                    fired.setdefault(name, set()).add(expected["exp_labels"].get("lane"))
                if not step["exp_alerts"]:
                    fires_and_clears.update((name, lane) for lane in fired.pop(name, ()))
    wanted = {(alert["alert"], alert["labels"].get("lane")) for alert in alerts}
    names = {name for name, _ in fires_and_clears}
    # An alert without a lane of its own may carry one from its series.
    missing = [(n, lane) for n, lane in wanted if (n, lane) not in fires_and_clears and (lane or n not in names)]
    return [f"alert {n} ({lane or 'no lane'}): no test in which it fires and then clears" for n, lane in sorted(missing, key=str)]


def seconds(text):
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([smhd])", text))
