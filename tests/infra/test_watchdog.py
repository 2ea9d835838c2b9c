"""A run that stands still is seen, named and ended, whatever holds it: a wait, the event loop, or native code."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from infra.actors import ScriptedActor, ScriptedActors
from infra.pool import ActorPool
from infra.stacks import Process, driver_stacks
from infra.waits import Waits
from infra.watchdog import EXIT_STALLED, PoolReport, Watchdog, report

STUCK = """
import asyncio, ctypes, sys, time
from pathlib import Path
from infra.waits import Waits
from infra.watchdog import Watchdog

def a_call_that_blocks():
    {blocks}

async def main():
    await asyncio.sleep(0.1)
    a_call_that_blocks()

watchdog = Watchdog(
    Path(sys.argv[1]), Waits(), stall_after_s=0.4, abort_after_s=1.2, leave_s=0.5,
    say=lambda text: print(text, flush=True), ended=lambda text: Path(sys.argv[1], "ended").write_text(text),
    collect=lambda: ([], []),
)
watchdog.start()
asyncio.run(watchdog.attended(main()))
"""


def watchdog(folder: Path, said: list[str], **changes: float) -> Watchdog:
    times = {"stall_after_s": 0.2, "abort_after_s": 60.0, **changes}
    return Watchdog(folder, Waits(), say=said.append, ended=said.append, collect=lambda: ([], []), **times)


def stuck(folder: Path, blocks: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", STUCK.format(blocks=blocks), str(folder)], capture_output=True, text=True, timeout=60
    )


def until(condition: object, timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)


async def a_hopeless_wait() -> None:
    await asyncio.Event().wait()


def test_a_wait_is_named_with_its_loop_its_object_and_its_age(tmp_path: Path) -> None:
    said: list[str] = []
    dog = watchdog(tmp_path, said)

    async def main() -> None:
        with dog.waits.on("grading", "a free slot of the grader pool", lambda: "8 of 8 slots taken"):
            task = asyncio.create_task(a_hopeless_wait())
            await asyncio.to_thread(until, lambda: len(said) >= 2)
            task.cancel()

    dog.start()
    asyncio.run(dog.attended(main()))
    dog.close()
    assert "grading waits for a free slot of the grader pool since 0 s (8 of 8 slots taken)" in said[0]
    assert "blocked" not in said[0]
    (folder,) = (tmp_path / "stacks").iterdir()
    stacks = (folder / "driver.txt").read_text()
    assert "a_hopeless_wait" in stacks, "the task's own coroutine"
    assert "Event.wait" in stacks, "and what it waits in"
    assert (folder / "waits.txt").read_text().strip() == said[0]


def test_stacks_are_kept_once_a_stall_and_what_moves_is_no_stall(tmp_path: Path) -> None:
    said: list[str] = []
    dog = watchdog(tmp_path, said)

    async def main() -> None:
        for _ in range(20):  # slower than a tick, faster than a stall
            dog.moved()
            await asyncio.sleep(0.05)
        assert said == []
        await asyncio.to_thread(until, lambda: sum("no progress" in text for text in said) >= 3)

    dog.start()
    asyncio.run(dog.attended(main()))
    dog.close()
    assert sum(text.startswith("stacks of") for text in said) == 1
    assert len(list((tmp_path / "stacks").iterdir())) == 1


def test_a_run_that_never_stood_still_leaves_no_folder(tmp_path: Path) -> None:
    dog = watchdog(tmp_path, [], stall_after_s=60.0)
    dog.start()
    dog.close()
    assert list(tmp_path.iterdir()) == []


def test_a_blocked_event_loop_is_named_and_ended(tmp_path: Path) -> None:
    ended = stuck(tmp_path, "time.sleep(60)")
    assert ended.returncode == EXIT_STALLED, ended.stderr
    assert "the event loop is blocked" in ended.stdout
    assert "--resume" in ended.stderr and ended.stderr.startswith("gagar: nothing moved for")
    assert "the event loop is blocked" in (tmp_path / "ended").read_text()
    (stacks,) = (tmp_path / "stacks").glob("*/driver.txt")
    assert "a_call_that_blocks" in stacks.read_text()
    assert not (tmp_path / "stacks" / "interpreter.txt").exists(), "that is for native code"


def test_a_blocked_event_loop_is_told_before_a_patient_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.watchdog._BLOCKED_S", 1.5)
    said: list[str] = []
    dog = watchdog(tmp_path, said, stall_after_s=30.0)

    async def main() -> None:
        await asyncio.sleep(0.1)
        time.sleep(3.5)  # noqa: ASYNC251
        await asyncio.sleep(1.0)

    dog.start()
    asyncio.run(dog.attended(main()))
    dog.close()
    assert len(said) == 2 and "the event loop is blocked since" in said[0]


def test_only_the_newest_stacks_are_kept(tmp_path: Path) -> None:
    for day in range(10, 35):
        (tmp_path / "stacks" / f"20000101-0000{day}").mkdir(parents=True)
    dog = watchdog(tmp_path, [])
    kept = dog._write("text", [], [])
    left = sorted(path.name for path in (tmp_path / "stacks").iterdir())
    assert len(left) == 20 and kept.name == left[-1] and "20000101-000034" in left


def test_a_run_that_is_told_to_end_and_does_not_is_ended(tmp_path: Path) -> None:
    """The event loop runs, and nothing moves: the scheduler would have raised by then."""
    script = STUCK.format(blocks="pass").replace("await asyncio.sleep(0.1)", "await asyncio.sleep(60)")
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert ended.returncode == EXIT_STALLED
    assert "did not end within 0.5 s" in ended.stderr


def test_native_code_that_keeps_the_interpreter_is_ended_by_the_c_runtime(tmp_path: Path) -> None:
    ended = stuck(tmp_path, "ctypes.PyDLL(None).sleep(60)")  # PyDLL does not let go of the interpreter's lock
    assert ended.returncode == 1
    assert "a_call_that_blocks" in (tmp_path / "stacks" / "interpreter.txt").read_text()


def test_a_pool_names_its_oldest_call_and_the_process_behind_it() -> None:
    process = Process(
        actor_id="aa",
        pid=17,
        node="n",
        host="far",
        title="ray::RolloutWorker.rollout",
        state="T (stopped by a signal)",
        waits_in="do_signal_stop",
        stacks="",
    )
    pool = PoolReport(name="rollout", sizes="2 live", actor="rollout-1", method="rollout", age_s=71.0, actor_id="aa")
    text = report("still", [], [pool], [process])
    assert "pool rollout: 2 live; its oldest call: rollout on rollout-1 since 71 s, pid 17 on far, T (stopped" in text
    assert "ray::RolloutWorker.rollout (pid 17 on far) did not write its stacks: T (stopped by a signal)" in text
    assert "do_signal_stop" in process.text() and "did not write its stacks" in process.text()


async def test_the_oldest_call_of_a_pool() -> None:
    class Worker:
        async def hang(self) -> None:
            await asyncio.Event().wait()

    pool = ActorPool("p", lambda _: ScriptedActor(Worker()), size=2, slots=1, actors=ScriptedActors())
    await pool.ready()
    assert pool.oldest_call() is None
    first = asyncio.create_task(pool.call("hang"))
    await asyncio.sleep(0.05)
    second = asyncio.create_task(pool.call("hang"))
    await asyncio.sleep(0)
    oldest = pool.oldest_call()
    assert oldest is not None and (oldest.actor, oldest.method) == ("p-0", "hang") and oldest.age_s >= 0.05
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    newer = pool.oldest_call()
    assert newer is not None and newer.actor == "p-1"
    second.cancel()
    await pool.shutdown()


async def test_equal_stacks_are_told_once_with_their_number() -> None:
    tasks = [asyncio.create_task(a_hopeless_wait()) for _ in range(30)]
    await asyncio.sleep(0)
    text = await asyncio.to_thread(driver_stacks, asyncio.get_running_loop())
    assert "30 x task" in text and text.count("a_hopeless_wait") == 1
    for task in tasks:
        task.cancel()


def test_the_table_of_waits_can_be_read_while_it_changes() -> None:
    waits, stop = Waits(), threading.Event()

    def change() -> None:
        while not stop.is_set():
            with waits.on("a", "b"), waits.on("c", "d"):
                pass

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(2_000):
            assert len(waits.now()) <= 2
    finally:
        stop.set()
        changing.join()
    assert waits.now() == []


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("changed")])
def test_figures_that_cannot_be_had_do_not_hide_the_wait(error: Exception) -> None:
    def detail() -> str:
        raise error

    waits = Waits()
    with waits.on("admission", "room", detail):
        text = report("still", waits.now(), [], [])
    assert f"admission waits for room since 0 s (unknown: {type(error).__name__})" in text
