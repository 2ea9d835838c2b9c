"""Tasks of every format in real jails: M1.2, and what a patch cannot do about its tests."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from configs.schema import JailSandbox
from envs.formats.listing import default_config, read_listing
from envs.formats.records import Record
from envs.formats.validate import Judgement, Outcome, judge, validate
from envs.jail import JailProvider
from envs.patch import unified_diff
from envs.task import RepositoryTests
from envs.tree import RepoTree
from envs.verifier import verify_patch
from infra.errors import VerifierError

TASKS = Path(__file__).parents[1] / "data" / "tasks"
REPOS = TASKS / "repos"


def records(form: str, path: str) -> dict[str, Record]:
    listing = read_listing(default_config(form, TASKS / path, REPOS))
    assert listing.findings == []
    return {record.record_id: record for record in listing.records}


def commit_all(folder: Path) -> None:
    for words in (("init", "-q"), ("add", "-A"), ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "b")):
        subprocess.run(["git", "-C", str(folder), *words], check=True, timeout=60)


@pytest_asyncio.fixture
async def provider() -> AsyncIterator[JailProvider]:
    provider = JailProvider(JailSandbox())
    yield provider
    await provider.close()


@pytest.mark.parametrize(
    ("form", "path"),
    [("folder", "folder"), ("swebench", "swebench.jsonl"), ("mimo", "mimo.jsonl"), ("harbor", "harbor")],
)
async def test_every_shipped_task_fails_at_its_start_and_passes_with_its_solution(
    form: str, path: str, provider: JailProvider, tmp_path: Path
) -> None:
    listed = list(records(form, path).values())
    output = tmp_path / "outcomes.jsonl"
    told: list[Outcome] = []
    outcomes = await validate(
        listed, provider, times=2, at_once=2, output=output, say=lambda done, total, outcome: told.append(outcome)
    )
    assert [(o.record, o.judgement, o.start, o.reference, o.detail) for o in outcomes] == [
        (record.record_id, Judgement.SOUND, (False, False), (True, True), "") for record in listed
    ]
    assert len(output.read_text().splitlines()) == len(listed) == len(told)


async def test_a_patch_cannot_change_the_tests_of_a_row(provider: JailProvider) -> None:
    record = records("swebench", "swebench.jsonl")["acme__clock-1"]
    start = dict(record.task.files)
    rigged = dict(start)
    rigged["tests/test_span.py"] = "import unittest\n\nclass TestSpan(unittest.TestCase):\n    pass\n"
    rigged["unittest.py"] = "print('test_long (tests.test_span.TestSpan) ... ok')\n"
    rigged["sitecustomize.py"] = "raise SystemExit(0)\n"
    verdict = await verify_patch(record.task, unified_diff(start, rigged), provider)
    assert not verdict.passed
    assert verdict.tampered == ("sitecustomize.py", "tests/test_span.py", "unittest.py")
    assert "1 of 2 tests that must pass did" in verdict.log
    assert "test_long (tests.test_span.TestSpan): failed" in verdict.log
    # Beside an honest solution the same changes are put back, and it passes.
    rigged["clock/span.py"] = start["clock/span.py"].replace("100", "60")
    assert (await verify_patch(record.task, unified_diff(start, rigged), provider)).passed


async def test_a_folder_of_tests_that_became_a_link_is_put_back(provider: JailProvider) -> None:
    record = records("swebench", "swebench.jsonl")["acme__clock-1"]
    start = dict(record.task.files)
    gone = {path: text for path, text in start.items() if not path.startswith("tests/")}
    link = (
        "diff --git a/tests b/tests\nnew file mode 120000\nindex 0000000..3594e94\n--- /dev/null\n+++ b/tests\n"
        "@@ -0,0 +1 @@\n+/tmp\n\\ No newline at end of file\n"
    )
    fixed = unified_diff(start, {**gone, "clock/span.py": start["clock/span.py"].replace("100", "60")}) + link
    verdict = await verify_patch(record.task, fixed, provider)
    assert verdict.passed, verdict.log
    assert "tests" in verdict.tampered


async def test_a_reward_that_a_patch_brings_along_is_not_read(provider: JailProvider) -> None:
    record = records("harbor", "harbor")["add-tax"]
    start = dict(record.task.files)
    verdict = await verify_patch(record.task, unified_diff(start, {**start, "reward.txt": "1\n"}), provider)
    assert not verdict.passed and verdict.log.endswith("reward 0")
    assert isinstance(record.task.verifier, RepositoryTests)
    silent = replace(record.task, verifier=replace(record.task.verifier, command="true"))
    verdict = await verify_patch(silent, "", provider)
    assert not verdict.passed and "no readable /logs/verifier/reward.txt" in verdict.log


async def test_a_patch_of_tests_that_does_not_apply_is_a_broken_task_whatever_the_policy_did(
    provider: JailProvider,
) -> None:
    record = records("swebench", "swebench.jsonl")["acme__clock-1"]
    assert isinstance(record.task.verifier, RepositoryTests)
    tests = replace(record.task.verifier, patch=record.task.verifier.patch.replace("test_short", "test_other"))
    broken = replace(record.task, verifier=tests)
    with pytest.raises(VerifierError, match=r"acme__clock-1 could not run: the sandbox did not take the tests"):
        await verify_patch(broken, record.task.reference_patch or "", provider)
    outcome = await judge(replace(record, task=broken), provider, times=1)
    assert outcome.judgement is Judgement.LOST


async def test_a_commit_of_a_clone_reaches_the_jail_with_modes_links_and_bytes(
    provider: JailProvider, tmp_path: Path
) -> None:
    clone = tmp_path / "clone"
    shutil.copytree(REPOS / "acme__clock-1", clone)
    (clone / "logo.bin").write_bytes(bytes(range(256)))
    (clone / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (clone / "run.sh").chmod(0o755)
    (clone / "link").symlink_to("run.sh")
    (clone / ".gitattributes").write_text("tests export-ignore\n")
    commit_all(clone)
    (clone / "clock" / "span.py").unlink()
    tree = RepoTree(path=str(clone), commit="HEAD")
    assert "tests/test_span.py" in tree and "clock/span.py" in tree and len(tree) == 8
    record = records("swebench", "swebench.jsonl")["acme__clock-1"]
    assert isinstance(record.task.verifier, RepositoryTests)
    look = "sha256sum logo.bin | cut -c1-8 && ./run.sh && readlink link && git status --short && exit 7"
    task = replace(record.task, files=tree, verifier=replace(record.task.verifier, command=look, patch=""))
    verdict = await verify_patch(task, "", provider)
    assert "40aff2e9\nran\nrun.sh\n" in verdict.log


async def test_outcomes_that_are_known_are_not_run_again(provider: JailProvider, tmp_path: Path) -> None:
    record = records("mimo", "mimo.jsonl")["mail-1"]
    assert isinstance(record.task.verifier, RepositoryTests)
    always = replace(record, task=replace(record.task, verifier=replace(record.task.verifier, command="true")))
    output = tmp_path / "outcomes.jsonl"

    async def run(*listed: Record) -> list[Judgement]:
        found = await validate(listed, provider, times=1, at_once=1, output=output, say=lambda *_: None)
        return [outcome.judgement for outcome in found]

    assert await run(always) == [Judgement.START_PASSES]
    assert await run(always) == [Judgement.START_PASSES]
    assert len(output.read_text().splitlines()) == 1
    # Another command is another task.
    assert await run(record) == [Judgement.SOUND]
    assert [json.loads(line)["judgement"] for line in output.read_text().splitlines()] == ["start_passes", "sound"]
