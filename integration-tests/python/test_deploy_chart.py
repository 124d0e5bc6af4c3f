"""The chart deploy/helm/baton: rendered by helm, and what comes out held against Kubernetes' schemas, against baton, and against itself.

BATON_BIN names the `baton` that the chart is for. helm and the schemas come from scripts/get-helm and scripts/get-kubernetes-schemas.
"""

import functools
import itertools
import json
import re
import tomllib
from pathlib import Path

import jsonschema
import pytest
import referencing
import yaml
from deploy_files import DEPLOY, REPOSITORY, ROLES, assert_pinned, baton, clean, configuration, fetched, flags, joins, load, port, ports, run, version

CHART = DEPLOY / "helm/baton"
EXAMPLES = ("cpu-dev", "1p1d", "2p1d", "colocated", "gpu")
# The oldest that the chart is for, and the newest that there are schemas of.
KUBERNETES = ("1.30", "1.37")
# Objects of the Prometheus operator; there is no package with its schemas.
NO_SCHEMA = {"PodMonitor"}
# What a process needs beside its KV memory: the example model, its threads, and requests.
BESIDE_KV_BYTES = 256 << 20

pytestmark = pytest.mark.helm


def helm(*words):
    return run(fetched("helm")["helm"], *words)


def values_file(name):
    return CHART / ("values.yaml" if name == "values" else f"examples/{name}.yaml")


@functools.cache
def rendered(name, *settings):
    """The objects that a release called `baton` in the namespace `baton` has."""
    words = [word for setting in settings for word in ("--set-json", setting)]
    done = helm("template", "baton", CHART, "--namespace", "baton", "--values", values_file(name), *words)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def of_kind(objects, *kinds):
    return {each["metadata"]["name"]: each for each in objects if each["kind"] in kinds}


def pods(objects):
    """{role: (workload, pod)}."""
    found = {}
    for workload in of_kind(objects, "Deployment", "StatefulSet").values():
        found[workload["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]] = (workload, workload["spec"]["template"])
    return found


def selects(selector, labels):
    for rule in selector.get("matchExpressions", []):
        assert rule["operator"] == "In"
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return (selector.get("matchLabels") or {}).items() <= labels.items()


# A prefill and a decode pod of one host that move KV by cuda-ipc: no example, since they give up what keeps pods apart.
ONE_HOST = (
    'prefill.config={"device": "cuda:0", "transports": ["cuda-ipc", "grpc"]}',
    'decode.config={"device": "cuda:1", "transports": ["cuda-ipc", "grpc"]}',
    'gpuTransports.cudaIpc={"hostNamespaces": true, "secretName": "baton-kv"}',
    "networkPolicy.enabled=false",
)


every_example = pytest.mark.parametrize("name", ("values", *EXAMPLES))


# ---- helm and Kubernetes ------------------------------------------------------------------------------------------


@every_example
def test_helm_takes_the_chart(name):
    done = helm("lint", "--strict", CHART, "--values", values_file(name))
    assert done.returncode == 0 and "0 chart(s) failed" in done.stdout, done.stdout + done.stderr
    chart = load("helm/baton/Chart.yaml")
    assert chart["appVersion"] == version()
    kinds = {each["kind"] for each in rendered(name)}
    assert kinds >= {"Deployment", "StatefulSet", "Service", "ConfigMap", "PodDisruptionBudget", "NetworkPolicy", "Pod"}


@pytest.mark.parametrize(
    "setting, complaint",
    [
        ("coordinator.replicaz=3", "replicaz"),
        ("prefill.replicas=0", "replicas"),
        ('prefill.config={"listen": "0.0.0.0:1"}', "listen"),
        ('prefill.config={"Max-Seqs": 1}', "Max-Seqs"),
        ('prefill.config={"reservation_ms_max": 1}', "reservation_ms_max"),
        ('coordinator.config={"kv_cache_memory": "1GiB"}', "kv_cache_memory"),
        ("decode.config.threads=0", "threads"),
        ('decode.config.kv_cache_memory="4Gi"', "kv_cache_memory"),
        ("prefill.drainSeconds=3601", "drainSeconds"),
        ("etcd.leaseSeconds=3601", "leaseSeconds"),
        ('decode.env=[{"name": "BATON_LISTEN", "value": "0.0.0.0:1"}]', "name"),
        ('decode.env=[{"name": "A", "valu": "b"}]', "valu"),
        ('decode.resources={"limit": {}}', "limit"),
        ('prefill.tolerations=[{"effect": "NoScheduling"}]', "effect"),
        ('model.volume={"persistentVolumeClame": {}}', "persistentVolumeClame"),
        ('model.pull="a model"', "pull"),
        ('image.tag="latest"', "tag"),
        ('image.digest="sha256:12"', "digest"),
        ('model.path="model.gguf"', "path"),
        ('etcd.endpoints=["etcd"]', "endpoints"),
        ('etcd.cluster="My Cluster"', "cluster"),
        ("podSecurityContext.runAsNonRoot=false", "runAsNonRoot"),
        ("decode.gpu.count=-1", "count"),
        ("decode.gpu.count=2", "count"),
        ("gpuTransports.nccl.ports.first=7000", "first"),
        ("gpuTransports.nccl.ports.last=50010", "nccl.ports"),
        ('prefill.config.transports=["nccl", "grpc"]', "prefill.gpu.count"),
        ("etcd.endpoints=[]", "needs etcd"),
        ("etcd.tls.clientCertificate=true", "secretName"),
        ("prefill.enabled=false", "co_located"),
        ('coordinator.keys.secretName="k"', "operatorSecretName"),
        ("compare.enabled=true", "two clusters"),
        ('compare={"enabled": true, "arms": [{"name": "a", "url": "http://a"}, {"name": "b", "url": "http://b"}]}', "compare.facts"),
        ('compare.shapes=["mooncake"]', "shapes"),
    ],
)
def test_wrong_values_are_refused(setting, complaint):
    done = helm("template", "baton", CHART, "--set-json", setting)
    assert done.returncode != 0 and complaint in done.stderr, done.stdout[:200] + done.stderr


@pytest.mark.parametrize(
    "name, settings, complaint",
    [
        ("gpu", ("decode.gpu.count=0",), "decode.gpu.count"),
        ("gpu", ('decode.config.device="cpu"',), "decode.gpu.count"),
        ("gpu", ('decode.config.transports=["grpc"]',), "only prefill"),
        ("gpu", ("gpuTransports.cudaIpc.hostNamespaces=true",), "hostNamespaces"),
        ("values", (*ONE_HOST, "gpuTransports.cudaIpc.hostNamespaces=false"), "hostNamespaces"),
        ("values", (*ONE_HOST, 'gpuTransports.cudaIpc.secretName=""'), "secretName"),
        ("values", (*ONE_HOST, "networkPolicy.enabled=true"), "networkPolicy"),
        ("values", (*ONE_HOST, "decode.gpu.count=1"), "decode.gpu.count"),
    ],
)
def test_senseless_values_of_gpus_are_refused(name, settings, complaint):
    words = [word for setting in settings for word in ("--set-json", setting)]
    done = helm("template", "baton", CHART, "--values", values_file(name), *words)
    assert done.returncode != 0 and complaint in done.stderr, done.stdout[:200] + done.stderr


def test_the_schema_is_one_and_knows_every_value():
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    validator = jsonschema.Draft7Validator(schema)
    assert not list(validator.iter_errors(load("helm/baton/values.yaml")))

    def resolve(part):
        for choice in [part, *part.get("allOf", [])]:
            if "$ref" in choice:
                name = choice["$ref"].rsplit("/", 1)[1]
                # Not every field of these has a value here.
                if name.startswith("kubernetes") or name.endswith("Config"):
                    return None
                choice = schema["definitions"][name]
            if "properties" in choice and not choice.get("additionalProperties", True):
                return choice["properties"]
        return None

    def compare(part, values, where):
        properties = resolve(part)
        if properties is not None:
            assert set(values) <= set(properties), where
            assert set(properties) - set(values) <= ({"global"} if not where else set()), f"{where}: a value without a default"
            for key, value in values.items():
                compare(properties[key], value, f"{where}.{key}")

    compare(schema, load("helm/baton/values.yaml"), "")


# Objects of the schema that take any key: Helm's own, one that each pool closes, and one of Prometheus' operator.
OPEN = {"properties/global", "definitions/pool/properties/config", "properties/podMonitor/properties/nodeTls"}
# Fields of Kubernetes' own types, whose content the API server checks.
OPEN_FIELDS = re.compile(r"definitions/kubernetes\w+/(items/)?properties/\w+(/items)?|definitions/env/items/properties/valueFrom/properties/\w+")


def test_the_schema_is_closed_at_each_level():
    """A key that is spelt wrong is refused wherever it stands."""
    found = set()

    def look(part, where):
        if isinstance(part, list):
            for number, each in enumerate(part):
                look(each, f"{where}/{number}")
        elif isinstance(part, dict):
            if part.get("type") == "object" and "additionalProperties" not in part:
                found.add(where)
            for key, each in part.items():
                look(each, f"{where}/{key}".lstrip("/"))

    look(json.loads((CHART / "values.schema.json").read_text()), "")
    open_fields = {where for where in found if OPEN_FIELDS.fullmatch(where)}
    assert found - open_fields == OPEN and len(open_fields) > 10


@functools.cache
def schemas(kubernetes):
    """(validators' registry, {(apiVersion, kind): name of the file})."""
    folder = Path(fetched("kubernetes-schemas", *KUBERNETES)["schemas"]) / kubernetes

    def retrieve(uri):
        return referencing.Resource.from_contents(json.loads((folder / uri.rsplit("/", 1)[1]).read_text()), referencing.jsonschema.DRAFT202012)

    return folder, referencing.Registry(retrieve=retrieve)


def schema_errors(kubernetes, each):
    folder, registry = schemas(kubernetes)
    path = folder / f"{each['kind'].lower()}-{each['apiVersion'].replace('.k8s.io', '').replace('/', '-')}.json"
    assert path.exists(), f"Kubernetes {kubernetes} has no {each['apiVersion']} {each['kind']}"
    validator = jsonschema.Draft202012Validator(json.loads(path.read_text()), registry=registry)
    return [f"{each['kind']} {each['metadata']['name']} {error.json_path}: {error.message}" for error in validator.iter_errors(each)]


# Definitions of the chart's schema that close Kubernetes' own types.
KUBERNETES_TYPES = {
    "kubernetesVolume": "volume-v1",
    "kubernetesResources": "resourcerequirements-v1",
    "kubernetesTolerations": "toleration-v1",
    "kubernetesAffinity": "affinity-v1",
    "kubernetesPeers": "networkpolicypeer-networking-v1",
    "kubernetesPodSecurityContext": "podsecuritycontext-v1",
}


@pytest.mark.kubernetes_schemas
def test_the_chart_knows_fields_that_kubernetes_has():
    definitions = json.loads((CHART / "values.schema.json").read_text())["definitions"]
    assert set(KUBERNETES_TYPES) == {name for name in definitions if name.startswith("kubernetes")}
    folder, _ = schemas(KUBERNETES[-1])
    for name, file in KUBERNETES_TYPES.items():
        ours = definitions[name].get("items", definitions[name])["properties"]
        assert set(ours) <= set(json.loads((folder / f"{file}.json").read_text())["properties"]), name


ALL_ON = (
    "prefill.gpu.count=1",
    "decode.rdma.count=2",
    'decode.gpu.runtimeClassName="nvidia"',
    "network.ipv6=true",
    "decode.autoscaled=true",
    'networkPolicy.clients=[{"podSelector": {}}]',
    'coordinator.service.annotations={"a": "b"}',
    'imagePullSecrets=[{"name": "registry"}]',
    'decode.env=[{"name": "RUST_LOG", "value": "debug"}]',
    'prefill.tolerations=[{"key": "gpu", "operator": "Exists"}]',
    'coordinator.priorityClassName="high"',
    'tls.issuer="baton-ca"',
    'coordinator.tls.secretName="baton-api"',
    'coordinator.keys={"secretName": "baton-keys", "operatorSecretName": "baton-operator"}',
)


@pytest.mark.kubernetes_schemas
@pytest.mark.parametrize("kubernetes", KUBERNETES)
@pytest.mark.parametrize("name, settings", [*((name, ()) for name in ("values", *EXAMPLES)), ("2p1d", ALL_ON), ("values", ONE_HOST)])
def test_kubernetes_takes_every_object(name, settings, kubernetes):
    objects = [each for each in rendered(name, *settings) if each["kind"] not in NO_SCHEMA]
    assert len(objects) > 8
    assert not [error for each in objects for error in schema_errors(kubernetes, each)]
    assert KUBERNETES[0] in load("helm/baton/Chart.yaml")["kubeVersion"]


@pytest.mark.kubernetes_schemas
def test_the_schemas_can_refuse():
    deployment = json.loads(json.dumps(of_kind(rendered("values"), "Deployment")["baton-coordinator"]))
    deployment["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    deployment["spec"]["replicas"] = "two"
    errors = " ".join(schema_errors(KUBERNETES[0], deployment))
    assert "livenessProb" in errors and "replicas" in errors


# ---- baton --------------------------------------------------------------------------------------------------------


def environment(pod):
    """A container's variables as Kubernetes makes them for one pod."""
    known = {"metadata.name": "pod-0", "status.podIP": "10.1.2.3", "username": "user", "password": "secret", "secret": "of both"}
    variables = {}
    for each in pod["spec"]["containers"][0]["env"]:
        source = each.get("valueFrom", {})
        text = each.get("value") or known[source.get("fieldRef", source.get("secretKeyRef", {})).get("fieldPath") or source["secretKeyRef"]["key"]]
        # Kubernetes knows only the variables above.
        variables[each["name"]] = re.sub(r"\$\((\w+)\)", lambda found: variables[found.group(1)], text)
    return variables


def settings_of(objects, role, tmp_path):
    """What the process of a role would run with."""
    _, pod = pods(objects)[role]
    container = pod["spec"]["containers"][0]
    [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == "config"]
    [volume] = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "config"]
    file = tmp_path / f"{role}.toml"
    file.write_text(of_kind(objects, "ConfigMap")[volume["configMap"]["name"]]["data"][mount["subPath"]])
    verb, *words = container["args"]
    assert verb == f"serve-{role}" and words == ["--config", mount["mountPath"]]
    return configuration(role, ["--config", file], environment(pod))


@every_example
def test_baton_takes_its_configuration(name, tmp_path):
    objects = rendered(name)
    values = functools.reduce(lambda one, other: one | other, [load("helm/baton/values.yaml"), yaml.safe_load(values_file(name).read_text())])
    found = {role: settings_of(objects, role, tmp_path) for role in pods(objects)}
    for role, settings in found.items():
        assert settings["name"] == "pod-0" and port(settings["listen"]) == ports()[role]
        assert settings["model"] == (values["model"].get("pull") or values["model"]["path"])
        if role != "coordinator":
            assert settings["advertise"] == f"10.1.2.3:{ports()[role]}"
    coordinator = found.pop("coordinator")
    assert port(coordinator["control_listen"]) == 7400
    joined = {joins(settings) for settings in found.values()}
    if values["etcd"]["endpoints"]:
        assert joined == {coordinator["membership"]} and coordinator["control_advertise"] == "10.1.2.3:7400"
    else:
        service = of_kind(objects, "Service")["baton-control"]
        assert joined == {"baton-control:7400"} and service["spec"]["publishNotReadyAddresses"]
        assert pods(objects)["coordinator"][0]["spec"]["strategy"]["type"] == "Recreate"
        assert coordinator["membership"] == "embedded"


def test_etcd_with_password_and_files():
    objects = rendered("2p1d")
    address = "etcds://user:secret@etcd-0.etcd:2379,etcd-1.etcd:2379,etcd-2.etcd:2379/baton?lease_s=10&ca={0}/ca.crt&cert={0}/tls.crt&key={0}/tls.key"
    for role, (_, pod) in pods(objects).items():
        variables = environment(pod)
        assert variables["BATON_MEMBERSHIP" if role == "coordinator" else "BATON_COORDINATORS"] == address.format("/etc/baton/etcd-tls")
        mounts = {mount["mountPath"]: mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
        [secret] = [volume["secret"] for volume in pod["spec"]["volumes"] if volume["name"] == mounts["/etc/baton/etcd-tls"]]
        assert secret["secretName"] == "baton-etcd-tls"
    assert "secret@" not in (CHART / "values.yaml").read_text()


def bytes_of(text):
    number, unit = re.fullmatch(r"(\d+)(MiB|GiB|Mi|Gi)", text).groups()
    return int(number) << {"M": 20, "G": 30}[unit[0]]


@every_example
def test_pods_outlive_their_drain_and_hold_their_kv(name, tmp_path):
    objects = rendered(name)
    for role, (_, pod) in pods(objects).items():
        settings, container = settings_of(objects, role, tmp_path), pod["spec"]["containers"][0]
        pre_stop = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        # 10 s are for the goodbye. To the millisecond, since 30 for 30,000 would be a drain, too.
        assert pod["spec"]["terminationGracePeriodSeconds"] * 1000 == pre_stop * 1000 + settings["drain_ms_max"] + 10_000, role
        if role == "coordinator":
            assert pre_stop > 0, "a Service goes on sending for a moment"
        else:
            limit = bytes_of(container["resources"]["limits"]["memory"])
            assert bytes_of(settings["kv_cache_memory"]) + BESIDE_KV_BYTES <= limit, role
            assert settings["threads"] >= 1


# What the chart sets itself, by other values or from the pod, and an address for which its pods have no port.
SET_BY_THE_CHART = {"name", "listen", "advertise", "control_listen", "control_advertise", "coordinators", "membership", "model"} | {
    "served_model_name", "drain_ms_max", "admin_listen", "api_keys", "shm_direct_secret", "shared_weights",
    "tls_cert", "tls_key", "tls_ca", "insecure", "api_tls_cert", "api_tls_key"
}  # fmt: skip


def closed_config(role):
    schema = json.loads((CHART / "values.schema.json").read_text())
    return schema["definitions"][f"{role}Config"]["properties"], schema


@pytest.mark.parametrize("role", ROLES)
def test_the_chart_takes_the_keys_of_the_process(role):
    listed = re.findall(r"env:\s+BATON_(\w+)", run(baton(), f"serve-{role}", "--help").stdout)
    in_env = json.dumps(closed_config(role)[1]["definitions"]["env"])
    keys = {key.lower() for key in listed if f'"BATON_{key}"' not in in_env} - {"config"}
    assert set(closed_config(role)[0]) == keys - SET_BY_THE_CHART


# Also what is next to each bound, and what no key takes.
ODD_VALUES = (-1, 0, 1, 17, 1.5, 2**32 - 1, 2**32, True, False, "", "text", "1GiB", "1Gi", [], [""], ["text"], ["a b"], [1], {"a": 1})


@pytest.mark.parametrize("role", ROLES)
def test_what_the_chart_takes_the_process_takes(role, tmp_path):
    """The schema may be stricter than the process, and never more patient: an error belongs to `helm install`, not to a pod's log."""
    properties, schema = closed_config(role)
    taken = []
    for key, part in properties.items():
        part = schema["definitions"][part["$ref"].rsplit("/", 1)[1]] if "$ref" in part else part
        edges = [part[bound] + step for bound in ("minimum", "maximum") if bound in part for step in (-1, 0, 1)]
        names = part.get("enum", part.get("items", {}).get("enum", []))
        validator = jsonschema.Draft7Validator(part)
        for value in [*ODD_VALUES, *edges, *names, *([name] for name in names)]:
            if value is not None and validator.is_valid(value):
                taken.append((key, value))
    for key, value in taken:
        file = tmp_path / "one.toml"
        file.write_text(f"{key} = {json.dumps(value)}\n")
        done = run(baton(), f"serve-{role}", "--config", file, "--model", "any", "--print-config", env=clean({}))
        assert done.returncode == 0, f"the chart takes {key} = {value}: {done.stderr}"
    assert len(taken) > 2 * len(properties)


def test_names_of_slo_profiles_are_those_of_the_program():
    """Where no file of the user's has others."""
    config = closed_config("coordinator")[1]["definitions"]["coordinatorConfig"]
    names = re.search(r"\(([a-z|-]+)\)", config["then"]["properties"]["slo"]["items"]["pattern"]).group(1).split("|")
    source = (REPOSITORY / "coordinator/src/slo/config.rs").read_text().split("BUILT_IN")[1].split("];")[0]
    assert names == re.findall(r'"([a-z-]+)"', source)
    validator = jsonschema.Draft7Validator(config)
    assert validator.is_valid({"slo": ["lane:batch=mine"], "slo_config": "/etc/slo.toml"})
    assert not validator.is_valid({"slo": ["lane:batch=mine"]}) and validator.is_valid({"slo": ["model:a=rag"]})


def containers(objects):
    for each in objects:
        spec = each["spec"].get("template", each)["spec"] if each["kind"] in ("Pod", "Job", "Deployment", "StatefulSet") else {}
        yield from [*spec.get("initContainers", []), *spec.get("containers", [])]


@pytest.mark.parametrize("name, settings", [*((name, ()) for name in ("values", *EXAMPLES)), ("2p1d", ALL_ON), ("values", ONE_HOST)])
def test_every_flag_that_a_template_gives_exists(name, settings):
    started = [container["args"] for container in containers(rendered(name, *settings))]
    assert len(started) >= 3
    for verb, *words in started:
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= flags(verb), (verb, given - flags(verb))


def test_the_model_is_fetched_where_it_is_wanted():
    """By each pod, before its process starts, into the volume where the process finds it by its name."""
    for name, settings in (("cpu-dev", ()), ("1p1d", ('model.pull="org/name"', 'decode.env=[{"name": "HF_TOKEN", "value": "t"}]'))):
        for role, (_, pod) in pods(rendered(name, *settings)).items():
            [init] = pod["spec"]["initContainers"]
            assert init["args"][:2] == ["model", "pull"] and init["volumeMounts"] == [{"name": "models", "mountPath": "/models"}]
            assert init["image"] == pod["spec"]["containers"][0]["image"]
            config = of_kind(rendered(name, *settings), "ConfigMap")[f"baton-{role}"]["data"][f"{role}.toml"]
            assert tomllib.loads(config)["model"] == init["args"][2]
            own = {"emptyDir": {}} if name == "cpu-dev" else load("helm/baton/examples/1p1d.yaml")["model"]["volume"]
            assert mounted(pod)["/models"] == {"name": "models"} | own
            assert [each["name"] for each in init["env"]] == (["HF_TOKEN"] if name == "1p1d" and role == "decode" else [])
    image = (DEPLOY / "docker/Dockerfile").read_text()
    assert "BATON_CACHE_DIR=/models" in image and "python3-pip" in image
    assert all("initContainers" not in pod["spec"] for _, pod in pods(rendered("1p1d")).values())



# ---- itself -------------------------------------------------------------------------------------------------------


@every_example
def test_objects_find_each_other(name):
    objects = rendered(name)
    roles = pods(objects)
    labels = {role: pod["metadata"]["labels"] for role, (_, pod) in roles.items()}
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names)
    for role, (workload, pod) in roles.items():
        selector = workload["spec"]["selector"]
        assert [other for other in roles if selects(selector, labels[other])] == [role]
        if workload["kind"] == "StatefulSet":
            service = of_kind(objects, "Service")[workload["spec"]["serviceName"]]
            assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"].items() <= labels[role].items()
        for constraint in pod["spec"]["topologySpreadConstraints"]:
            assert [other for other in roles if selects(constraint["labelSelector"], labels[other])] == [role]
        assert {mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]} == {volume["name"] for volume in pod["spec"]["volumes"]}
    for kind, field in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        found = [[role for role in roles if selects(each["spec"][field], labels[role])] for each in of_kind(objects, kind).values()]
        assert sorted(found) == sorted([role] for role in roles), kind
    for service in of_kind(objects, "Service").values():
        [role] = [role for role in roles if service["spec"]["selector"].items() <= labels[role].items()]
        open_ports = {each["name"]: each["containerPort"] for each in roles[role][1]["spec"]["containers"][0]["ports"]}
        for each in service["spec"]["ports"]:
            assert each["port"] == open_ports[each["targetPort"]], service["metadata"]["name"]


@every_example
def test_pods_are_probed_where_they_answer(name):
    for role, (_, pod) in pods(rendered(name)).items():
        container = pod["spec"]["containers"][0]
        opened = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert opened.pop("http") == ports()[role]
        assert opened == ({"control": 7400} if role == "coordinator" else {})
        paths = {"startupProbe": "/health", "livenessProbe": "/health", "readinessProbe": "/ready"}
        assert {probe: container[probe]["httpGet"] for probe in paths} == {
            probe: {"path": path, "port": "http", "scheme": "HTTP"} for probe, path in paths.items()
        }
        # A pod that drains is not ready, but alive; loading takes longer than a liveness probe would wait.
        assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] >= 60


@pytest.mark.parametrize("name, settings", [*((name, ()) for name in ("values", *EXAMPLES)), ("2p1d", ALL_ON)])
def test_containers_are_pinned_and_unprivileged(name, settings):
    objects = rendered(name, *settings)
    specs = [pod["spec"] for _, pod in pods(objects).values()] + [each["spec"] for each in of_kind(objects, "Pod").values()]
    assert len(specs) >= 3
    for spec in specs:
        assert spec["automountServiceAccountToken"] is False
        context = spec["securityContext"]
        assert context["runAsNonRoot"] and context["runAsUser"] > 0 and context["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            assert_pinned(container["image"])
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False and own["readOnlyRootFilesystem"] is True and own["capabilities"]["drop"] == ["ALL"]
            wants_rdma = any("rdma" in key for key in container["resources"].get("limits", {}))
            assert own["capabilities"].get("add") == (["IPC_LOCK"] if wants_rdma else None)
            assert container["resources"]["requests"] and container["resources"]["limits"]["memory"]
        assert not spec.get("hostNetwork") and not any("hostPath" in volume for volume in spec.get("volumes", []))


def test_the_image_can_be_pinned_by_its_digest():
    digest = "sha256:" + "0a" * 32
    objects = rendered("2p1d", f'image.digest="{digest}"', 'image.repository="registry:5000/baton"')
    specs = [pod["spec"] for _, pod in pods(objects).values()] + [each["spec"] for each in of_kind(objects, "Pod").values()]
    images = {container["image"] for spec in specs for container in [*spec.get("initContainers", []), *spec["containers"]]}
    assert images == {f"registry:5000/baton:{version()}@{digest}"}


def test_only_those_who_must_connect_may():
    """The column `who connects` of the port table."""
    objects = rendered("1p1d")
    labels = {role: pod["metadata"]["labels"] for role, (_, pod) in pods(objects).items()}
    allowed = {}
    for policy in of_kind(objects, "NetworkPolicy").values():
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        for rule in policy["spec"]["ingress"]:
            peers = [peer["podSelector"] for peer in rule.get("from", []) if "podSelector" in peer]
            who = sorted(role for role in labels if any(selects(peer, labels[role]) for peer in peers)) if "from" in rule else ["anybody"]
            allowed[rule["ports"][0]["port"]] = who
    # A node may change its role, and its pod keeps its label and its port: so nodes may connect to nodes.
    all_pods = ["coordinator", "decode", "prefill"]
    assert allowed == {8000: ["anybody"], 7400: ["decode", "prefill"], 7410: all_pods, 7420: all_pods}


def mounted(pod):
    """{path: volume}."""
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    return {mount["mountPath"]: volumes[mount["name"]] for mount in pod["spec"]["containers"][0]["volumeMounts"]}


def test_a_node_on_a_gpu_gets_what_it_needs(tmp_path):
    objects = rendered("gpu", 'prefill.gpu.kernelCache={"persistentVolumeClaim": {"claimName": "kernels"}}')
    image = (DEPLOY / "docker/Dockerfile").read_text()
    kernels = str(Path(re.search(r"BATON_KERNEL_CACHE=(\S+)", image).group(1)).parent)
    for role in ("prefill", "decode"):
        pod, settings = pods(objects)[role][1], settings_of(objects, role, tmp_path)
        assert (settings["device"], settings["gpu_numerics"], settings["transports"]) == ("cuda:0", "invariant", ["nccl", "grpc"])
        assert pod["spec"]["containers"][0]["resources"]["limits"] == {"memory": "24Gi", "nvidia.com/gpu": 1}
        assert pod["spec"]["runtimeClassName"] == "nvidia" and pod["spec"]["tolerations"][0]["key"] == "nvidia.com/gpu"
        assert (environment(pod)["NCCL_SOCKET_IFNAME"], environment(pod)["CUDA_DEVICE_MAX_CONNECTIONS"]) == ("eth0", "32")
        assert mounted(pod)["/dev/shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
        assert ("persistentVolumeClaim" if role == "prefill" else "emptyDir") in mounted(pod)[kernels]
        probe = pod["spec"]["containers"][0]["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] == 900
    # What the values say takes the place of the chart's own: Kubernetes may refuse a name that stands there twice.
    _, pod = pods(rendered("gpu", 'decode.env=[{"name": "CUDA_DEVICE_MAX_CONNECTIONS", "value": "16"}]'))["decode"]
    values = [each["value"] for each in pod["spec"]["containers"][0]["env"] if each["name"] == "CUDA_DEVICE_MAX_CONNECTIONS"]
    assert values == ["16"]
    # Where no GPU is asked for, nothing of it is there.
    for _, pod in [pods(objects)["coordinator"], *pods(rendered("1p1d")).values()]:
        assert "sysctls" not in pod["spec"]["securityContext"]
        assert not {"NCCL_SOCKET_IFNAME", "CUDA_DEVICE_MAX_CONNECTIONS"} & set(environment(pod))
        assert not {"/dev/shm", kernels} & set(mounted(pod))
    assert "device" not in of_kind(rendered("1p1d"), "ConfigMap")["baton-prefill"]["data"]["prefill.toml"]


@pytest.mark.parametrize("first, last", [(50000, 51000), (20000, 20099)])
def test_nccl_has_its_ports_between_the_nodes_alone(first, last):
    objects = rendered("gpu", f"gpuTransports.nccl.ports={json.dumps({'first': first, 'last': last})}")
    labels = {role: pod["metadata"]["labels"] for role, (_, pod) in pods(objects).items()}
    allowed = {}
    for name, policy in of_kind(objects, "NetworkPolicy").items():
        for rule in policy["spec"]["ingress"]:
            if "endPort" in rule["ports"][0]:
                peers = [role for role in labels if any(selects(peer["podSelector"], labels[role]) for peer in rule["from"])]
                allowed[name] = rule["ports"][0]["port"], rule["ports"][0]["endPort"], sorted(peers)
    # Also within a pool, because a pod that changed its role keeps the label of its old one.
    assert allowed == {name: (first, last, ["decode", "prefill"]) for name in ("baton-prefill", "baton-decode")}
    for role in ("prefill", "decode"):
        sysctl = {"name": "net.ipv4.ip_local_port_range", "value": f"{first} {last}"}
        assert pods(objects)[role][1]["spec"]["securityContext"]["sysctls"] == [sysctl]
        assert not first <= ports()[role] <= last, "the node itself listens there"
    without = rendered("gpu", 'prefill.config.transports=["grpc"]', 'decode.config.transports=["grpc"]')
    assert "endPort" not in json.dumps(without) and "sysctls" not in json.dumps(without)


def test_cuda_ipc_shares_what_it_must_share(tmp_path):
    objects = rendered("values", *ONE_HOST)
    for role, (_, pod) in pods(objects).items():
        is_node = role != "coordinator"
        assert [pod["spec"].get(key, False) for key in ("hostPID", "hostIPC", "hostNetwork")] == [is_node] * 3
        assert (pod["spec"].get("dnsPolicy") == "ClusterFirstWithHostNet") == is_node
        assert (environment(pod).get("NVIDIA_VISIBLE_DEVICES") == "all") == is_node
        # The host's own /dev/shm, and a range of ports that no pod may set there.
        assert "/dev/shm" not in mounted(pod) and "sysctls" not in pod["spec"]["securityContext"]
    settings = {role: settings_of(objects, role, tmp_path) for role in ("prefill", "decode")}
    assert [settings[role]["device"] for role in settings] == ["cuda:0", "cuda:1"]
    for role in settings:
        [secret] = [each for each in pods(objects)[role][1]["spec"]["containers"][0]["env"] if each["name"] == "BATON_SHM_DIRECT_SECRET"]
        assert secret["valueFrom"]["secretKeyRef"] == {"name": "baton-kv", "key": "secret"}


def test_pods_have_certificates_of_their_own_names(tmp_path):
    """With an issuer, and TLS to etcd; without one of them they are told that everybody is trusted."""
    issuer, etcd = ('tls.issuer="baton-ca"', 'tls.cluster="demo"'), 'etcd.tls.secretName="baton-etcd-tls"'
    objects = rendered("values", *issuer, etcd)
    for role in ROLES:
        settings, spec = settings_of(objects, role, tmp_path), pods(objects)[role][1]["spec"]
        files = [settings[key] for key in ("tls_cert", "tls_key", "tls_ca")]
        assert files == [f"/etc/baton/tls/{name}" for name in ("tls.crt", "tls.key", "ca.crt")] and settings["insecure"] is False
        [volume] = [each["csi"] for each in spec["volumes"] if each["name"] == "tls"]
        assert volume["driver"] == "csi.cert-manager.io" and volume["readOnly"]
        told = {key.partition("/")[2]: value for key, value in volume["volumeAttributes"].items()}
        roles = ["coordinator"] if role == "coordinator" else ["prefill", "decode"]
        assert told["uri-sans"] == ",".join(f"spiffe://demo/{each}/${{POD_NAME}}" for each in roles)
        assert (told["issuer-name"], told["issuer-kind"], told["fs-group"]) == ("baton-ca", "Issuer", "65532")
        assert {"server auth", "client auth"} <= set(told["key-usages"].split(","))
        probed = {spec["containers"][0][f"{kind}Probe"]["httpGet"]["scheme"] for kind in ("startup", "liveness", "readiness")}
        assert probed == {"HTTP" if role == "coordinator" else "HTTPS"}, "the coordinator's API has a certificate of its own"
    for half in (issuer, (etcd,)):
        assert settings_of(rendered("values", *half), "decode", tmp_path)["insecure"] is True
    plain = rendered("values")
    for role in ROLES:
        assert settings_of(plain, role, tmp_path)["insecure"] is True
        assert not [each for each in pods(plain)[role][1]["spec"]["volumes"] if each["name"] == "tls"]


def test_clients_see_the_certificate_of_the_secret(tmp_path):
    objects = rendered("2p1d", 'coordinator.tls.secretName="api"')
    settings, spec = settings_of(objects, "coordinator", tmp_path), pods(objects)["coordinator"][1]["spec"]
    assert [settings[key] for key in ("api_tls_cert", "api_tls_key")] == [f"/etc/baton/api-tls/tls.{end}" for end in ("crt", "key")]
    test_pod = of_kind(objects, "Pod")["baton-status"]["spec"]
    for each in (spec, test_pod):
        [volume] = [volume for volume in each["volumes"] if volume["name"] == "api-tls"]
        assert volume["secret"] == {"secretName": "api"}
        assert {"name": "api-tls", "mountPath": "/etc/baton/api-tls", "readOnly": True} in each["containers"][0]["volumeMounts"]
    assert test_pod["containers"][0]["args"][2] == "https://baton:8000"
    assert {"name": "BATON_CA", "value": "/etc/baton/api-tls/ca.crt"} in test_pod["containers"][0]["env"]
    for role in ROLES:
        expected = "HTTPS" if role == "coordinator" else "HTTP"
        [container] = pods(objects)[role][1]["spec"]["containers"]
        assert {container[f"{kind}Probe"]["httpGet"]["scheme"] for kind in ("startup", "liveness", "readiness")} == {expected}
        [endpoint] = of_kind(objects, "PodMonitor")[f"baton-{role}"]["spec"]["podMetricsEndpoints"]
        assert endpoint.get("scheme", "http") == expected.lower(), role


def test_clients_are_asked_for_the_keys_of_the_secret(tmp_path):
    keys = 'coordinator.keys={"secretName": "baton-keys", "operatorSecretName": "baton-operator"}'
    objects = rendered("2p1d", keys, "podMonitor.enabled=true")
    assert settings_of(objects, "coordinator", tmp_path)["api_keys"] == "/etc/baton/keys/keys.toml"
    for role in ROLES:
        spec = pods(objects)[role][1]["spec"]
        volumes = [volume["secret"] for volume in spec["volumes"] if volume["name"] == "keys"]
        wanted = [{"secretName": "baton-keys", "items": [{"key": "keys.toml", "path": "keys.toml"}]}]
        assert volumes == (wanted if role == "coordinator" else []), role
        mounted_at = [mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"] if mount["name"] == "keys"]
        assert mounted_at == (["/etc/baton/keys"] if role == "coordinator" else []), role
        [endpoint] = of_kind(objects, "PodMonitor")[f"baton-{role}"]["spec"]["podMetricsEndpoints"]
        asked = endpoint.get("authorization", {}).get("credentials")
        assert asked == ({"name": "baton-operator", "key": "metrics"} if role == "coordinator" else None), role
    [variable] = of_kind(objects, "Pod")["baton-status"]["spec"]["containers"][0]["env"]
    assert variable == {"name": "BATON_API_KEY", "valueFrom": {"secretKeyRef": {"name": "baton-operator", "key": "admin"}}}


def test_options_do_what_they_say():
    objects = rendered("2p1d", *ALL_ON)
    decode, prefill = pods(objects)["decode"][1]["spec"], pods(objects)["prefill"][1]["spec"]
    assert prefill["containers"][0]["resources"]["limits"] == {"memory": "12Gi", "nvidia.com/gpu": 1}
    assert decode["containers"][0]["resources"]["limits"] == {"memory": "24Gi", "rdma/hca": 2} and decode["runtimeClassName"] == "nvidia"
    assert "replicas" not in pods(objects)["decode"][0]["spec"] and pods(objects)["prefill"][0]["spec"]["replicas"] == 2
    assert environment(pods(objects)["decode"][1])["BATON_ADVERTISE"] == "[10.1.2.3]:7420"
    assert not of_kind(rendered("values", "networkPolicy.enabled=false"), "NetworkPolicy")
    assert not of_kind(rendered("values"), "PodMonitor")
    peers = of_kind(objects, "NetworkPolicy")["baton-coordinator"]["spec"]["ingress"][0]["from"]
    test_pod = of_kind(objects, "Pod")["baton-status"]["metadata"]["labels"]
    assert any(selects(peer["podSelector"], test_pod) and peer["podSelector"].get("matchLabels") for peer in peers if "podSelector" in peer)


def test_prometheus_gets_the_labels_that_rules_select_on():
    objects = rendered("2p1d")
    ours = {job["job_name"]: job["static_configs"][0].get("labels", {}) for job in load("prometheus/prometheus.yml")["scrape_configs"]}
    monitors = of_kind(objects, "PodMonitor")
    assert set(monitors) == {f"baton-{role}" for role in ROLES} == set(ours)
    for name, monitor in monitors.items():
        [role] = [role for role, (_, pod) in pods(objects).items() if selects(monitor["spec"]["selector"], pod["metadata"]["labels"])]
        [endpoint] = monitor["spec"]["podMetricsEndpoints"]
        assert (endpoint["port"], endpoint["path"], endpoint["interval"]) == ("http", "/metrics", "10s")
        labels = {each["targetLabel"]: each.get("replacement", each.get("sourceLabels")) for each in endpoint["relabelings"]}
        assert labels.pop("job") == name == f"baton-{role}"
        assert set(labels) == set(ours[name]) and labels.get("role") == ours[name].get("role")


def test_the_autoscaler_finds_the_pools():
    workloads = of_kind(rendered("values"), "StatefulSet")
    for role in ("prefill", "decode"):
        target = load(f"keda/{role}.yaml")["spec"]["scaleTargetRef"]
        assert workloads[target["name"]]["kind"] == target["kind"] and workloads[target["name"]]["apiVersion"] == target["apiVersion"]


def test_the_baseline_has_the_resources_of_the_split_cluster():
    def total(name):
        pools = [each for role, each in pods(rendered(name)).items() if role != "coordinator"]
        each = [(workload["spec"]["replicas"], pod["spec"]["containers"][0]["resources"]) for workload, pod in pools]
        cpus = sum(count * int(resources["requests"]["cpu"]) for count, resources in each)
        memory = sum(count * bytes_of(resources["limits"]["memory"]) for count, resources in each)
        return sum(count for count, _ in each), cpus, memory

    assert total("colocated") == total("1p1d")
    assert set(pods(rendered("colocated"))) == {"coordinator", "decode"}
    one, other = (pods(rendered(name))["coordinator"][1]["spec"]["containers"][0]["resources"] for name in ("colocated", "1p1d"))
    assert one == other


@functools.cache
def comparing(*settings):
    """The release `baton` of 1p1d.yaml with the Job of examples/compare.yaml."""
    return rendered("1p1d", "compare=" + json.dumps(load("helm/baton/examples/compare.yaml")["compare"]), *settings)


COMPARING_GUARDED = ('compare.keySecretName="baton-compare"', 'compare.caSecretName="baton-api"')


def test_the_job_compares_the_two_examples(tmp_path):
    assert not of_kind(rendered("1p1d"), "Job")
    [job] = of_kind(comparing(), "Job").values()
    spec = job["spec"]["template"]["spec"]
    verb, *words = spec["containers"][0]["args"]
    assert verb == "compare" and {word.split("=")[0] for word in words} <= flags("compare")
    # The Services of the releases that the example's own comment installs.
    urls = {word.split("=")[1]: word.split("=", 2)[2] for word in words if word.startswith("--arm=")}
    assert urls == {"whole": "http://whole-baton:8000", "split": "http://split-baton:8000"}
    [mount] = [mount for mount in spec["containers"][0]["volumeMounts"] if mount["name"] == "facts"]
    facts = tmp_path / "facts.toml"
    facts.write_text(of_kind(comparing(), "ConfigMap")["baton-compare"]["data"]["facts.toml"])
    words = [f"--facts={facts}" if word.startswith("--facts=") else word for word in words]
    assert f"--facts={mount['mountPath']}/facts.toml" in spec["containers"][0]["args"]
    done = run(baton(), verb, *words, "--plan-only")
    assert done.returncode == 0 and "2 deployed clusters" in done.stderr, done.stderr


def test_the_job_has_the_key_and_the_authority_of_guarded_clusters():
    [job] = of_kind(comparing(*COMPARING_GUARDED), "Job").values()
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert container["env"] == [
        {"name": "BATON_API_KEY", "valueFrom": {"secretKeyRef": {"name": "baton-compare", "key": "key"}}},
        {"name": "BATON_CA", "value": "/etc/baton/api-tls/ca.crt"},
    ]
    [mount] = [mount for mount in container["volumeMounts"] if mount["mountPath"] == "/etc/baton/api-tls"]
    [volume] = [volume for volume in job["spec"]["template"]["spec"]["volumes"] if volume["name"] == mount["name"]]
    assert volume["secret"] == {"secretName": "baton-api", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
    # `baton compare` reads both from these variables.
    described = run(baton(), "compare", "--help").stdout
    assert {"BATON_API_KEY", "BATON_CA"} <= set(re.findall(r"\[env: (\w+)", described))
    [open_job] = of_kind(comparing(), "Job").values()
    assert "env" not in open_job["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.kubernetes_schemas
@pytest.mark.parametrize("kubernetes", KUBERNETES)
@pytest.mark.parametrize("settings", [(), COMPARING_GUARDED])
def test_kubernetes_takes_the_job(settings, kubernetes):
    assert not [error for each in comparing(*settings) if each["kind"] == "Job" for error in schema_errors(kubernetes, each)]


def test_the_facts_of_the_example_are_those_of_the_clusters():
    facts = tomllib.loads(load("helm/baton/examples/compare.yaml")["compare"]["facts"])
    for arm, name in (("whole", "colocated"), ("split", "1p1d")):
        nodes = [each for role, each in pods(rendered(name)).items() if role != "coordinator"]
        each = [(workload["spec"]["replicas"], pod["spec"]["containers"][0]["resources"]) for workload, pod in nodes]
        assert facts["arms"][arm]["cores"] == sum(count * int(resources["requests"]["cpu"]) for count, resources in each)
        memory = sum(count * bytes_of(resources["limits"]["memory"]) for count, resources in each)
        assert facts["arms"][arm]["memory"] == f"{memory >> 30}GiB"


@every_example
def test_the_notes_and_the_test_speak_to_this_release(name):
    done = helm("install", "baton", CHART, "--namespace", "baton", "--values", values_file(name), "--dry-run=client")
    notes = done.stdout.split("NOTES:")[1]
    assert done.returncode == 0 and "deployment/baton-coordinator" in notes and "service/baton 8000:8000" in notes
    assert f'"model": "{yaml.safe_load(values_file(name).read_text()).get("model", {}).get("servedName", "smollm2-135m")}"' in notes
    for link in re.findall(r"deploy/\w+\.md", notes):
        assert (REPOSITORY / link).exists(), link
    [pod] = of_kind(rendered(name), "Pod").values()
    verb, *words = pod["spec"]["containers"][0]["args"]
    assert verb == "status" and words[0] in flags("status") and words[1] == "http://baton:8000"
