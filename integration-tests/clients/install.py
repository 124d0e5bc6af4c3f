"""Installs a client at its pinned version: a virtual environment or a folder of npm, made once and then used again."""

import json
import subprocess
import sys

# aiperf and Phoenix have over 130 packages each.
INSTALL_WITHIN_S = 1500


class NotInstalled(Exception):
    """What pip or npm said."""


def installed(client, folder):
    """The folder of its programs (`bin` of the environment), or of its node_modules."""
    wanted = json.dumps({key: client[key] for key in ("pip", "npm") if key in client})
    note = folder / "installed.json"
    programs = folder / "bin" if "pip" in client else folder
    if note.exists() and note.read_text() == wanted:
        return programs
    folder.mkdir(parents=True, exist_ok=True)
    if "pip" in client:
        told([sys.executable, "-m", "venv", str(folder)], folder)
        pip = [str(programs / "python"), "-m", "pip", "--disable-pip-version-check"]
        # Most of the files are never imported, so compiling all of them would be half of the work.
        told([*pip, "install", "--quiet", "--no-compile", *client["pip"]], folder)
        (folder / "freeze.txt").write_text(told([*pip, "freeze"], folder))
    else:
        (folder / "package.json").write_text('{"private": true, "type": "module"}\n')
        told(["npm", "install", "--no-audit", "--no-fund", "--save-exact", *client["npm"]], folder)
    note.write_text(wanted)
    return programs


def told(command, folder):
    """The output of a command that must succeed."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_WITHIN_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as why:
        raise NotInstalled(str(why)) from why
    if done.returncode:
        raise NotInstalled(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()[-600:]}")
    return done.stdout
