"""Where pinned harnesses are found, how they are installed, and what is said when they are not there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from opengyre.cli import main
from opengyre.errors import ConfigError, HarnessError
from opengyre.executions.harness import install as module
from opengyre.executions.harness.install import PINNED, PINS, STAMP, find, install, require


def program(path: Path, says: str) -> Path:
    """A program that prints its version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No harness is installed; the folder is the first to be searched."""
    monkeypatch.setattr(module, "DEFAULT_DIR", tmp_path / "default")
    monkeypatch.setenv("OPENGYRE_HARNESSES", str(tmp_path / "named"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "named"


def installed(folder: Path, says: str = "codex-cli 0.171.0") -> Path:
    made = program(folder / "codex" / PINNED["codex"].files[0], says)
    (folder / "codex" / STAMP).write_text("")
    return made


def test_the_first_folder_then_the_default_then_path(nowhere, tmp_path):
    assert find("codex") is None
    on_path = program(tmp_path / "bin" / "codex", "codex-cli 0.171.0")
    assert find("codex") == on_path
    default = installed(tmp_path / "default")
    assert find("codex") == default
    first = installed(nowhere)
    assert find("codex") == first == require("codex") and first != default


def test_half_an_installation_is_none(nowhere):
    made = installed(nowhere)
    (nowhere / "codex" / STAMP).unlink()
    assert find("codex") is None and made.is_file()


def test_what_is_missing_or_of_another_version_is_said_with_what_to_run(nowhere, tmp_path):
    with pytest.raises(ConfigError, match=r"codex 0\.171\.0 is not installed .*opengyre harness install codex"):
        require("codex")
    installed(nowhere, "codex-cli 0.99.0")
    with pytest.raises(ConfigError, match=r"is codex-cli 0\.99\.0 .*codex 0\.171\.0"):
        require("codex")
    with pytest.raises(ConfigError, match=r"harness\.options\.path: .*no/such is no program"):
        require("codex", str(tmp_path / "no/such"))
    silent = program(tmp_path / "silent", "")
    with pytest.raises(ConfigError, match="silent about its version"):
        require("codex", str(silent))
    with pytest.raises(ConfigError, match="one of claude_code"):
        require("claude")


def npm(tmp_path: Path, then: str) -> None:
    """An npm that writes down how it was called."""
    program(tmp_path / "bin" / "npm", "").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n{then}\n')


def test_install_runs_no_scripts_and_only_once(nowhere, tmp_path):
    file = PINNED["codex"].files[0]
    folder, name = file.rsplit("/", 1)
    tools = "PATH=/usr/bin:/bin"
    made = f"{tools}; mkdir -p {folder}; printf '#!/bin/sh\\necho codex-cli 0.171.0' > {folder}/{name}; chmod +x {file}"
    npm(tmp_path, made)
    assert install("codex", nowhere) == nowhere / "codex" / file == install("codex", nowhere)
    assert (tmp_path / "called").read_text().count("--ignore-scripts") == 1
    (nowhere / "codex" / STAMP).write_text("of older pins")
    install("codex", nowhere)
    assert (tmp_path / "called").read_text().count("install") == 2


def test_an_installation_that_fails_says_why_and_leaves_none(nowhere, tmp_path, monkeypatch):
    with pytest.raises(HarnessError, match=r"npm is not on PATH \(install Node"):
        install("codex", nowhere)
    npm(tmp_path, "echo registry is away >&2; exit 7")
    with pytest.raises(HarnessError, match=r"ended with 7: registry is away"):
        install("codex", nowhere)
    npm(tmp_path, "exit 0")
    with pytest.raises(HarnessError, match="has no program"):
        install("codex", nowhere)
    npm(tmp_path, "exec /bin/sleep 60")
    monkeypatch.setattr(module, "INSTALL_S", 0.2)
    (nowhere / "codex" / STAMP).unlink()
    with pytest.raises(HarnessError, match="not done in"):
        install("codex", nowhere)
    assert find("codex") is None


def test_the_pins_are_the_versions_we_say(capsys, nowhere):
    for name, pin in PINNED.items():
        if (PINS / name / "package.json").is_file():
            (version,) = json.loads((PINS / name / "package.json").read_text())["dependencies"].values()
        else:
            version = re.search(r"^mini-swe-agent==(.*)$", (PINS / name / "requirements.txt").read_text(), re.M)[1]
        assert version == pin.version
        for file in (PINS / name).iterdir():
            assert "resolved" not in file.read_text() and "://" not in file.read_text()  # no registry of ours
    installed(nowhere)
    assert main(["harness", "list"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"claude_code +2\.1\.220 +not installed", said) and re.search(r"codex +0\.171\.0 +/", said)
