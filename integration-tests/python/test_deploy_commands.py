"""The commands of README.md, of "Get started" and of the pages about deploying: run as printed, or else checked and listed here.

A page (of deploy/README.md each part) is one session of one bash, from top to bottom, in a network of its own where the kernel
allows it. `cargo` builds nothing in it: $BATON_BIN is what would be built. What cannot run here stands in ONLY_CHECKED or in
SETTINGS_ONLY with the reason, and an entry that fits nothing any more is an error. All commands are held against the program, the
files and the chart.
"""

import re
import shlex
import socket

import pytest
import yaml
from deploy_files import DEPLOY, REPOSITORY, assert_verbs_and_flags_exist, commands, commands_in, fetched, run, stages_of_the_image
from printed_commands import PLAIN, PORTS, SETTINGS, STAYS, alone, printed, run_session, script

PAGES = (
    "README.md",
    "docs/get-started/README.md",
    "docs/how-to/deploy-gpus.md",
    "docs/how-to/deploy-on-several-hosts.md",
    "docs/how-to/encrypt-the-cluster.md",
    "deploy/README.md",
    "deploy/RUNBOOK.md",
)
# Each part stands for itself, with other hosts or tools than the one before.
IN_PARTS = {"deploy/README.md"}

DOCKER = "there is no Docker engine here: stages, files and services are checked"
CLUSTER = "there is no Kubernetes cluster here: objects are checked, and helm renders what it would install"
HOSTS = "it is for other hosts, of the addresses 10.0.0.x"
ROOT = "it changes the machine, as root"
GPU = "it needs a GPU with NVIDIA's driver"

# (page, what is in the command, why it is not run)
ONLY_CHECKED = (
    ("deploy/README.md", r"^for at in (.*\n)+.*ssh ", HOSTS),
    ("deploy/README.md", r"^(apt-get|systemctl|journalctl|chown|chgrp|chmod|cp -p|groupadd) ", ROOT),
    ("deploy/README.md", r"^cat >>/etc/", ROOT),
    ("deploy/README.md", r"https?://10\.0\.0\.", HOSTS),
    ("deploy/README.md", r"^(scp|ssh) ", HOSTS),
    ("deploy/README.md", r"baton keys create .*/etc/baton/|^echo \"\\$RED", ROOT),
    ("deploy/README.md", r"^docker ", DOCKER),
    ("deploy/README.md", r"^(kind|kubectl|helm) ", CLUSTER),
    ("docs/how-to/deploy-gpus.md", r"^python3 -m pip install .*--target /opt/", ROOT),
    ("docs/how-to/deploy-gpus.md", r"^(ls /dev/nvidia|nvidia-smi )", GPU),
    ("docs/how-to/deploy-gpus.md", r"baton doctor --gpu", GPU),
    ("docs/how-to/deploy-gpus.md", r"/root/kv-secret", ROOT),
    ("docs/how-to/deploy-gpus.md", r"systemctl |/etc/systemd/", ROOT),
    ("docs/how-to/deploy-gpus.md", r"^(sysctl|nft) ", ROOT),
    ("docs/how-to/deploy-gpus.md", r"^docker ", DOCKER),
    ("docs/how-to/deploy-gpus.md", r"^helm ", CLUSTER),
    ("docs/how-to/deploy-gpus.md", r"https?://10\.0\.0\.", HOSTS),
)
# The process reads its settings, as printed, and does not start.
SETTINGS_ONLY = (
    ("deploy/README.md", r"^baton serve-", HOSTS),
    ("docs/how-to/deploy-gpus.md", r"^baton serve-coordinator ", HOSTS),
    ("docs/how-to/deploy-gpus.md", r"^for n in .*\n *baton serve-prefill ", GPU),
)
# What a page takes for granted: a cluster that has answered something.
BEFORE = {
    "deploy/RUNBOOK.md": 'export C=http://127.0.0.1:8000\nbaton up &\nwait_for ready && echo "Say one word." | baton chat || failed\n',
}
# What a person types.
TYPED = {"cargo run --release -- chat": "Name the capital of France."}


def every_command():
    return [command for page in PAGES for command in printed(page)]


def fits(entries, command):
    """The first entry that is about a command."""
    for entry in entries:
        if entry[0] == command.page and re.search(entry[1], command.text):
            return entry
    return None


def how(command):
    if fits(SETTINGS_ONLY, command):
        return SETTINGS
    is_up = re.match(r"(cargo run --release -- |baton )up\b", command.text)
    return STAYS if is_up and not command.code.endswith("&") else PLAIN


def sessions():
    """{name: commands}, without those that are only checked."""
    found = {}
    for command in every_command():
        if not fits(ONLY_CHECKED, command):
            name = command.page + (f" ({command.section})" if command.page in IN_PARTS else "")
            found.setdefault(name, []).append(command)
    return found


def test_every_command_is_run_or_is_in_the_list():
    """And an entry that no command needs has to go."""
    assert len(every_command()) > 60
    listed = [*ONLY_CHECKED, *SETTINGS_ONLY]
    used = {fits(ONLY_CHECKED, command) or fits(SETTINGS_ONLY, command) for command in every_command()}
    assert not [entry for entry in listed if entry not in used], "no command fits these"
    programs = re.compile(r"\b(ssh|docker|kubectl|kind|helm|systemctl|journalctl|nvidia-smi|sysctl|nft|apt-get|sudo)\b")
    for commands_run in sessions().values():
        for command in commands_run:
            # A command that is run must not depend on what this machine happens to have.
            assert not programs.match(command.code), str(command)


def needs_prometheus(name):
    return pytest.param(name, marks=pytest.mark.prometheus) if "Watching" in name else name


@pytest.mark.parametrize("name", [needs_prometheus(name) for name in sessions()])
def test_the_commands_run_as_printed(name, tmp_path):
    if alone() is None:
        taken = [port for port in PORTS if is_taken(port)]
        assert not taken, f"no network of its own can be made here, and something has the ports {taken}: end it and run this again"
    if "Watching" in name:
        fetched("prometheus")
    commands_run = sessions()[name]
    status, said = run_session(tmp_path, script(commands_run, how, BEFORE.get(commands_run[0].page, ""), TYPED))
    assert status == 0, said[-4000:]
    assert said.count(f"== {commands_run[0].page}:") == len(commands_run), said[-4000:]


def is_taken(port):
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0


# ---- what can be said of a command without running it ---------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_every_verb_and_flag_of_the_page_exists(page):
    """In the text around the blocks, too."""
    assert assert_verbs_and_flags_exist(commands(REPOSITORY / page), page)


@pytest.mark.parametrize("command", every_command(), ids=lambda command: f"{command.page}:{command.line}")
def test_the_command_names_what_exists(command):
    assert_verbs_and_flags_exist(commands_in(command.code), command)
    for path in re.findall(r"(?<![\w/.~-])(?:deploy|docs|scripts|integration-tests)/[\w./${}*-]+", command.code):
        # A variable stands for any name.
        assert list(REPOSITORY.glob(re.sub(r"\$\{?\w+\}?", "*", path.rstrip(".")))), f"{command}: there is no {path}"
    for package in re.findall(r"[\w-]+==[\d.]+", command.code):
        assert package in (DEPLOY / "docker/Dockerfile").read_text(), f"{command}: {package} is not what the image has"
    program = command.code.split()[0]
    if program in ABOUT:
        ABOUT[program](command, shlex.split(command.code.removesuffix("&")))


def about_docker(command, words):
    if words[1] == "build":
        target = words[words.index("--target") + 1] if "--target" in words else "baton"
        assert target in stages_of_the_image(), str(command)
    elif words[1] == "run":
        [image] = [number for number, word in enumerate(words) if re.match(r"(\S+/)?baton:", word)]
        assert_verbs_and_flags_exist([(words[image + 1], words[image + 2 :])], command)
    else:
        assert words[1] == "compose", str(command)
        files = [words[number + 1] for number, word in enumerate(words) if word == "-f"]
        services = {name for file in files for name in yaml.safe_load((REPOSITORY / file).read_text())["services"]}
        verb, *rest = words[2 + 2 * len(files) :]
        assert verb in ("up", "down", "exec", "logs", "ps"), str(command)
        named = [word for word in rest if not word.startswith("-")]
        assert verb not in ("exec", "logs") or named[0] in services, str(command)


def objects():
    return list(yaml.safe_load_all((DEPLOY / "kubernetes/baton.yaml").read_text()))


def about_kubectl(command, words):
    """The objects are those of the first cluster."""
    known = {f"{each['kind'].lower()}/{each['metadata']['name']}": each for each in objects()}
    named = [word for word in words if re.match(r"(deployment|service)/", word)]
    assert not [word for word in named if word not in known], str(command)
    if "port-forward" in words:
        [target] = named
        port = int(words[words.index(target) + 1].split(":")[1])
        assert port in [each["port"] for each in known[target]["spec"]["ports"]], str(command)
    if "-c" in words:
        spec = known[named[0]]["spec"]["template"]["spec"]
        assert words[words.index("-c") + 1] in [each["name"] for each in [*spec["initContainers"], *spec["containers"]]], str(command)


ABOUT = {"docker": about_docker, "kubectl": about_kubectl}


@pytest.mark.helm
@pytest.mark.parametrize("command", [command for command in every_command() if re.match(r"helm (install|upgrade) ", command.code)], ids=str)
def test_helm_renders_what_it_would_install(command):
    """The schema of the chart is closed, so a value that the chart does not have is refused."""
    words = shlex.split(command.code)
    done = run(fetched("helm")["helm"], "template", *words[2:], cwd=REPOSITORY)
    assert done.returncode == 0 and "kind: StatefulSet" in done.stdout, done.stderr


@pytest.mark.helm
def test_values_in_the_pages_are_values_of_the_chart(tmp_path):
    found = [block for page in PAGES for block in re.findall(r"^```yaml\n(.*?)^```", (REPOSITORY / page).read_text(), re.M | re.S)]
    assert found
    for number, block in enumerate(found):
        file = tmp_path / f"{number}.yaml"
        file.write_text(block)
        done = run(fetched("helm")["helm"], "template", "baton", DEPLOY / "helm/baton", "--values", file)
        assert done.returncode == 0, f"{block}\n{done.stderr}"
