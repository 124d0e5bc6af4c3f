"""What in deploy/ starts processes: units, image, compose, chart. Checked by the programs that read such files, and against baton.

BATON_BIN names the `baton` that the files are for; BATON_UP_JSON a file with what `baton up --json` printed for a running
cluster. Tests with a marker need the program of that name, in PATH or fetched by scripts/get-*.
"""

import functools
import itertools
import json
import os
import re
import shlex
import shutil
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from deploy_files import DEPLOY, REPOSITORY, ROLES, assert_one_cluster, assert_pinned, assert_verbs_and_flags_exist, baton, clean, commands
from deploy_files import configuration, fetched, help_of, load, port, port_table, ports, run, stages_of_the_image, text_files, tool, verbs, version

# systemd's own measure, 0 (safe) to 10; a unit without hardening has 9.6.
EXPOSURE_MAX = 2.0


# ---- every name is known ------------------------------------------------------------------------------------------


def test_every_variable_is_one_that_baton_reads():
    """A misspelt variable is only an environment variable, so nothing but a test would notice it."""
    known = set(re.findall(r"env:\s+(BATON_\w+)", "".join(help_of(verb) for verb in verbs())))
    sources = [path for part in ("crates", "coordinator", "prefill-node", "decode-node") for path in (REPOSITORY / part).rglob("src/**/*.rs")]
    literals = set(re.findall(r'"(BATON_[A-Z_]+)"', "".join(path.read_text() for path in sources)))
    seen = 0
    for path in text_files():
        for name in re.findall(r"BATON_[A-Z][A-Z_]*", path.read_text()):
            seen += 1
            assert name in known | literals, f"{path.relative_to(REPOSITORY)}: {name} is read by nobody"
    assert seen > 40


def test_every_verb_and_flag_exists():
    seen = set().union(*(assert_verbs_and_flags_exist(commands(path), path.relative_to(REPOSITORY)) for path in text_files()))
    assert seen >= {"up", "status", "nodes", "trace", "drain", *(f"serve-{role}" for role in ROLES)}, seen


def test_the_commands_of_the_three_hosts_start(tmp_path):
    """As the README has them, up to the start itself; and they name one cluster, and each other's ports."""
    text = (DEPLOY / "README.md").read_text()
    section = text.split("## Three hosts with etcd\n")[1].split("\n## ")[0]
    (tmp_path / "section.md").write_text(section)
    started = {verb.removeprefix("serve-"): words for verb, words in commands(tmp_path / "section.md") if verb.startswith("serve-")}
    assert set(started) == set(ROLES)
    settings = {role: configuration(role, words) for role, words in started.items()}
    assert_one_cluster(settings)
    assert len({settings[role]["model"] for role in ROLES}) == 1
    hosts = [settings["coordinator"]["control_advertise"], settings["prefill"]["advertise"], settings["decode"]["advertise"]]
    assert [address.rsplit(":")[0] for address in hosts] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]


# ---- ports and links ----------------------------------------------------------------------------------------------


def test_every_port_is_in_the_table():
    assert port_table()[7400] == "coordinator" and port_table()[2379] == "etcd"
    seen = set()
    for path in text_files():
        text = re.sub(r"sha256:\w+|grafana/\w+:[\d.]+", "", path.read_text())
        found = re.findall(r"(?:[\w\])}]:|[pP]ort: |\"port\" ?: |# ?port )(\d{4,5})\b(?![.\d-])", text)
        found += " ".join(re.findall(r"^EXPOSE (.*)$", text, re.M)).split()
        found += re.findall(r'"(?:coordinator|control|prefill|decode)" "(\d{4,5})"', text)
        for number in map(int, found):
            # A second node of a host in the README, and an Alertmanager of the reader's own.
            assert number in {*port_table(), 7421, 9093, 6006, 65532, 65534, 10001}, f"{path.relative_to(REPOSITORY)}: port {number}"
            seen.add(number)
    assert seen >= set(port_table()), set(port_table()) - seen
    for role in ROLES:
        assert port(tomllib.loads((DEPLOY / f"local/{role}.toml").read_text())["listen"]) == ports()[role]


def test_links_lead_somewhere():
    for path in DEPLOY.rglob("*.md"):
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", path.read_text()):
            name, _, anchor = target.partition("#")
            other = (path.parent / name).resolve() if name else path
            assert other.exists(), f"{path.name}: {target}"
            if anchor:
                titles = re.findall(r"^#+ (.*)$", other.read_text(), re.M)
                slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
                assert anchor in slugs, f"{path.name}: {target} is none of {sorted(slugs)}"


@pytest.fixture(scope="module")
def processes():
    """[(role, address)] of a running cluster."""
    path = os.environ.get("BATON_UP_JSON")
    if not path:
        pytest.fail("BATON_UP_JSON is not set: give the file with what `baton up --json` printed, or run scripts/test")
    return [(each["role"], each["address"]) for each in json.loads(Path(path).read_text().splitlines()[0])["processes"]]


def test_the_paths_of_probes_and_scrapes_answer(processes):
    assert {role for role, _ in processes} >= set(ROLES)
    for (role, address), path in itertools.product(processes, ("/health", "/ready", "/metrics")):
        assert answered(f"http://{address}{path}"), (role, path)
        assert not answered(f"http://{address}{path}x"), (role, path)


def answered(url):
    """A node answers 200 and nothing, as gRPC does, where there is no such path."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status == 200 and answer.read() != b""
    except urllib.error.HTTPError:
        return False


# ---- systemd ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def systemd_root(tmp_path_factory):
    """A system that has systemd's own units, ours, and a program where they look for one."""
    root = tmp_path_factory.mktemp("root")
    shutil.copytree(fetched("systemd")["units"], root / "lib/systemd/system", symlinks=True)
    shutil.copytree(DEPLOY / "systemd", root / "etc/systemd/system")
    program = root / "usr/local/bin/baton"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    return root


def systemd_analyze(*words):
    found = fetched("systemd")
    done = run(found["systemd_analyze"], *words, env={"LD_LIBRARY_PATH": found["library_path"]} if found["library_path"] else None)
    # It warns about keys that it does not know and exits with 0.
    return done.returncode, done.stdout, done.stderr.strip()


@pytest.mark.systemd
@pytest.mark.parametrize("role", ROLES)
def test_systemd_takes_the_unit(systemd_root, role):
    status, _, complaints = systemd_analyze("verify", "--man=no", f"--root={systemd_root}", f"baton-{role}.service")
    assert (status, complaints) == (0, "")


@pytest.mark.systemd
def test_systemd_would_say_so(systemd_root):
    text = (DEPLOY / "systemd/baton-decode.service").read_text()
    for number, (old, new) in enumerate([("KillMode=", "KilMode="), ("=mixed", "=mixd"), ("/bin/baton", "/bin/batn"), ("DynamicUser=yes", "DynamicUser=yess")]):
        assert old in text
        name = f"broken-{number}.service"
        (systemd_root / "etc/systemd/system" / name).write_text(text.replace(old, new))
        status, _, complaints = systemd_analyze("verify", "--man=no", f"--root={systemd_root}", name)
        assert status or complaints, new


@pytest.mark.systemd
@pytest.mark.parametrize("role", ROLES)
def test_the_unit_is_hardened(role):
    status, text, complaints = systemd_analyze("security", "--offline=true", "--no-pager", DEPLOY / f"systemd/baton-{role}.service")
    exposure = re.search(r"Overall exposure level for \S+: ([\d.]+)", text)
    assert status == 0 and exposure, complaints
    assert float(exposure.group(1)) <= EXPOSURE_MAX, text


@pytest.mark.systemd
@pytest.mark.parametrize(
    "role, unit, folder, name", [*((role, f"{role}-b0", f"{role}-", "gpu") for role in ("prefill", "decode")), ("coordinator", "coordinator", "coordinator", "clients")]
)
def test_systemd_takes_the_drop_in(systemd_root, role, unit, folder, name):
    """In the folder in which the pages install it: that for GPUs is for all units of a role."""
    units = systemd_root / "etc/systemd/system"
    shutil.copy(DEPLOY / f"systemd/baton-{role}.service", units / f"baton-{unit}.service")
    (units / f"baton-{folder}.service.d").mkdir()
    drop_in = units / f"baton-{folder}.service.d/{name}.conf"
    text = (DEPLOY / f"systemd/{name}.conf").read_text()
    for content, is_right in [(text, True), (text.replace("\nEnvironment=", "\nEnviroment="), False)]:
        drop_in.write_text(content)
        status, _, complaints = systemd_analyze("verify", "--man=no", f"--root={systemd_root}", f"baton-{unit}.service")
        assert ((status, complaints) == (0, "")) == is_right, complaints


def test_the_coordinator_reads_what_the_drop_in_for_clients_sets():
    text = (DEPLOY / "systemd/clients.conf").read_text()
    settings = dict(word.split("=") for line in re.findall(r"^Environment=(.*)$", text, re.M) for word in line.split())
    files = {credential: path for credential, path in re.findall(r"^LoadCredential=(.*):(.*)$", text, re.M)}
    assert {value.removeprefix("%d/") for value in settings.values() if value.startswith("%d/")} == files.keys()
    known = configuration("coordinator", ["--config", DEPLOY / "local/coordinator.toml"], variables(DEPLOY / "systemd/coordinator.env") | settings)
    assert known["api_keys"] == "/etc/baton/keys.toml" and known["api_tls_key"] == "%d/api.key"


def test_a_node_on_a_gpu_has_the_same_hardware_queues_in_every_way_to_start_it():
    places = ["deploy/docker/Dockerfile", "deploy/systemd/gpu.conf", "deploy/helm/baton/templates/_helpers.tpl", "docs/how-to/deploy-gpus.md"]
    found = [re.findall(r"CUDA_DEVICE_MAX_CONNECTIONS(?:=|, value: \")(\d+)", (REPOSITORY / place).read_text()) for place in places]
    assert found == [["32"]] * 4


def unit(role):
    """[(key, value)] of a unit."""
    text = (DEPLOY / f"systemd/baton-{role}.service").read_text()
    return re.findall(r"^(\w+)=(.*)$", text, re.M)


def variables(path):
    return dict(re.findall(r"^([A-Z_]+)=(.*)$", path.read_text(), re.M))


@pytest.mark.parametrize("role", ROLES)
def test_the_unit_starts_the_process_and_waits_for_its_drain(role):
    lines = unit(role)
    keys = dict(lines)
    words = shlex.split(keys["ExecStart"])
    assert words == ["/usr/local/bin/baton", f"serve-{role}", "--config", f"/etc/baton/{role}.toml"]
    assert keys["EnvironmentFile"] == f"-/etc/baton/{role}.env"
    settings = configuration(role, ["--config", DEPLOY / f"local/{role}.toml"], variables(DEPLOY / f"systemd/{role}.env"))
    assert int(keys["TimeoutStopSec"]) * 1000 > settings["drain_ms_max"]
    wanted = {"DynamicUser": "yes", "Restart": "always", "KillSignal": "SIGTERM", "LimitMEMLOCK": "infinity", "NoNewPrivileges": "yes", "User": "baton"}
    assert wanted.items() <= keys.items(), wanted.items() - keys.items()


def test_the_units_make_one_cluster():
    assert_one_cluster({role: configuration(role, ["--config", DEPLOY / f"local/{role}.toml"], variables(DEPLOY / f"systemd/{role}.env")) for role in ROLES})
    shared = [[line for line in unit(role) if line[0] not in ("Description", "ExecStart", "EnvironmentFile", "TimeoutStopSec")] for role in ROLES]
    assert shared[0] == shared[1] == shared[2], "a hardening of one is a hardening of all"


# ---- image --------------------------------------------------------------------------------------------------------


@pytest.mark.hadolint
def test_hadolint_has_nothing_to_say(tmp_path):
    program = tool("hadolint", "hadolint")
    done = run(program, "--no-color", DEPLOY / "docker/Dockerfile")
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
    broken = tmp_path / "Dockerfile"
    broken.write_text((DEPLOY / "docker/Dockerfile").read_text().replace("debian:12.12-slim", "debian").replace("COPY . .", "COPPY . ."))
    assert run(program, broken).returncode != 0


def test_the_image_is_pinned_small_and_not_root():
    stages = stages_of_the_image()
    assert list(stages)[-1] == "baton", "what is built where no target is named"
    for base, _ in stages.values():
        if base not in stages:
            assert_pinned(base)
    base, body = stages["runtime"]
    assert stages["baton"][0] == stages["with-model"][0] == "runtime" and stages["baton"][1].strip() == ""
    user, group = re.search(r"^USER (\d+):(\d+)$", body, re.M).groups()
    assert user != "0" and "USER" not in stages["with-model"][1]
    # A new volume of Docker's has the owner that the folder has in the image, and `baton model pull` runs as this user.
    assert f"install -d -o {user} -g {group} /models" in body
    assert f'image.version="{version()}"' in body
    assert json.loads(re.search(r"^ENTRYPOINT (.*)$", body, re.M).group(1)) == ["/usr/local/bin/baton"]
    exposed = set(map(int, re.search(r"^EXPOSE (.*)$", body, re.M).group(1).split()))
    assert exposed == {number for number, process in port_table().items() if process.strip() == "coordinator" or process.endswith("node")}
    # glibc of the one Debian, used on the other.
    assert "bookworm" in stages["build"][0] and base.startswith("debian:12.")
    channel = tomllib.loads((REPOSITORY / "Cargo.toml").read_text())["workspace"]["package"]["rust-version"]
    assert stages["build"][0].startswith(f"rust:{channel}"), f"the build stage has not Rust {channel}"


def test_the_image_for_gpus_has_what_baton_searches_and_no_driver():
    stages = stages_of_the_image()
    (base, body), libraries = stages["gpu"], re.findall(r"/(lib[\w.-]+\.so[\w.]*)", stages["nvidia"][1])
    assert base == "runtime" and "USER" not in body
    builtins = "libnvrtc-builtins.so.13.0"
    assert sorted(libraries) == sorted(["libnvrtc.so.13", builtins, "libcublasLt.so.13", "libnccl.so.2"])
    searched = (REPOSITORY / "crates/cuda/src/loader/search.rs").read_text()
    assert not [library for library in libraries if f'"{library}"' not in searched and library != builtins]
    # The kernels' table of registers is of this version, and its name is in that of the builtins.
    [wheel] = re.findall(r"^wheel=(\S+)", (REPOSITORY / "scripts/get-nvrtc").read_text(), re.M)
    assert f" {wheel} " in stages["nvidia"][1] and wheel.split("==")[1].startswith(builtins.removeprefix("libnvrtc-builtins.so.") + ".")
    variables = dict(re.findall(r"(\w+)=(\S+)", body[body.index("\nENV ") :]))
    assert f"/libraries {variables['BATON_CUDA_PATH']}\n" in body
    # Pods that ask for no GPU use the same image.
    assert variables["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility" and "NVIDIA_VISIBLE_DEVICES" not in variables


def test_the_image_has_the_libraries_of_the_program():
    """debian:12-slim has glibc and libgcc; a new dependency on another library must come with its package."""
    done = run("ldd", baton())
    assert done.returncode == 0, done.stderr
    wanted = {line.split()[0].split("/")[-1] for line in done.stdout.splitlines()}
    assert wanted <= {"linux-vdso.so.1", "libgcc_s.so.1", "libm.so.6", "libc.so.6", "libpthread.so.0", "libdl.so.2", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}, wanted


def test_the_image_builds_itself_and_fetches_models():
    """No file comes from the host but the sources, and what `baton model pull` runs is there."""
    stages = stages_of_the_image()
    copied = {name: re.findall(r"^COPY (.*)$", body, re.M) for name, (_, body) in stages.items()}
    assert copied.pop("build") == [". ."]
    for name, words in copied.items():
        for word in words:
            assert re.match(r"--from=(build|nvidia) ", word), f"{name}: COPY {word}"
    python = re.search(r'OsString::from\("(python\d?)"\)', (REPOSITORY / "crates/cli/src/model/pull.rs").read_text()).group(1)
    assert f" {python}-pip " in stages["runtime"][1]
    variables = dict(re.findall(r"(\w+)=(/\S+)", stages["runtime"][1]))
    assert variables["BATON_CACHE_DIR"] == "/models" and variables["HF_HOME"].startswith("/models/")
    assert "baton model pull" in stages["with-model"][1]


def test_the_build_context_has_what_cargo_reads():
    ignored = [line for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    workspace = tomllib.loads((REPOSITORY / "Cargo.toml").read_text())["workspace"]
    for needed in ["Cargo.toml", "Cargo.lock", ".cargo", "tools", *workspace["members"]]:
        assert (REPOSITORY / needed).exists() and needed.split("/")[0] not in ignored, needed
    assert {"target", ".git", "**/*.gguf"} <= set(ignored)
    tracked = run("git", "-C", REPOSITORY, "ls-files", "*.rs").stdout.splitlines()
    assert tracked and not [path for path in tracked if path.split("/")[0] in ignored], "sources that the build would miss"


# ---- compose ------------------------------------------------------------------------------------------------------


def composed(*names, folder=DEPLOY / "compose", **environment):
    """The files as Docker's own Compose reads them, together."""
    files = [word for name in names for word in ("-f", folder / name)]
    unset = dict.fromkeys(("MODEL", "MODELS", "MODEL_NAME"), "")
    return run(tool("compose", "docker-compose"), *files, "config", "--format", "json", env=clean(unset | environment))


@pytest.fixture(scope="module")
def services():
    done = composed("compose.yaml", "compose.observability.yaml")
    assert done.returncode == 0 and "warn" not in done.stderr.lower(), done.stderr
    return json.loads(done.stdout)["services"]


BATON_SERVICES = {"coordinator": "coordinator", "prefill-0": "prefill", "decode-0": "decode"}


@pytest.mark.compose
def test_compose_reads_the_cluster_alone_and_refuses_what_is_wrong(tmp_path):
    done = composed("compose.yaml")
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["services"]) == {"etcd", "model", *BATON_SERVICES}
    text = (DEPLOY / "compose/compose.yaml").read_text()
    for old, new in [("healthcheck:", "healthchek:"), ("service_healthy", "healthy"), ("stop_grace_period: 45s", "stop_grace_period: 45x")]:
        assert old in text
        (tmp_path / "compose.yaml").write_text(text.replace(old, new))
        assert composed("compose.yaml", folder=tmp_path).returncode != 0, new


@pytest.mark.compose
@pytest.mark.parametrize("model, name", [("", ""), ("org/name", ""), ("/models/my.gguf", "my-model")])
def test_compose_fetches_the_model_before_a_process_wants_it(model, name, tmp_path):
    """Into one volume that the others read, or out of a folder of the user's; `up` builds the image, so the host needs no file."""
    own = str(tmp_path) if name else ""
    services = json.loads(composed("compose.yaml", MODEL=model, MODELS=own, MODEL_NAME=name).stdout)["services"]
    pull = services["model"]
    assert pull["command"] == ["model", "pull", model or "smollm2-135m"] and pull["restart"] == "no"
    [volume] = pull["volumes"]
    assert volume["target"] == "/models" and not volume.get("read_only")
    assert (volume["type"], volume["source"]) == (("bind", own) if own else ("volume", "models"))
    for service, role in BATON_SERVICES.items():
        [mounted] = services[service]["volumes"]
        assert mounted["read_only"] and [mounted[key] for key in ("source", "target")] == [volume[key] for key in ("source", "target")]
        assert services[service]["depends_on"]["model"]["condition"] == "service_completed_successfully"
        assert services[service]["image"] == pull["image"] and services[service]["build"] == pull["build"]
        settings = configuration(role, services[service]["command"][1:], services[service]["environment"])
        assert settings["model"] == (model or "smollm2-135m") and settings.get("served_model_name", []) == ([name] if name else [])


@pytest.mark.compose
def test_containers_are_pinned_unprivileged_and_watched(services):
    for name, service in services.items():
        assert_pinned(service["image"])
        assert service["user"].split(":")[0] not in ("", "0", "root"), name
        assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"], name
        # Two images have neither a shell nor a client, and one container ends.
        assert "healthcheck" in service or name in ("otel-collector", "jaeger", "model"), name
        for published in service.get("ports", []):
            assert published["host_ip"] == "127.0.0.1" and published["target"] in port_table(), (name, published)
        for volume in service.get("volumes", []):
            assert volume.get("read_only") or name == "model", (name, volume)
            if volume["type"] == "bind":
                assert Path(volume["source"]).exists(), f"{name}: {volume['source']} is not there"
            else:
                assert (volume["type"], volume["source"]) == ("volume", "models"), (name, volume)
        for other in service.get("depends_on", {}):
            assert other in services
            needs_health = service["depends_on"][other]["condition"] == "service_healthy"
            assert not needs_health or "healthcheck" in services[other], (name, other)


@pytest.mark.compose
def test_the_containers_make_one_cluster(services):
    settings = {}
    for name, role in BATON_SERVICES.items():
        service = services[name]
        assert service["command"][0] == f"serve-{role}" and service["read_only"], name
        settings[role] = configuration(role, service["command"][1:], service["environment"])
        assert settings[role]["name"].startswith(name)
        grace_ms = 1000 * sum(int(n) * {"m": 60, "s": 1}[unit] for n, unit in re.findall(r"(\d+)(m|s)", service["stop_grace_period"]))
        assert grace_ms > settings[role]["drain_ms_max"], name
        assert service["healthcheck"]["test"][-1] == f"http://127.0.0.1:{ports()[role]}/ready"
        assert service["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://otel-collector:4317"
        reached = settings[role]["control_advertise" if role == "coordinator" else "advertise"]
        assert reached.split(":")[0] == name, "a container is reached by its name"
    assert_one_cluster(settings)
    etcd = settings["coordinator"]["membership"].split("/")[2]
    assert etcd == "etcd:2379" and f"--advertise-client-urls=http://{etcd}" in services["etcd"]["command"]


def test_compose_scrapes_as_we_do_elsewhere():
    ours, theirs = load("prometheus/prometheus.yml"), load("compose/observability/prometheus.yml")
    assert ours["rule_files"] == theirs["rule_files"]
    for key in ("scrape_interval", "scrape_timeout", "evaluation_interval"):
        assert ours["global"][key] == theirs["global"][key]
    assert [job["job_name"] for job in ours["scrape_configs"]] == [job["job_name"] for job in theirs["scrape_configs"]]
    for mine, other in zip(ours["scrape_configs"], theirs["scrape_configs"]):
        assert mine["static_configs"][0].get("labels") == other["static_configs"][0].get("labels")
        [target] = other["static_configs"][0]["targets"]
        name, number = target.split(":")
        assert ports()[BATON_SERVICES[name]] == int(number) and mine["job_name"] == f"baton-{BATON_SERVICES[name]}"


@pytest.mark.prometheus
def test_promtool_takes_the_scrape_configuration(tmp_path):
    """In the folders of the container."""
    promtool = shutil.which("promtool") or fetched("prometheus")["promtool"]
    shutil.copy(DEPLOY / "compose/observability/prometheus.yml", tmp_path)
    shutil.copytree(DEPLOY / "prometheus/rules", tmp_path / "rules")
    done = run(promtool, "check", "config", tmp_path / "prometheus.yml")
    assert done.returncode == 0 and "FAILED" not in done.stdout, done.stdout + done.stderr
    shutil.rmtree(tmp_path / "rules")
    assert run(promtool, "check", "config", tmp_path / "prometheus.yml").returncode != 0


@pytest.mark.compose
def test_grafana_and_the_collector_find_what_they_need(services):
    mounted = {volume["target"]: Path(volume["source"]) for volume in services["grafana"]["volumes"]}
    [provider] = yaml.safe_load(mounted["/etc/grafana/provisioning/dashboards/baton.yaml"].read_text())["providers"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert mounted[home] == DEPLOY / "grafana/baton.json" and home.startswith(provider["options"]["path"])
    [source] = yaml.safe_load(mounted["/etc/grafana/provisioning/datasources/baton.yaml"].read_text())["datasources"]
    assert source["isDefault"] and source["url"] == "http://prometheus:9090" and "prometheus" in services
    environment = services["grafana"]["environment"]
    assert (environment["GF_AUTH_ANONYMOUS_ENABLED"], environment["GF_AUTH_ANONYMOUS_ORG_ROLE"]) == ("true", "Viewer")
    # The collector reads both files, the second over the first; maps are joined, lists replaced.
    files = [word.removeprefix("--config=") for word in services["otel-collector"]["command"]]
    mounted = {volume["target"]: Path(volume["source"]) for volume in services["otel-collector"]["volumes"]}
    joined = functools.reduce(join, (yaml.safe_load(mounted[name].read_text()) for name in files))
    pipeline = joined["service"]["pipelines"]["traces"]
    for kind in ("receivers", "processors", "exporters"):
        assert set(pipeline[kind]) <= set(joined[kind]), kind
    assert all(protocol["endpoint"].startswith("0.0.0.0:") for protocol in joined["receivers"]["otlp"]["protocols"].values())
    assert [joined["exporters"][name]["endpoint"] for name in pipeline["exporters"]] == ["jaeger:4317"] and "jaeger" in services


def join(one, other):
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return other
    return one | {key: join(one[key], value) if key in one else value for key, value in other.items()}
