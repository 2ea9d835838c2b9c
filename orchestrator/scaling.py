"""The loop that gives a running run other pool sizes: those that `gagar scale` asks for, and those of the policy.

Consumes the control file and what the pools say of themselves; produces new targets of the pools, answers, figures and
one line for each change. Waits for nothing but the clock; a fault of its own costs scaling, never the run.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Protocol

from configs.schema import AutoscaleConfig, ScalingConfig
from infra.errors import ConfigError
from infra.members import PoolState
from orchestrator.autoscale import PoolView, Trend, policy
from orchestrator.control import ANSWER, REQUEST, AnswerState, PoolAnswer, ScaleAnswer, ScaleRequest, read, write

PERIOD_S = 1.0


class Full:
    """How long every slot of a pool has been in use. Where work is admitted only as slots come free, as for rollouts,
    this is how long the next piece of it has waited."""

    def __init__(self, pool: Elastic) -> None:
        self._pool = pool
        self._since_s: float | None = None

    def __call__(self, now_s: float) -> float:
        """Seconds, at `now_s` of a clock that does not change between calls; to be asked about once a second."""
        state = self._pool.state()
        if state.busy < state.slots:
            self._since_s = None
            return 0.0
        self._since_s = now_s if self._since_s is None else self._since_s
        return now_s - self._since_s


class Elastic(Protocol):
    """A pool whose size can change: `ActorPool` and `EnginePool`."""

    slots: int
    """Of one actor."""
    handed_back: int

    def state(self) -> PoolState:
        """Sizes now."""
        ...

    def resize(self, size: int, *, drain_s: float) -> None:
        """A new size, in the background. Raises ConfigError where the pool cannot have it."""
        ...


class Scaling:
    """One run's."""

    def __init__(
        self,
        *,
        run_dir: Path,
        pools: Mapping[str, Elastic],
        config: ScalingConfig,
        queue_s: Callable[[str], float] = lambda _: 0.0,
        most: Mapping[str, int] | None = None,
        say: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`queue_s(pool)`: how long the oldest piece of work has waited for a slot; `most`: pools that cannot be as
        large as `scaling.max_actors`."""
        self._run_dir = run_dir
        self._pools = dict(pools)
        self._config = config
        self._queue_s = queue_s
        self._most = dict(most or {})
        self._say = say
        self._clock = clock
        self._seen = ""
        """Id of the last request."""
        self._at_work: tuple[ScaleRequest, dict[str, PoolState], dict[str, int], float] | None = None
        """The request, how the pools were, calls they had given back, and when it was read."""
        self._trends = {name: Trend(changed_s=clock()) for name in pools}
        self._samples: dict[str, list[float]] = defaultdict(list)
        self._told = ""

    async def run(self) -> None:
        """Looks once a second."""
        while True:
            try:
                self.tick()
            except Exception as e:  # the one broad catch here: no fault of scaling may cost the run
                if str(e) != self._told:
                    self._told = str(e)
                    self._say(f"scaling: {self._told or type(e).__name__}")
            await asyncio.sleep(PERIOD_S)

    def tick(self) -> None:
        """One look. Raises StorageError."""
        for name, limits in (("rollout", self._config.rollout), ("grader", self._config.grader)):
            if name in self._pools:
                self._measure(name)
                if limits is not None and self._at_work is None:
                    self._autoscale(name, limits)
        request = read(self._run_dir / REQUEST, ScaleRequest)
        if request is not None and request.id != self._seen:
            self._seen = request.id
            self._take(request)
        self._answer()

    def scalars(self) -> dict[str, float]:
        """`pool/<name>/...` over the seconds since the last call, for the metrics of a step."""
        scalars = {name: fmean(values) for name, values in self._samples.items()}
        self._samples.clear()
        for name, pool in self._pools.items():
            scalars[f"pool/{name}/size"] = float(pool.state().live)
        return scalars

    # ---- asked for --------------------------------------------------------------------------------------------------

    def _take(self, request: ScaleRequest) -> None:
        if self._at_work is not None:
            self._tell(self._at_work[0].id, "superseded", text="another request came")
            self._at_work = None
        if (why := self._refusal(request)) is not None:
            self._tell(request.id, "refused", text=why)
            return
        drain_s = self._config.drain_s if request.drain_s is None else request.drain_s
        was = {name: self._pools[name].state() for name in request.sizes}
        given = {name: self._pools[name].handed_back for name in request.sizes}
        try:
            for name, size in request.sizes.items():
                self._resize(name, size, drain_s, "asked for")
        except ConfigError as e:
            self._tell(request.id, "refused", text=str(e))
            return
        self._at_work = (request, was, given, self._clock())

    def _refusal(self, request: ScaleRequest) -> str | None:
        if request.drain_s is not None and request.drain_s < 0.0:
            return f"{request.drain_s:g} s to drain: give 0 or more"
        for name, size in request.sizes.items():
            if name not in self._pools:
                return f"there is no pool {name!r}; this run has {', '.join(self._pools)}"
            if size < 1:
                return f"{name}={size}: a pool needs at least one actor; stop the run to have none"
            limits = self._limits(name)
            if limits is not None and not limits.min <= size <= limits.max:
                return f"{name}={size} is outside scaling.{name}, which keeps it from {limits.min} to {limits.max}"
            most = self._most.get(name, self._config.max_actors)
            if size > most:
                why = "scaling.max_actors" if name not in self._most else f"the configuration of the {name} pool"
                return f"{name}={size} is more than {most}, the most that {why} allows"
        return None

    def _answer(self) -> None:
        if self._at_work is None:
            return
        request, was, given, since_s = self._at_work
        states = {name: self._pools[name].state() for name in request.sizes}
        pools = {
            name: PoolAnswer(
                was=was[name].target,
                target=s.target,
                live=s.live,
                starting=s.starting,
                draining=s.draining,
                handed_back=self._pools[name].handed_back - given[name],
            )
            for name, s in states.items()
        }
        stuck = [name for name, s in states.items() if not (s.settled or s.starting or s.draining)]
        state: AnswerState = "working"
        text = ""
        if all(s.settled for s in states.values()):
            state = "done"
        elif stuck and all(s.settled or name in stuck for name, s in states.items()):
            state = "failed"
            text = ", ".join(f"{name} stays at {states[name].live} of {states[name].target}" for name in stuck)
            text += ": new actors did not start, and the run's own output says why; asking again tries again"
        effect_s = self._clock() - since_s
        if state != "working":
            self._at_work = None
            changes = ", ".join(f"{name} {p.was} -> {p.live}" for name, p in pools.items())
            self._say(f"scaled in {effect_s:.1f} s: {changes}" + (f"; {text}" if text else ""))
        answer = ScaleAnswer(id=request.id, state=state, text=text, pools=pools, effect_s=effect_s)
        write(self._run_dir / ANSWER, answer)

    def _tell(self, request_id: str, state: AnswerState, *, text: str) -> None:
        self._say(f"scaling {state}: {text}")
        write(self._run_dir / ANSWER, ScaleAnswer(id=request_id, state=state, text=text))

    # ---- by policy --------------------------------------------------------------------------------------------------

    def _autoscale(self, name: str, limits: AutoscaleConfig) -> None:
        state = self._pools[name].state()
        view = PoolView(
            size=state.target,
            settled=state.settled,
            slots_per_actor=self._pools[name].slots,
            busy=state.busy,
            slots=state.slots,
            queue_s=self._queue_s(name),
        )
        size, self._trends[name] = policy(view, self._trends[name], limits, self._config.cooldown_s, self._clock())
        if size != state.target:
            why = f"{view.busy} of {view.slots} slots busy, oldest wait {view.queue_s:.0f} s"
            self._resize(name, size, self._config.drain_s, why)

    def _measure(self, name: str) -> None:
        state = self._pools[name].state()
        self._samples[f"pool/{name}/busy"].append(float(state.busy))
        self._samples[f"pool/{name}/queue_s"].append(self._queue_s(name))

    def _resize(self, name: str, size: int, drain_s: float, why: str) -> None:
        was = self._pools[name].state().target
        self._pools[name].resize(size, drain_s=drain_s)
        self._trends[name] = Trend(changed_s=self._clock())
        self._say(f"pool {name}: {was} -> {size} ({why})")

    def _limits(self, name: str) -> AutoscaleConfig | None:
        return {"rollout": self._config.rollout, "grader": self._config.grader}.get(name)
