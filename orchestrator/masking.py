"""How many rollouts are lost to infrastructure, and when that is too many to train on what is left (M1.3). Pure.

A masked trajectory leaves no trace in the loss, so a run whose sandboxes break would go on, on fewer and fewer tasks,
and on those that break least. So the share of lost attempts is watched, of the run and of each source, and beyond
`scheduler.pause_masked_above` the run holds still until attempts come through again (pause.py, docs/scheduling.md).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from infra.unseen import one_line
from orchestrator.alarms import Alarm
from rollout.trajectory import Status, Trajectory

MASKED = "mask rate"
"""The pause's reason."""
_EVERYTHING = "all sources"
_RECOVERY = 2
"""Half a window of attempts since the pause decides whether the run goes on: fewer would end it by chance."""

_REMEDIES = {
    Status.INFRA_SANDBOX: "see that sandboxes start (`gagar doctor`), and that their servers and disks are well",
    Status.INFRA_ENGINE: "look at the policy's engines: memory, and whether their actors are replaced",
    Status.INFRA_VERIFIER: "look at what verification needs: a fresh sandbox, its image, and the tests' commands",
    Status.INFRA_SETUP: "see that a sandbox can hold the tasks' files: disk, git, the image",
    Status.INFRA_WORKER: "look at the nodes and the logs of the rollout workers: memory, lost nodes, a fault of ours",
    Status.INFRA_STORAGE: "look at Ray's object store: its size, and whether nodes leave",
    Status.INFRA_WALL: "raise rollout.limits.wall_s, or start fewer rollouts at once: they queue for too long",
}


@dataclass(slots=True)
class _Window:
    """The last attempts of one source, or of all."""

    ended: deque[Status]
    paused: bool = False
    error: str = ""
    """Of the last lost one."""
    said: str = ""
    """Why it was paused."""
    masked: Counter[Status] = field(default_factory=Counter)
    """Of those in `ended`, by class."""

    def add(self, status: Status) -> None:
        if len(self.ended) == self.ended.maxlen:
            oldest = self.ended.popleft()
            self.masked[oldest] -= oldest.masked
        self.ended.append(status)
        self.masked[status] += status.masked

    def clear(self) -> None:
        self.ended.clear()
        self.masked.clear()


class MaskWatch:
    """Counts every attempt that ended, retries too: what is sampled again was lost all the same."""

    def __init__(self, sources: Collection[str], *, above: float | None, window: int) -> None:
        """`above` None: nothing is ever paused."""
        self._above = above
        self._recovery = max(1, window // _RECOVERY)
        self._windows = {name: _Window(deque(maxlen=window)) for name in (*sources, _EVERYTHING)}
        self._sources = frozenset(sources)

    def attempt(self, trajectory: Trajectory) -> list[Alarm]:
        """An attempt ended; returns the alarms that this begins or ends. One that was cancelled says nothing."""
        if trajectory.status is Status.INFRA_CANCELLED:
            return []
        changes = []
        for name in (trajectory.source, _EVERYTHING):
            window = self._windows.get(name)
            if window is None:
                continue
            window.add(trajectory.status)
            if trajectory.status.masked:
                window.error = one_line(trajectory.error or "no message")
            if (alarm := self._change(name, window)) is not None:
                changes.append(alarm)
        return changes

    @property
    def message(self) -> str | None:
        """Why the run is to hold still; None if it is not."""
        return "; ".join(w.said for w in self._windows.values() if w.paused) or None

    @property
    def probed(self) -> frozenset[str]:
        """Sources that only probes are to be sampled of."""
        if self._windows[_EVERYTHING].paused:
            return self._sources
        return frozenset(name for name in self._sources if self._windows[name].paused)

    @property
    def alarms(self) -> tuple[str, ...]:
        """Names of the alarms that are on."""
        return tuple(_name(name) for name, window in self._windows.items() if window.paused)

    def scalars(self) -> Iterator[tuple[str, float]]:
        """Metrics: the share of the last attempts that were lost, of the run and by source."""
        for name, window in self._windows.items():
            if window.ended:
                share = window.masked.total() / len(window.ended)
                yield ("infra/lost_share" if name == _EVERYTHING else f"infra/lost_share/{name}"), share

    def _change(self, name: str, window: _Window) -> Alarm | None:
        """A pause begins as soon as the rest of a full window could not bring the share down, so that no handful of
        losses at the start of a run does it; it ends on half a window that came through since."""
        if self._above is None:
            return None
        lost = window.masked.total()
        if not window.paused:
            if lost <= self._above * (window.ended.maxlen or 0):
                return None
            window.paused, window.said = True, self._said(name, window)
            window.clear()
            return Alarm(name=_name(name), on=True, text=window.said)
        recent = list(window.ended)[-self._recovery :]
        lost = sum(status.masked for status in recent)
        if len(recent) < self._recovery or lost > self._above * len(recent):
            return None
        window.paused = False
        window.clear()
        return Alarm(
            name=_name(name), on=False, text=f"{len(recent) - lost} of {len(recent)} rollouts of {name} end well"
        )

    def _said(self, name: str, window: _Window) -> str:
        classes = window.masked.most_common()
        counts = ", ".join(f"{status.value.removeprefix('infra_')} {n}" for status, n in classes if n)
        return (
            f"{window.masked.total()} of the last {len(window.ended)} rollouts of {name} were lost ({counts}; the last:"
            f" {window.error}), above scheduler.pause_masked_above = {self._above:g}; no step begins, and only probes"
            f" are sampled, until rollouts end well again: {_REMEDIES[classes[0][0]]}"
        )


def _name(name: str) -> str:
    return "masked" if name == _EVERYTHING else f"masked/{name}"
