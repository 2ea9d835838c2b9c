"""The learner as the driver sees it: one DeepSpeed actor per rank, one optimiser step per batch.

The driver plans (which sequence on which rank, in which row, with what weight) from metadata and passes payloads on by
reference; it imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from configs.schema import Aggregation, LearnerConfig, SupervisionConfig
from infra import process
from infra.errors import GagarError, LearnerError, StorageError
from infra.placement import Together, actor_options, asks
from learner.loss import token_weights
from learner.packing import Sample, plan
from learner.payloads import PayloadsLost, hold, hold_what_is_left, is_loss
from learner.rank import Objective, RankCore, check_learner
from learner.rank_setup import open_store
from learner.stats import Result, StepStats, step_stats

if TYPE_CHECKING:
    from rollout.engine_pool import EnginePool, TransferTarget

__all__ = ["BatchItem", "LearnerGroup", "PayloadsLost", "StepStats"]

T = TypeVar("T")
_ALIVE = "alive"
_PING_S = 10.0
"""How often a rank is asked, during an operation, whether it lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchItem:
    """One trajectory of the step's batch, as the driver holds it."""

    trajectory_id: str
    group_id: str
    advantage: float
    """Broadcast to the trajectory's generated tokens (M1.9)."""
    response_tokens: int
    """Generated tokens; the payload's loss mask must agree."""
    total_tokens: int
    payload: Any
    """ObjectRef[Payload], or the Payload itself."""
    file: Path | None = None
    """Where its rollout worker has kept it, should the payload be lost with its node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """One sequence of a rank's share."""

    payload: int
    """Position among the payloads that the rank holds."""
    advantage: float
    weight: float
    response_tokens: int
    trajectory_id: str


class LearnerRank:
    """The Ray actor around a `RankCore`. Its constructor is light: the rendezvous opens before any rank loads."""

    def __init__(self, config: LearnerConfig, objective: Objective, temperature: float, rank: int, ranks: int) -> None:
        process.enter()
        # Before torch loads its OpenMP: idle threads that spin, on cores shared with engines and sandboxes, made a step
        # ten times slower.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        self._setup = (config, objective, temperature)
        self._rank = rank
        self._ranks = ranks
        self._store: Any = None
        self._core: RankCore | None = None

    def rendezvous(self) -> tuple[str, int]:
        """Rank 0: opens the store where the ranks meet, on a port the system chooses; returns its address. A lone rank
        meets nobody, and opens nothing."""
        import ray

        if self._ranks == 1:
            return "", 0
        self._store = open_store(ray.util.get_node_ip_address(), 0, self._ranks, master=True)
        return self._store.host, self._store.port

    def start(self, address: tuple[str, int]) -> None:
        """Joins the others and loads the model. Collective."""
        if self._store is None and self._ranks > 1:
            self._store = open_store(*address, self._ranks, master=False)
        config, objective, temperature = self._setup
        self._core = RankCore(
            config, objective, temperature, rank=self._rank, world_size=self._ranks, store=self._store
        )

    def alive(self) -> bool:
        """Answers, in a thread of its own, as long as the process runs."""
        return True

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """function(core, *args), in this rank's process."""
        if self._core is None:
            raise LearnerError("the rank has not started; await LearnerGroup.ready() first")
        return function(self._core, *args)


class LearnerGroup:
    """Driver-side handle on the ranks. Methods raise LearnerError; after one, the group has to be started anew.

    A rank that died or hangs, in its process or in a collective, ends the operation in all of them.
    """

    def __init__(
        self,
        config: LearnerConfig,
        objective: Objective,
        temperature: float,
        supervision: SupervisionConfig | None = None,
    ) -> None:
        """`temperature` is the sampling temperature of the rollouts: log pi_theta is taken at it. `supervision` says
        when a rank hangs."""
        check_learner(config)
        self.config = config
        self.objective: Objective = objective
        self.temperature = temperature
        self._supervision = supervision or SupervisionConfig()
        self.version = 0
        """Policy version of the weights as they are; set by `publish` and `load`."""
        self.start_s: float | None = None
        """Seconds from `start` to ready."""
        self._aggregation = Aggregation.TOKEN_MEAN if objective == "nll" else objective.aggregation
        self._ranks: list[Any] = []
        self._placement: Together | None = None
        self._starting: list[Any] = []
        self._started_s = 0.0

    def start(self) -> None:
        """Creates the actors and lets them load; returns at once."""
        import ray

        self._started_s = time.monotonic()
        self.version = 0
        actor = ray.remote(concurrency_groups={_ALIVE: 1})(LearnerRank)
        world = self.config.world_size
        self._placement = self._reserve()
        for rank in range(world):
            options = self._options(rank)
            args = (self.config, self.objective, self.temperature, rank, world)
            self._ranks.append(actor.options(**options).remote(*args))
        address = self._ranks[0].rendezvous.remote()
        self._starting = [handle.start.remote(address) for handle in self._ranks]
        for handle in self._ranks:
            handle.run.remote(_import_publishing)  # seconds that the first publish would wait for

    async def ready(self) -> None:
        """Waits until every rank has loaded."""
        await self._gather(self._starting, "start")  # may wait for its nodes for as long as that takes
        self.start_s = time.monotonic() - self._started_s

    async def train_step(self, items: Sequence[BatchItem], *, lr_scale: float = 1.0) -> StepStats:
        """One optimiser step over the batch; masked trajectories must have left it (M1.3).

        Raises:
            PayloadsLost: some cannot be had any more; nothing was done, and the next step may be another one.
            LearnerError: anything else; the group has to be started anew.
        """
        start_s = time.monotonic()
        if not items:
            raise LearnerError("a step needs at least one trajectory; the batch is empty")
        lengths = [item.total_tokens for item in items]
        try:
            layout = plan(lengths, self.config.world_size, self.config.max_tokens_per_microbatch)
        except ValueError as error:
            raise LearnerError(f"{error}; raise learner.max_tokens_per_microbatch") from error
        weights = token_weights(
            self._aggregation, [item.response_tokens for item in items], [item.group_id for item in items]
        )
        await self._watched(self._fetch(items, layout), "fetching payloads")
        refs = [
            handle.run.remote(_step, _shares(items, weights, rows), self.version, lr_scale)
            for handle, rows in zip(self._started(), layout, strict=True)
        ]
        results: list[Result] = await self._watched(self._gather(refs, "train_step"), "train_step")
        return step_stats(results, layout, lengths, self.config.max_tokens_per_microbatch, time.monotonic() - start_s)

    async def _fetch(self, items: Sequence[BatchItem], layout: Sequence[Sequence[Sequence[int]]]) -> None:
        """Every rank holds the payloads of its share. Raises PayloadsLost."""

        async def one(rank: int, mine: Sequence[BatchItem]) -> dict[str, str]:
            run = self._started()[rank].run
            try:
                await run.remote(hold, *(item.payload for item in mine))
                return {}
            except RayError as error:
                if not is_loss(error):
                    raise self._failure(error, rank, "fetching payloads") from error
            call = run.remote(hold_what_is_left, [item.payload for item in mine], [item.file for item in mine])
            gone: dict[int, str] = await self._result(call, rank, "fetching payloads")
            return {mine[index].trajectory_id: why for index, why in gone.items()}

        from ray.exceptions import RayError

        shares = [[items[index] for row in rows for index in row] for rows in layout]
        reports = await asyncio.gather(*(one(rank, mine) for rank, mine in enumerate(shares)))
        if reasons := {name: why for report in reports for name, why in report.items()}:
            raise PayloadsLost(reasons)

    async def save(self, folder: str | Path) -> None:
        """Writes weights, optimiser state and counters into an existing or new folder that all ranks can reach.

        Raises:
            StorageError: the disk took nothing; with one rank, which is as it was and can be asked again.
        """
        await self.on_ranks(RankCore.save, _absolute(folder), self.version)

    async def load(self, folder: str | Path) -> None:
        """Restores what `save` wrote, policy version included; the next step is what it would have been."""
        versions = await self.on_ranks(RankCore.load, _absolute(folder))
        self.version = versions[0]

    async def export_hf(self, folder: str | Path) -> None:
        """Writes an HF folder that transformers and vLLM load."""
        await self.on_ranks(RankCore.export_hf, _absolute(folder))

    async def publish(self, pool: EnginePool, version: int) -> float:
        """Gives every engine of the pool the weights as they are now, as `version`; requests in flight go on.

        Returns the seconds it took. Tokens sampled afterwards carry the new version.
        """
        results = await self.on_ranks(_publish, pool.transfer_target(), version)
        pool.remember(version, results[0][1])
        self.version = version
        return float(max(seconds for seconds, _ in results))

    async def on_ranks(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(core, *args) on every rank at once, results by rank. `function` must be importable there."""
        refs = [handle.run.remote(function, *args) for handle in self._started()]
        return await self._watched(self._gather(refs, function.__name__), function.__name__)

    def shutdown(self) -> None:
        """Ends the actors. Safe to call twice and after an error."""
        import ray

        for handle in self._ranks:
            ray.kill(handle)
        if self._placement is not None:
            self._placement.remove()
        self._ranks, self._starting, self._placement = [], [], None

    def _started(self) -> list[Any]:
        if not self._ranks:
            raise LearnerError("the learner has not started, or was shut down; call start() and await ready() first")
        return self._ranks

    async def _gather(self, refs: Sequence[Any], doing: str) -> list[Any]:
        """Results by rank; the first failure raises at once (its peers may wait in a collective for ever)."""
        return list(await asyncio.gather(*(self._result(ref, rank, doing) for rank, ref in enumerate(refs))))

    async def _watched(self, work: Coroutine[Any, Any, T], doing: str) -> T:
        """What the ranks do, while they are asked whether they live. Raises LearnerError for one that hangs, and when
        the whole takes too long."""
        limit_s = self._supervision.learner_timeout_s
        main = asyncio.ensure_future(work)
        pings = [asyncio.ensure_future(self._ping(rank, doing)) for rank in range(len(self._ranks))]
        try:
            async with asyncio.timeout(limit_s) as deadline:
                done, _ = await asyncio.wait({main, *pings}, return_when=asyncio.FIRST_COMPLETED)
                for ping in done - {main}:
                    if main not in done:
                        ping.result()
                return await main
        except TimeoutError:
            if not deadline.expired():
                raise
            raise LearnerError(
                f"the learner's {doing} took longer than supervision.learner_timeout_s = {limit_s:g} s; ranks may wait "
                "for each other (raise it if the work is that long)"
            ) from None
        finally:
            for task in (main, *pings):
                task.cancel()

    async def _ping(self, rank: int, doing: str) -> NoReturn:
        """Asks a rank again and again whether it lives. Raises LearnerError if it does not answer in time; one that
        died is told by its call."""
        from ray.exceptions import RayError

        silent_s = self._supervision.silent_after_s
        with contextlib.suppress(RayError):
            while True:
                await asyncio.sleep(_PING_S)
                try:
                    async with asyncio.timeout(silent_s):
                        await self._ranks[rank].alive.options(concurrency_group=_ALIVE).remote()
                except TimeoutError:
                    raise LearnerError(
                        f"learner rank {rank} of {self.config.world_size} gave no sign of life for {silent_s:g} s in "
                        f"{doing}"
                    ) from None
        while True:
            await asyncio.Event().wait()

    async def _result(self, ref: Any, rank: int, doing: str) -> Any:
        from ray.exceptions import RayError

        try:
            return await ref
        except RayError as error:
            raise self._failure(error, rank, doing) from error

    def _failure(self, error: Exception, rank: int, doing: str) -> LearnerError | StorageError:
        """What Ray says of a rank's call, for the user. A disk that took nothing is one only for a lone rank, which can
        try again: others may wait for it in a collective for ever, and have to be started anew."""
        from ray.exceptions import ActorDiedError, RayTaskError

        name = f"learner rank {rank} of {self.config.world_size}"
        if isinstance(error, RayTaskError):
            cause = error.cause
            if isinstance(cause, StorageError) and self.config.world_size == 1:
                return StorageError(f"{name}: {cause.message}")
            if isinstance(cause, GagarError):
                return LearnerError(f"{name}: {cause.message}")
            return LearnerError(f"{name} failed in {doing} ({type(cause).__name__}: {cause})")
        if isinstance(error, ActorDiedError):
            return LearnerError(
                f"{name} died in {doing}; look for a kill for memory in its node's log (fewer "
                "learner.max_tokens_per_microbatch need less)"
            )
        return LearnerError(f"{name} was lost in {doing} ({error})")

    def _reserve(self) -> Together | None:
        """All ranks or none: a placement group where there is more than one rank and they ask for anything."""
        resources = self.config.resources
        if self.config.world_size == 1 or not asks(resources, gpus=self._gpus()):
            return None
        return Together(resources, self.config.world_size, self.config.placement, gpus=self._gpus())

    def _gpus(self) -> float:
        """Of one rank."""
        return self.config.resources.gpus or (1.0 if self.config.device == "cuda" else 0.0)

    def _options(self, rank: int) -> dict[str, Any]:
        if self._placement is not None:
            return self._placement.options(rank)
        return actor_options(self.config.resources, gpus=self._gpus())


def _absolute(folder: str | Path) -> str:
    return str(Path(folder).absolute())  # the ranks have other working directories


def _shares(items: Sequence[BatchItem], weights: Sequence[float], rows: Sequence[Sequence[int]]) -> list[list[_Share]]:
    """One rank's rows; their payloads are those that it holds, in the same order."""
    position = itertools.count()
    return [
        [
            _Share(
                payload=next(position),
                advantage=items[index].advantage,
                weight=weights[index],
                response_tokens=items[index].response_tokens,
                trajectory_id=items[index].trajectory_id,
            )
            for index in row
        ]
        for row in rows
    ]


def _publish(core: RankCore, target: TransferTarget, version: int) -> tuple[float, dict[str, Any] | None]:
    """Runs on a rank. The transfer is set up once for each set of engines. Returns seconds and what was sent."""
    from learner.publish import Publisher

    if core.publisher is None or core.publisher.target != target:
        if core.publisher is not None:
            core.publisher.shutdown()
        core.publisher = Publisher(
            target, rank=core.rank, parameters=core.policy_parameters(), full=core.named_full_parameters
        )
    seconds: float = core.publisher.publish(version)
    return seconds, core.publisher.sent


def _import_publishing(_: RankCore) -> None:
    """Runs on a rank, after its start and while others still start. vLLM's import prints a line about Triton."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        import rollout.weight_transfer  # noqa: F401


def _step(core: RankCore, rows: Sequence[Sequence[_Share]], version: int, lr_scale: float) -> Result:
    """Runs on a rank that holds the payloads, and lets them go."""
    payloads, core.payloads = core.payloads, ()
    for share in (share for row in rows for share in row):
        counted = int(payloads[share.payload].loss_mask.sum())
        if counted != share.response_tokens:  # the denominators of the whole batch would be wrong
            raise LearnerError(
                f"trajectory {share.trajectory_id} has {counted} loss-bearing tokens, its metadata says "
                f"{share.response_tokens}; this is a fault of the rollout, not of the data"
            )
    samples = [
        [Sample(payload=payloads[share.payload], advantage=share.advantage, weight=share.weight) for share in row]
        for row in rows
    ]
    sums, applied = core.step(samples, version=version, lr_scale=lr_scale)
    return sums, applied, core.phases.take()
