"""Copies of checkpoints elsewhere: whole or not there, and enough to go on from."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import fsspec
import pytest
from scripted import ScriptedLearner, run_config

from configs.check import find_problems
from infra.errors import ConfigError, StorageError
from orchestrator import mirror as mirror_module
from orchestrator.checkpoint import Checkpoints
from orchestrator.mirror import Mirror, make_mirror
from orchestrator.runfiles import LEDGER


class FilesLearner(ScriptedLearner):
    """Writes what a learner does, told apart by the step."""

    weights = b"w"

    async def save(self, path: Path) -> None:
        (path / "state").mkdir(parents=True)
        (path / "state" / "optim.pt").write_bytes(bytes(range(256)) * 40)

    async def export_hf(self, path: Path) -> None:
        path.mkdir()
        (path / "model.safetensors").write_bytes(self.weights * 5000)


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An object store, and a shared folder."""
    yield f"memory://bucket/{tmp_path.name}" if request.param == "memory" else f"file://{tmp_path}/shared"
    fsspec.filesystem("memory").store.clear()


def saved(run_dir: Path, copies: Mirror, *steps: int, keep: int = 2) -> None:
    """A run that writes these checkpoints, with logs and a ledger."""

    async def run() -> None:
        checkpoints = Checkpoints(run_dir, keep=keep, copies=copies)
        learner = FilesLearner()
        for step in steps:
            with (run_dir / "metrics.jsonl").open("a") as log:
                log.write(json.dumps({"step": step}) + "\n")
            learner.weights = str(step).encode()
            await checkpoints.save(step, cast(Any, learner), {"mixer": {}, "ledger": step})
            with (run_dir / "metrics.jsonl").open("a") as log:
                log.write("after the checkpoint\n")
        await copies.finish(20)

    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text("name: x\n")
    with sqlite3.connect(run_dir / LEDGER) as ledger:
        ledger.execute("CREATE TABLE IF NOT EXISTS groups (number INTEGER)")
        ledger.execute("INSERT INTO groups VALUES (7)")
    ledger.close()
    asyncio.run(run())


def test_a_run_whose_folder_is_gone_goes_on_from_the_newest_copy(url: str, tmp_path: Path) -> None:
    said: list[str] = []
    saved(tmp_path / "here", Mirror(url, "x", keep=2), 1, 2, 3)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert Mirror(url, "x", keep=2, say=said.append).restore(elsewhere) == 3
    assert said == [f"checkpoint 3 was brought back from {url}/x"]
    found = Checkpoints(elsewhere, keep=2).latest()
    assert found is not None and found.step == 3
    assert (found.policy / "model.safetensors").read_bytes() == b"3" * 5000
    assert (found.learner / "state" / "optim.pt").read_bytes() == bytes(range(256)) * 40
    # The log is as long as it was at the checkpoint, and the ledger is there.
    assert (elsewhere / "metrics.jsonl").stat().st_size == found.state["logs"]["metrics.jsonl"]
    assert (elsewhere / "metrics.jsonl").read_text().splitlines()[-1] == '{"step": 3}'
    with sqlite3.connect(elsewhere / LEDGER) as ledger:
        assert ledger.execute("SELECT number FROM groups").fetchall() == [(7,)]
    ledger.close()


def test_only_the_newest_copies_stay(url: str, tmp_path: Path) -> None:
    copies = Mirror(url, "x", keep=2)
    saved(tmp_path / "here", copies, 1, 2, 3)
    assert copies._steps() == [2, 3]
    # Another history that begins at an earlier step: what it does not know goes.
    saved(tmp_path / "again", Mirror(url, "x", keep=2), 2)
    assert copies._steps() == [2]


def test_a_copy_without_its_manifest_does_not_count(url: str, tmp_path: Path) -> None:
    copies = Mirror(url, "x", keep=2)
    saved(tmp_path / "here", copies, 1, 2)
    copies._fs.rm_file(f"{copies._root}/step-000002/manifest.json")
    assert Mirror(url, "x", keep=2).restore(tmp_path / "elsewhere") == 1


def test_the_manifest_is_written_last(url: str, tmp_path: Path) -> None:
    """Whatever interrupts a copy, it is not taken for a whole one."""
    copies, order = Mirror(url, "x", keep=2), []
    put = copies._put
    copies._put = lambda pair: (order.append(pair[1].rsplit("/", 1)[-1]), put(pair))[1]  # type: ignore[method-assign]
    saved(tmp_path / "here", copies, 1)
    assert order[-1] == "manifest.json" and order.count("manifest.json") == 1
    assert {"optim.pt", "model.safetensors", "state.json", "metrics.jsonl", LEDGER} < set(order)


def test_a_damaged_copy_is_refused_for_the_one_before(url: str, tmp_path: Path) -> None:
    said: list[str] = []
    copies = Mirror(url, "x", keep=2, say=said.append)
    saved(tmp_path / "here", copies, 1, 2)
    copies._fs.pipe_file(f"{copies._root}/step-000002/policy/model.safetensors", b"2" * 4999 + b"3")
    elsewhere = tmp_path / "elsewhere"
    assert copies.restore(elsewhere) == 1
    assert "the copy of checkpoint 2 is refused" in said[0] and "SHA-256 differs" in said[0]
    assert [path.name for path in (elsewhere / "checkpoints").iterdir()] == ["step-000001"]
    copies._fs.rm_file(f"{copies._root}/step-000001/state.json")
    with pytest.raises(StorageError, match="no copy of a checkpoint can be used"):
        copies.restore(tmp_path / "third")


def test_copies_of_an_earlier_run_of_the_name_are_kept_and_not_gone_on_from(url: str, tmp_path: Path) -> None:
    copies = Mirror(url, "x", keep=2)
    assert copies.set_aside() is None
    saved(tmp_path / "here", copies, 1)
    moved = copies.set_aside()
    assert moved is not None
    assert copies._fs.exists(f"{moved}/step-000001/manifest.json")
    assert copies.restore(tmp_path / "elsewhere") is None


def test_storage_that_does_not_answer_is_tried_again_and_the_training_goes_on(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "FIRST_WAIT_S", 0.01)
    said: list[str] = []
    copies = Mirror(url, "x", keep=2, say=said.append)
    put, failures = copies._put, iter([OSError("no route"), OSError("no route")])

    def failing(pair: tuple[Path, str]) -> None:
        if (error := next(failures, None)) is not None:
            raise error
        put(pair)

    monkeypatch.setattr(copies, "_put", failing)
    saved(tmp_path / "here", copies, 1)
    assert copies._steps() == [1]
    assert "cannot be written (OSError: no route); trying again" in said[0]


def test_an_end_without_its_copy_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Mirror(f"file://{tmp_path}/shared", "x", keep=2)

    def down(pair: object) -> None:
        raise OSError("no route")

    monkeypatch.setattr(copies, "_put", down)

    async def run() -> None:
        checkpoints = Checkpoints(tmp_path / "here", keep=2, copies=copies)
        await checkpoints.save(1, cast(Any, FilesLearner()), {"mixer": {}})
        await copies.finish(0.2)

    (tmp_path / "here").mkdir()
    with pytest.raises(StorageError, match=r"shared/x: the last checkpoint could not be copied within 0\.2 s"):
        asyncio.run(run())
    assert Checkpoints(tmp_path / "here", keep=2).latest() is not None


def test_a_scheme_that_nothing_opens_names_the_package() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.mirror=nothing://bucket: cannot be opened"):
        Mirror("nothing://bucket", "x", keep=1)
    assert make_mirror(run_config(), say=print) is None


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("/shared/runs", "is no address"),
        ("s3://", "is no address"),
        ("s3://key:secret@bucket/runs", "may hold a secret"),
        ("https://host/runs?token=abc", "may hold a secret"),
    ],
)
def test_addresses_that_are_refused(address: str, message: str) -> None:
    config = run_config()
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"mirror": address})})
    (problem,) = [found for found in find_problems(config) if found.path == ("checkpoint", "mirror")]
    assert message in problem.message
    assert address not in str(problem) or message == "is no address"
