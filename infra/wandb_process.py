"""The process that W&B runs in, so that nothing that happens to it or to its service reaches the run.

Started by `WandbSink` as a script. Reads requests from standard input, one JSON object a line, and answers each on
standard output: {"ok": true, "note"?: ...} once W&B's service has taken it in, or {"error": ..., "fatal": ...}. Imports
nothing of this project.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

FINISH_S = 30
"""For what is left when the run's process is gone."""


def start(setup: Mapping[str, Any]) -> tuple[Any, str | None]:
    """The W&B run, and what is to be said about its start."""
    import wandb

    wandb.setup(settings=wandb.Settings(silent=True))
    try:
        return _init(wandb, setup, setup["mode"]), None
    except Exception as e:  # online needs network and a valid key; offline needs neither
        if setup["mode"] == "offline":
            raise
        wandb.teardown()  # else the service holds the run id of the failed start
        return _init(wandb, setup, "offline"), f"online start failed ({type(e).__name__}: {e}); going on offline"


def _init(wandb: Any, setup: Mapping[str, Any], mode: str) -> Any:
    run = wandb.init(
        project=setup["project"],
        entity=setup["entity"],
        dir=setup["dir"],
        name=setup["name"],
        id=setup["id"],
        # Offline runs cannot look at the server; syncing folders with one id appends them to one run.
        resume="allow" if mode == "online" else None,
        mode=mode,
        config=setup["config"],
        settings=wandb.Settings(silent=True, console="off", init_timeout=30.0),
    )
    # A resumed run repeats steps after its checkpoint; an explicit axis keeps W&B from refusing them.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def log(run: Any, step: int, scalars: Mapping[str, float], histograms: Mapping[str, list[float]]) -> None:
    """One step, taken in by the service: it answers requests in order, and its summary has the step then."""
    import wandb

    rows: dict[str, Any] = {"step": step, **scalars}
    for name, values in histograms.items():
        finite = [v for v in values if math.isfinite(v)]
        if finite:
            rows[f"{name}_histogram"] = wandb.Histogram(finite)
    run.log(rows)
    ping(run)


def ping(run: Any) -> None:
    """Raises RuntimeError if the service does not answer."""
    if not dict(run.summary):
        raise RuntimeError("its service does not answer")


def finish(run: Any) -> None:
    """All of it, as far as its files: `Run.finish` can return before the service has written a line of them, and the
    service ends with this process."""
    import wandb

    run.finish()
    wandb.teardown()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # W&B prints
    run: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        kind = request.pop("kind")
        answer: dict[str, Any] = {"ok": True}
        try:
            if kind == "start":
                run, note = start(request)
                answer["note"] = note
            elif kind == "log":
                log(run, **request)
            elif kind == "alert":
                run.alert(**request)
            elif kind == "ping":
                ping(run)
            else:
                finish(run)
        except Exception as e:  # the one place where W&B's failures end
            answer = {"error": f"{type(e).__name__}: {e}", "fatal": kind == "start"}
        print(json.dumps(answer), file=answers, flush=True)
        if kind == "finish" or "error" in answer:
            os._exit(0)  # W&B's own exit would wait for its service
    if run is not None:
        signal.alarm(FINISH_S)
        finish(run)


if __name__ == "__main__":
    main()
