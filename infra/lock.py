"""Compare the installed packages with a lock file. Standard library only, so that it runs in a venv that is half built.

`python -m infra.lock requirements/cpu.txt` prints one line for each pin that is missing, has another version, or has
files missing (an interrupted installation), and exits 1 if there are any.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(\[[^\]]*\])?==(?P<version>[^\s;#]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One pin that the environment does not meet."""

    name: str
    wanted: str
    found: str | None
    """Installed version, or None if the package is missing."""
    missing_file: str | None = None
    """A file that the package's own record lists and the disk lacks."""

    def __str__(self) -> str:
        if self.found is None:
            return f"{self.name}: not installed, the lock wants {self.wanted}"
        if self.missing_file is not None:
            return f"{self.name}: {self.missing_file} is missing"
        return f"{self.name}: {self.found} is installed, the lock wants {self.wanted}"


def normalise(name: str) -> str:
    """The canonical form of a distribution's name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(path: Path) -> dict[str, str]:
    """Canonical name -> exact version of each pin. Raises ValueError for a line that is not an exact pin."""
    pins: dict[str, str] = {}
    for number, raw in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        line = raw.split("#", 1)[0].strip()
        if not line:
            continue
        match = _PIN.match(line)
        if match is None:
            raise ValueError(f"{path}:{number}: {line!r} is not an exact pin (name==version)")
        pins[normalise(match["name"])] = match["version"]
    return pins


def check(pins: dict[str, str], *, files: bool = False) -> list[Problem]:
    """Pins that the running interpreter's environment does not meet; with `files`, packages with lost files too."""
    installed: dict[str, metadata.Distribution] = {}
    for distribution in metadata.distributions():
        name: str | None = distribution.metadata["Name"]  # None where an interrupted install left a folder behind
        if name:  # the first on the path is the one that is imported; setuptools puts old copies of others at its end
            installed.setdefault(normalise(name), distribution)
    problems: list[Problem] = []
    for name, wanted in pins.items():
        found = installed.get(name)
        if found is None:
            problems.append(Problem(name=name, wanted=wanted, found=None))
        elif found.version != wanted:
            problems.append(Problem(name=name, wanted=wanted, found=found.version))
        elif files and (lost := _lost_file(found)) is not None:
            problems.append(Problem(name=name, wanted=wanted, found=wanted, missing_file=lost))
    return problems


def _lost_file(distribution: metadata.Distribution) -> str | None:
    """The first recorded file that is not on disk; bytecode does not count. No record at all counts as one."""
    recorded: Iterable[metadata.PackagePath] | None = distribution.files
    if recorded is None:
        return "RECORD"
    for entry in recorded:
        if entry.suffix != ".pyc" and not Path(str(entry.locate())).exists():
            return str(entry)
    return None


def main(arguments: list[str]) -> int:
    """Print what differs from the lock named in `arguments`; 0 if nothing does."""
    problems = check(read_lock(Path(arguments[0])), files=True)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
