"""Keeps measurements from a program that was compiled for tests."""

import json
import subprocess


def release_build(program):
    """The program, if its times are those of users: most of what `scripts/test` and `.ci/run` leave in `target/release` is not
    optimised. It can be the type of an argument. A program from before 30 November 2026 does not say how it was built."""
    said = json.loads(subprocess.run([program, "version", "--json"], check=True, capture_output=True, text=True).stdout)
    build = said.get("build", "release")
    if build != "release":
        raise SystemExit(f"{program} is a {build} build, whose times say nothing about baton: run `cargo build --release` first")
    return program
