"""Which nodes a configuration needs: what its pools ask for, packed into as few nodes of one size as hold it.

Pure. Pools that must share a node type are those with the same node labels, the same custom resources and the same need
of GPUs; a pool's `resources` decide, as they do for Ray.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from configs.errors import ConfigError
from configs.schema import (
    AdvantageMode,
    DaytonaSandbox,
    EndpointGraderBackend,
    EngineConfig,
    FargateSandbox,
    JailSandbox,
    KubernetesSandbox,
    ModalSandbox,
    RemoteSandbox,
    Resources,
    RunConfig,
    SandboxConfig,
    VllmGraderBackend,
)

LEAST_MEMORY_GIB = 4
_SLACK = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSize:
    """The largest node that can be had; those that need less are made smaller."""

    cpus: int = 32
    gpus: int = 8
    memory_gib: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the actors of one pool ask of nodes."""

    pool: str
    count: int
    """Actors, at the pool's largest size."""
    resources: Resources
    """Of one actor."""
    gpus: float
    """Of one actor, defaults of the device included."""
    placement: str = "PACK"
    """How the actors share nodes, as `learner.placement`."""
    jails: bool = False
    starts_pods: bool = False
    """Whether its sandboxes are pods, which it makes and deletes."""
    """Whether they start sandboxes on their node."""
    variables: tuple[str, ...] = ()
    """Environment variables that they take keys from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeType:
    """Equal nodes."""

    name: str
    """A DNS label."""
    count: int
    pools: tuple[str, ...]
    labels: Mapping[str, str]
    """Ray node labels that satisfy every selector of its pools."""
    custom: Mapping[str, float]
    """Custom Ray resources of one node."""
    cpus: int
    gpus: int
    memory_gib: int
    jails: bool
    starts_pods: bool
    variables: tuple[str, ...]


def demands(config: RunConfig) -> list[Demand]:
    """Every pool of the run; those that `scaling` may grow at their largest size."""
    rollout, grader, learner = config.rollout, config.grader, config.learner
    found = [
        _engines("engine", config.engine),
        Demand(
            pool="rollout",
            count=max(rollout.workers, config.scaling.rollout.max if config.scaling.rollout else 0),
            resources=rollout.resources,
            gpus=rollout.resources.gpus,
            jails=isinstance(rollout.sandbox, JailSandbox),
            starts_pods=isinstance(rollout.sandbox, KubernetesSandbox),
            variables=_keys(rollout.sandbox),
        ),
    ]
    if grader is not None and config.algorithm.mode is not AdvantageMode.OUTCOME:
        if isinstance(grader.backend, VllmGraderBackend):
            found.append(_engines("grader.backend.engine", grader.backend.engine))
        sandbox = grader.sandbox or rollout.sandbox
        key = (grader.backend.api_key_env,) if isinstance(grader.backend, EndpointGraderBackend) else ()
        found.append(
            Demand(
                pool="grader",
                count=max(grader.workers, config.scaling.grader.max if config.scaling.grader else 0),
                resources=grader.resources,
                gpus=grader.resources.gpus,
                jails=grader.checks.enabled and isinstance(sandbox, JailSandbox),
                starts_pods=grader.checks.enabled and isinstance(sandbox, KubernetesSandbox),
                variables=(*key, *(_keys(sandbox) if grader.checks.enabled else ())),
            )
        )
    found.append(
        Demand(
            pool="learner",
            count=learner.world_size,
            resources=learner.resources,
            gpus=learner.resources.gpus or (1.0 if learner.device == "cuda" else 0.0),
            placement=learner.placement,
        )
    )
    return found


def node_types(wanted: Iterable[Demand], size: NodeSize) -> list[NodeType]:
    """Node types that hold all of it, those with GPUs first.

    Raises:
        ConfigError: a pool takes nothing of a node, so nothing bounds how many of it share one; or an actor, or ranks
            that must share a node, need more than the largest node.
    """
    groups: dict[tuple[tuple[tuple[str, str], ...], tuple[str, ...], bool], list[Demand]] = {}
    for demand in wanted:
        resources = demand.resources
        if not (resources.cpus or demand.gpus or resources.custom):
            raise ConfigError(
                f"{demand.pool}.resources={{}}: an actor that takes nothing of a node can be on any, the head too; set "
                f"e.g. {demand.pool}.resources.cpus=2"
            )
        labels = tuple(sorted(_node_labels(resources.labels).items()))
        groups.setdefault((labels, tuple(sorted(resources.custom)), demand.gpus > 0), []).append(demand)
    ordered = sorted(groups.items(), key=lambda item: not item[0][2])
    names: set[str] = set()
    return [_node_type(dict(key[0]), members, size, names) for key, members in ordered]


def _engines(pool: str, engine: EngineConfig) -> Demand:
    gpus = engine.resources.gpus or (engine.tensor_parallel_size if engine.device == "cuda" else 0)
    return Demand(pool=pool, count=engine.replicas, resources=engine.resources, gpus=gpus)


def _keys(sandbox: SandboxConfig) -> tuple[str, ...]:
    if isinstance(sandbox, RemoteSandbox):
        return (sandbox.token_env,)
    if isinstance(sandbox, DaytonaSandbox):
        return (sandbox.api_key_env,)
    if isinstance(sandbox, FargateSandbox):
        return ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")
    return ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET") if isinstance(sandbox, ModalSandbox) else ()


def _node_labels(selector: Mapping[str, str]) -> dict[str, str]:
    """Labels of a node that such a selector takes: of several allowed values the first, of forbidden ones none."""
    labels = {}
    for key, wanted in selector.items():
        if wanted.startswith("!"):
            continue  # a node without the label is taken
        options = re.fullmatch(r"in\((.*)\)", wanted)
        labels[key] = options[1].split(",")[0].strip() if options else wanted
    return labels


@dataclass(slots=True)
class _Bin:
    """What one node holds."""

    cpus: float = 0.0
    gpus: float = 0.0
    custom: dict[str, float] = field(default_factory=dict)
    spread: set[str] = field(default_factory=set)
    """Pools of which it may hold no other actor."""


def _node_type(labels: dict[str, str], members: Sequence[Demand], size: NodeSize, names: set[str]) -> NodeType:
    bins: list[_Bin] = []
    for demand in sorted(members, key=lambda d: (-d.gpus, -d.resources.cpus)):
        together = demand.count if demand.placement == "STRICT_PACK" else 1
        cpus, gpus = demand.resources.cpus * together, demand.gpus * together
        if cpus > size.cpus or gpus > size.gpus:
            what = f"{together} ranks on one node (learner.placement=STRICT_PACK)" if together > 1 else "one actor"
            raise ConfigError(
                f"{demand.pool}.resources: {what} need {cpus:g} CPUs and {gpus:g} GPUs, a node has {size.cpus} and "
                f"{size.gpus}; give --cpus and --gpus of larger nodes, or lower them"
            )
        apart = demand.pool if demand.placement == "STRICT_SPREAD" else None
        for _ in range(demand.count // together):
            place = next(
                (
                    b
                    for b in bins
                    if b.cpus + cpus <= size.cpus + _SLACK
                    and b.gpus + gpus <= size.gpus + _SLACK
                    and apart not in b.spread
                ),
                None,
            )
            if place is None:
                place = _Bin()
                bins.append(place)
            place.cpus += cpus
            place.gpus += gpus
            for name, amount in demand.resources.custom.items():
                place.custom[name] = place.custom.get(name, 0.0) + amount * together
            if apart is not None:
                place.spread.add(apart)
    cpus, gpus = math.ceil(max(b.cpus for b in bins)), math.ceil(max(b.gpus for b in bins))
    share = max(cpus / size.cpus, gpus / size.gpus if size.gpus else 0.0)
    return NodeType(
        name=_name(labels, bool(gpus), names),
        count=len(bins),
        pools=tuple(d.pool for d in members),
        labels=labels,
        custom={name: max(b.custom.get(name, 0.0) for b in bins) for d in members for name in d.resources.custom},
        cpus=cpus,
        gpus=gpus,
        memory_gib=max(LEAST_MEMORY_GIB, math.ceil(size.memory_gib * share)),
        jails=any(d.jails for d in members),
        starts_pods=any(d.starts_pods for d in members),
        variables=tuple(dict.fromkeys(v for d in members for v in d.variables)),
    )


def _name(labels: Mapping[str, str], gpus: bool, taken: set[str]) -> str:
    """Told by its labels, else by what it has; none twice."""
    plain = dns_label("-".join(labels.values()), 30) if labels else ""
    base = plain or ("gpu" if gpus else "cpu")
    name, number = base, 2
    while name in taken:
        name, number = f"{base}-{number}", number + 1
    taken.add(name)
    return name


def dns_label(text: str, length: int = 40) -> str:
    """The text as Kubernetes takes it in names: lower case, digits and '-', a letter first."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower())[:length].strip("-")
    return plain if not plain or plain[0].isalpha() else f"n-{plain}"[:length].strip("-")
