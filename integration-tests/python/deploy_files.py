"""What the tests of deploy/ share: the files, the programs that read them, and baton's own word on names, ports and settings."""

import functools
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
ROLES = ("coordinator", "prefill", "decode")
# Of one command.
SECONDS_MAX = 120


def run(*words, env=None, **options):
    words = list(map(str, words))
    return subprocess.run(words, capture_output=True, text=True, timeout=SECONDS_MAX, env=os.environ | (env or {}), **options)


def text_files():
    """All of deploy/ that people read or programs are told: no dashboard, no Python, no tests of rules."""
    left_out = ("grafana/", "prometheus/checks/", "prometheus/tests/")
    paths = [path for path in sorted(DEPLOY.rglob("*")) if path.is_file() and path.suffix != ".pyc"]
    return [path for path in paths if not str(path.relative_to(DEPLOY)).startswith(left_out)]


def load(path):
    return yaml.safe_load((DEPLOY / path).read_text())


@functools.cache
def fetched(name, *words):
    """What scripts/get-* prints, as a dictionary."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))
    done = run(REPOSITORY / f"scripts/get-{name}", target / name, *words)
    if done.returncode:
        pytest.fail(f"{name} is not here and could not be fetched, so this was NOT checked:\n{done.stderr}")
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


def tool(name, program):
    return shutil.which(program) or fetched(name)[name]


# ---- the programs -------------------------------------------------------------------------------------------------


@functools.cache
def baton():
    path = os.environ.get("BATON_BIN")
    if not path:
        pytest.fail("BATON_BIN is not set: give the path of `baton`, or run scripts/test")
    return path


@functools.cache
def help_of(*verb):
    done = run(baton(), *verb, "--help")
    assert done.returncode == 0, f"`baton {' '.join(verb)}` is no verb of this binary: {done.stderr}"
    return done.stdout


@functools.cache
def verbs():
    listed = re.findall(r"^  ([a-z]+)  ", run(baton(), "--help").stdout, re.M)
    return {*listed, *(f"serve-{role}" for role in ROLES)}


def flags(*verb):
    return set(re.findall(r"--[a-z][a-z0-9-]*", help_of(*verb))) | {"--help", "--version"}


def with_second_verb(verb, words):
    """`model pull` of `model` and `pull smollm2-135m`."""
    seconds = re.findall(r"^  ([a-z-]+)  ", help_of(verb).partition("\nCommands:\n")[2].partition("\n\n")[0], re.M)
    return (verb, words[0]) if words and words[0] in seconds else (verb,)


def clean(environment):
    """Only these variables of baton, whoever runs the test."""
    return {name: "" for name in os.environ if name.startswith("BATON_")} | environment


def configuration(role, arguments=(), environment=None):
    """{key: value} as the process itself reads its arguments and variables; every BATON_ variable must arrive."""
    environment = environment or {}
    outside = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    words = [baton(), f"serve-{role}", *arguments, "--print-config"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS_MAX, env=outside | environment, cwd=REPOSITORY)
    assert done.returncode == 0, f"{role} {arguments} {environment}: {done.stderr}"
    lines = re.findall(r"^(\w+) = (.*?)  # (.*)$", done.stdout, re.M)
    keys = {key: (tomllib.loads(f"v = {value}")["v"], origin) for key, value, origin in lines}
    keys_without_value = set(re.findall(r"^# (\w+) is not set$", done.stdout, re.M))
    for name in environment:
        if name.startswith("BATON_"):
            key = name.removeprefix("BATON_").lower()
            # An empty variable counts as not set.
            arrived = keys.get(key, (None, "nowhere"))[1] == "environment" if environment[name] else key in keys_without_value | set(keys)
            assert arrived, f"{name} is no setting of {role}"
    return {key: value for key, (value, _) in keys.items()}


def port(address):
    return int(address.rsplit(":", 1)[1])


def markdown_code(text):
    """Fenced blocks and code spans, without the text around them."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return "\n".join(blocks + re.findall(r"`([^`]+)`", rest))


def commands(path):
    """(verb, words) of each `baton VERB ...` and `baton-...` in a file. In Markdown all code counts, elsewhere known verbs."""
    text = path.read_text()
    text = markdown_code(text) if path.suffix == ".md" else text
    text = re.sub(r"[,\[\]\"]+ ?", " ", text) if path.suffix in (".yaml", ".tpl") else text
    yield from commands_in(text, of_any_verb=path.suffix == ".md")


def commands_in(text, of_any_verb=True):
    for line in text.replace("\\\n", " ").replace("cargo run --release -- ", "baton ").splitlines():
        for found in re.finditer(r"(?:^|[\s/$(])(baton|baton-(?:coordinator|(?:prefill|decode)-node)) ([^|;&#)`<>]*)", line):
            program, rest = found.groups()
            words = rest.replace("'", " ").replace('"', " ").split()
            if program != "baton":
                yield "serve-" + program.split("-")[1], words
            elif words and re.fullmatch(r"[a-z][a-z-]*", words[0]) and (of_any_verb or words[0] in verbs()):
                yield words[0], words[1:]


def assert_verbs_and_flags_exist(started, where):
    """Says which verbs there were."""
    seen = set()
    for verb, words in started:
        told = f"{where}: baton {verb} {' '.join(words)}"
        assert verb in verbs(), told
        for flag in re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", " ".join(words)):
            assert flag in flags(*with_second_verb(verb, words)), f"{told}: {flag}"
        seen.add(verb)
    return seen


# ---- what the files must agree on -----------------------------------------------------------------------------------


def joins(settings):
    """Where a node looks for coordinators, as it was written: an etcd address with several members is one address."""
    return ",".join([settings["coordinators"]] if isinstance(settings["coordinators"], str) else settings["coordinators"])


def assert_one_cluster(settings):
    """Nodes find the coordinator where it registers, and each process is reached where it listens."""
    membership = settings["coordinator"]["membership"]
    assert membership.startswith("etcd"), membership
    for role in ("prefill", "decode"):
        assert joins(settings[role]) == membership, role
        assert port(settings[role]["advertise"]) == port(settings[role]["listen"]) == ports()[role]
    assert port(settings["coordinator"]["listen"]) == ports()["coordinator"]
    assert port(settings["coordinator"]["control_advertise"]) == port(settings["coordinator"]["control_listen"]) == 7400
    names = [settings[role]["name"] for role in ROLES]
    assert len(set(names)) == len(names)


@functools.cache
def port_table():
    """{port: process} of the README."""
    section = (DEPLOY / "README.md").read_text().split("\n## Ports\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([\d, ]+) \| ([^|]+) \|", section, re.M)
    return {int(number): process for numbers, process in rows for number in numbers.split(",")}


def ports():
    """{role: port}; a coordinator's first."""
    return {role: min(number for number, process in port_table().items() if process.startswith(role) and number != 7400) for role in ROLES}


def stages_of_the_image():
    """{name: (what it is built on, its commands)}."""
    text = re.sub(r"\\\n", " ", (DEPLOY / "docker/Dockerfile").read_text())
    return {name: (base, body) for base, name, body in re.findall(r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM|\Z)", text, re.M | re.S)}


def version():
    return tomllib.loads((REPOSITORY / "Cargo.toml").read_text())["workspace"]["package"]["version"]


def assert_pinned(image):
    """Images of others by digest, because a tag can be moved. Ours is built by who runs it, so its digest is theirs."""
    tagged, _, digest = image.partition("@")
    name, _, tag = tagged.rpartition(":")
    assert name and re.search(r"\d+\.\d+(\.\d+)?", tag), f"{image} has no version"
    assert name.split("/")[-1] == "baton" and not digest or re.fullmatch(r"sha256:[0-9a-f]{64}", digest), f"{image} has no digest"
    if name == "baton":
        assert tag.startswith(version()), f"{image} is not of {version()}"
