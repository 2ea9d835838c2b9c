"""Checkpoints of the scheduler: what a resume finds is of one moment."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from scripted import MemoryLog, Run, ScriptedLearner, run_config

from infra.errors import StorageError
from infra.storage import Storage
from orchestrator.checkpoint import Checkpoints, cut_logs


def test_a_group_that_ends_while_weights_are_written_leaves_the_log_on_resume(tmp_path: Path) -> None:
    log = tmp_path / "groups.jsonl"
    log.write_text("before\n")

    class SlowLearner(ScriptedLearner):
        async def save(self, path: Path) -> None:
            await super().save(path)
            with log.open("a") as file:  # its task is among those that the state says to sample again
                file.write("during\n")

    checkpoints = Checkpoints(tmp_path, keep=1)
    asyncio.run(checkpoints.save(1, cast(Any, SlowLearner()), {"mixer": {}}))
    checkpoint = checkpoints.latest()
    assert checkpoint is not None
    assert checkpoint.state["logs"] == {"groups.jsonl": 7}
    cut_logs(tmp_path, checkpoint.state["logs"])
    assert log.read_text() == "before\n"


def test_a_log_shorter_than_at_the_checkpoint_is_not_filled_up(tmp_path: Path) -> None:
    (tmp_path / "spans.jsonl").write_text("{}\n")
    cut_logs(tmp_path, {"spans.jsonl": 100})
    assert (tmp_path / "spans.jsonl").read_bytes() == b"{}\n"


# ---- damage ----------------------------------------------------------------------------------------------------------


class FilesLearner(ScriptedLearner):
    """Writes what a learner does: state in a folder of its own, a policy folder."""

    async def save(self, path: Path) -> None:
        (path / "state").mkdir(parents=True)
        (path / "state" / "optim.pt").write_bytes(bytes(range(256)) * 40)
        (path / "rank.json").write_text('{"steps": 1}\n')

    async def export_hf(self, path: Path) -> None:
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"w" * 5000)
        (path / "config.json").write_text("{}")


def saved(run_dir: Path, steps: Sequence[int] = (1, 2), *, keep: int = 3) -> Checkpoints:
    checkpoints = Checkpoints(run_dir, keep=keep)
    for step in steps:
        (run_dir / "metrics.jsonl").write_text('{"step": 0}\n' * step)
        asyncio.run(checkpoints.save(step, cast(Any, FilesLearner()), {"mixer": {}, "ledger": 10 * step}))
    return checkpoints


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def garble(path: Path) -> None:
    path.write_bytes(b"\x00not json")


Damage = Callable[[Path], None]
POISONS: list[tuple[str, Damage, str]] = [
    ("learner/state/optim.pt", cut, "has 10239 bytes, 10240 were written"),
    ("learner/state/optim.pt", grow, "has 10241 bytes, 10240 were written"),
    ("learner/state/optim.pt", flip, "content is not what was written"),
    ("learner/state/optim.pt", Path.unlink, "is missing"),
    ("policy/model.safetensors", flip, "content is not what was written"),
    ("policy/config.json", Path.unlink, "is missing"),
    ("state.json", cut, "bytes"),
    ("state.json", flip, "content is not what was written"),
    ("state.json", garble, "bytes"),
    ("state.json", Path.unlink, "is missing"),
    ("manifest.json", Path.unlink, "is missing"),
    ("manifest.json", garble, "damaged"),
    ("manifest.json", lambda p: p.write_bytes(p.read_bytes()[:100]), "damaged"),
    ("manifest.json", lambda p: p.write_text("{}"), "damaged"),
    ("manifest.json", lambda p: p.write_text('["step"]'), "damaged"),
]


@pytest.mark.parametrize(("name", "damage", "said"), POISONS, ids=[f"{n}-{s[:20]}" for n, _, s in POISONS])
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_used(
    tmp_path: Path, name: str, damage: Damage, said: str
) -> None:
    checkpoints = saved(tmp_path)
    before = checkpoints.latest()
    assert before is not None and before.step == 2, "whole as written"
    bad = tmp_path / "checkpoints" / "step-000002" / name
    damage(bad)
    told: list[str] = []
    found = checkpoints.latest(say=told.append)
    assert found is not None and found.step == 1
    assert str(bad) in told[0] and said in told[0]
    assert "going back to checkpoint step-000001" in told[1]
    checkpoints.set_aside(found.step)
    cut_logs(tmp_path, found.state["logs"])
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0}\n', "the logs are those of the older one"


def test_where_none_is_whole_the_error_says_what_helps(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path)
    for step in ("step-000001", "step-000002"):
        flip(tmp_path / "checkpoints" / step / "policy" / "model.safetensors")
    with pytest.raises(StorageError, match=r"no checkpoint can be used .*model\.safetensors.*and 1 more.*without"):
        checkpoints.latest()


def test_refused_ones_are_not_counted_among_those_that_are_kept(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, (5, 10), keep=2)
    flip(tmp_path / "checkpoints" / "step-000010" / "state.json")
    found = checkpoints.latest()
    assert found is not None and found.step == 5
    checkpoints.set_aside(5)
    assert (tmp_path / "checkpoints" / "step-000010.broken").is_dir()
    (tmp_path / "checkpoints" / ".step-000099.part").mkdir()
    checkpoints = saved(tmp_path, (7,), keep=2)  # written more often now
    names = sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*"))
    assert names == ["step-000005", "step-000007"]
    newest = checkpoints.latest()
    assert newest is not None and newest.step == 7


def test_as_many_are_kept_as_asked_for_and_the_oldest_says_what_can_be_forgotten(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, (1, 2, 3, 4), keep=2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-000003", "step-000004"]
    assert checkpoints.oldest_mark() == 30
    (tmp_path / "checkpoints" / "step-000003" / "state.json").write_text("?")
    assert checkpoints.oldest_mark() == 0, "then nothing can"
    assert Checkpoints(tmp_path / "new", keep=2).oldest_mark() == 0


def test_one_that_is_killed_while_it_is_removed_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(folder: Path, ignore_errors: bool = False) -> None:
        """Half done."""
        (folder / "rank.json").unlink(missing_ok=True)

    saved(tmp_path, (1, 2), keep=2)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        saved(tmp_path, (3,), keep=2)
    assert [p.name for p in sorted((tmp_path / "checkpoints").glob("step-*"))] == ["step-000002", "step-000003"]
    saved(tmp_path, (4,), keep=2).set_aside(4)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-000003", "step-000004"]


def test_too_little_space_is_seen_before_the_ranks_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = saved(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    learner = FilesLearner()
    learner.save = None  # type: ignore[assignment]  # would fail if it were called
    with pytest.raises(StorageError, match=r"step-000003\.part: a checkpoint takes 0 MiB and 0 MiB are free"):
        asyncio.run(checkpoints.save(3, cast(Any, learner), {"mixer": {}}))
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-000001", "step-000002"]


def test_a_full_disk_is_waited_for_and_the_state_is_that_of_the_first_try(tmp_path: Path) -> None:
    storage = Storage()
    seen: list[int] = []

    class Full(FilesLearner):
        async def save(self, path: Path) -> None:
            seen.append(len(storage.faults()))
            if len(seen) < 3:
                path.mkdir()
                (path / "half").write_bytes(b"x")
                raise OSError(errno.ENOSPC, "No space left on device")
            await super().save(path)

    (tmp_path / "metrics.jsonl").write_text("{}\n")
    checkpoints = Checkpoints(tmp_path, keep=1, storage=storage)
    asyncio.run(checkpoints.save(1, cast(Any, Full()), {"mixer": {}}))
    assert seen == [0, 1, 1] and storage.faults() == () and storage.faults_total == 1
    found = checkpoints.latest()
    assert found is not None and found.state["logs"] == {"metrics.jsonl": 3}
    assert not (found.learner / "half").exists()


def test_the_oldest_checkpoint_brings_back_what_ended_since(tmp_path: Path) -> None:
    """Two checkpoints; the newer one is damaged: groups that ended between them come back, with their rollouts."""
    config = run_config(steps=2, checkpoint={"every_steps": 1, "keep": 2})
    log = MemoryLog()
    run = Run(tmp_path, config, log=log, keep=2)
    lines = run.go()
    between = {g["group_id"] for g in lines if g["outcome"] == "trained" and g["step"] == 2}
    checkpoints = Checkpoints(tmp_path, keep=2)
    flip(tmp_path / "checkpoints" / "step-000002" / "learner" / "steps")
    found = checkpoints.latest()
    assert found is not None and found.step == 1
    assert log.forgotten == found.state["ledger"]
    left = {k.group_id for k in log.load(found.state["ledger"], checkpoints.oldest_mark())}
    assert between <= left
    assert not left & {g["group_id"] for g in lines if g["outcome"] == "trained" and g["step"] == 1}


def test_a_resume_has_the_same_mixer_and_ledger(tmp_path: Path) -> None:
    config = run_config(steps=2)
    log = MemoryLog()
    run = Run(tmp_path, config, log=log)
    run.go()
    checkpoint = Checkpoints(tmp_path, keep=1).latest()
    assert checkpoint is not None
    left = log.load(checkpoint.state["ledger"])
    again = Run(tmp_path, config, log=log, kept=left, checkpoint=checkpoint)
    pending: dict[str, list[int]] = {}
    for k in left:
        pending.setdefault(k.source, []).append(k.index)
    was = checkpoint.state["mixer"]
    assert json.loads(json.dumps(again.mixer.state(pending))) == was
    assert {k.group_id for k in left} == {f"{s}-{i:06d}" for s, v in pending.items() for i in v}
