"""Running the driver: how its failures and its end by signal come out."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import ray

from configs.schema import RayConfig
from infra.errors import EngineError, GagarError
from orchestrator.build import _start_ray, run_loop


def test_the_error_of_a_failed_loop_comes_to_the_surface() -> None:
    async def fails() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(30))
            group.create_task(lost())

    async def lost() -> None:
        raise EngineError("the engine is gone")

    with pytest.raises(EngineError, match="the engine is gone"):
        run_loop(fails())


def test_sigterm_shuts_the_parts_down_and_says_how_to_go_on() -> None:
    closed = []

    async def runs() -> None:
        try:
            asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGTERM)
            await asyncio.sleep(30)
        finally:
            closed.append("parts")

    with pytest.raises(GagarError, match=r"SIGTERM.*--resume"):
        run_loop(runs())
    assert closed == ["parts"]


@pytest.mark.parametrize(
    ("address", "failures", "tries", "message"),
    [
        (None, 2, 3, None),
        (None, 3, 3, r"Ray did not start on this machine \(too slow\); if it is busy, try again"),
        ("10.0.0.9:6379", 1, 1, r"ray\.address=10\.0\.0\.9:6379: no cluster answers there \(too slow\)"),
    ],
)
def test_a_ray_that_does_not_start_is_tried_again_and_then_told(
    monkeypatch: pytest.MonkeyPatch, address: str | None, failures: int, tries: int, message: str | None
) -> None:
    calls: list[dict[str, object]] = []

    def init(**options: object) -> None:
        calls.append(options)
        if len(calls) <= failures:
            raise Exception("too slow")  # as Ray raises it

    monkeypatch.setattr(ray, "init", init)
    if message is None:
        _start_ray(RayConfig(address=address), "run")
    else:
        with pytest.raises(GagarError, match=message):
            _start_ray(RayConfig(address=address), "run")
    assert len(calls) == tries
