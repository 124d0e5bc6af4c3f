"""The list of parts that scripts/sbom writes: held against Cargo.lock and against the manifests of this repository's crates."""

import json
import subprocess
import tomllib

import pytest
from deploy_files import REPOSITORY

LOCK = tomllib.loads((REPOSITORY / "Cargo.lock").read_text())


def written():
    done = subprocess.run((REPOSITORY / "scripts/sbom",), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def bill():
    text = written()
    assert text == written(), "the same commit gives the same bytes"
    return json.loads(text)


def named(bill):
    return {(part["name"], part["version"]): part for part in bill["components"]}


def test_each_part_has_the_checksum_of_the_lock_and_a_licence(bill):
    locked = {(each["name"], each["version"]): each.get("checksum") for each in LOCK["package"]}
    assert len(bill["components"]) > 200 and len(named(bill)) == len(bill["components"])
    for part, each in named(bill).items():
        assert each.get("hashes") == (locked[part] and [{"alg": "SHA-256", "content": locked[part]}]), part
        assert each["licenses"][0]["expression"] and "/" not in each["licenses"][0]["expression"], part
        assert each["purl"] == each["bom-ref"] == f"pkg:cargo/{each['name']}@{each['version']}"


def test_what_our_crates_name_is_a_part_and_what_only_tests_name_is_none(bill):
    names = {name for name, _ in named(bill)}
    workspace = tomllib.loads((REPOSITORY / "Cargo.toml").read_text())["workspace"]
    ours = {tomllib.loads((REPOSITORY / folder / "Cargo.toml").read_text())["package"]["name"]: REPOSITORY / folder for folder in workspace["members"]}
    for crate in names & set(ours) | {"cli"}:
        manifest = tomllib.loads((ours[crate] / "Cargo.toml").read_text())
        for kind in ("dependencies", "build-dependencies"):
            for name, value in manifest.get(kind, {}).items():
                package = workspace["dependencies"][name]
                real = package.get("package", name) if isinstance(package, dict) else name
                assert real in names or value.get("optional"), f"{crate} needs {real}"
    assert not names & {"proptest", "false-cuda", "integration-tests"}
    scopes = {name: part["scope"] for (name, _), part in named(bill).items()}
    assert scopes["tokio"] == scopes["rustls"] == "required" and scopes["serde_derive"] == scopes["prost-build"] == "excluded"


def test_the_graph_is_closed_and_begins_at_baton(bill):
    root = bill["metadata"]["component"]["bom-ref"]
    known = {part["bom-ref"] for part in bill["components"]} | {root}
    graph = {each["ref"]: each["dependsOn"] for each in bill["dependencies"]}
    assert set(graph) == known and all(set(needs) <= known for needs in graph.values())
    reached, left = set(), [root]
    while left:
        here = left.pop()
        if here not in reached:
            reached.add(here)
            left += graph[here]
    assert reached == known
