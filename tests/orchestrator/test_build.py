"""Running the driver: how its failures and its end by signal come out."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from infra.errors import EngineError, GagarError
from orchestrator.build import run_loop


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
