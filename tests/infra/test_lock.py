"""Locks are exact, and what an environment lacks is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from infra.lock import check, normalise, read_lock

ROOT = Path(__file__).resolve().parents[2]


def test_reads_pins_and_comments(tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text("# head\nFoo_Bar.baz==1.0+cpu  # why\n\nray[default]==2.0\n")
    assert read_lock(lock) == {"foo-bar-baz": "1.0+cpu", "ray": "2.0"}


@pytest.mark.parametrize("line", ["foo>=1", "foo", "-r other.txt", "https://host/foo.whl"])
def test_refuses_what_is_not_exact(tmp_path: Path, line: str) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text(f"bar==1\n{line}\n")
    with pytest.raises(ValueError, match=r"lock\.txt:2: .* is not an exact pin"):
        read_lock(lock)


def test_missing_and_other_versions_are_named(tmp_path: Path) -> None:
    found = [str(problem) for problem in check({"pydantic": "0.0.1", "no-such-package": "3"})]
    assert found[0].startswith("pydantic: ")
    assert found[0].endswith("is installed, the lock wants 0.0.1")
    assert found[1] == "no-such-package: not installed, the lock wants 3"


def test_a_lost_file_is_found(tmp_path: Path) -> None:
    package = tmp_path / "lost-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: lost\nVersion: 1\n")
    (package / "RECORD").write_text("lost/__init__.py,,\nlost-1.dist-info/METADATA,,\n")
    lock = tmp_path / "lock.txt"
    lock.write_text("lost==1\n")
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from infra.lock import main; ",
    ]
    command[-1] += f"sys.exit(main([{str(lock)!r}]))"
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (1, "lost: lost/__init__.py is missing\n")


def test_names_are_compared_in_their_canonical_form() -> None:
    assert normalise("Ruamel.Yaml_x") == "ruamel-yaml-x"
