"""Where actors go: a pool's Resources as options of Ray actors, and placement groups of actors that belong together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from configs.schema import Resources

Strategy = Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"]


def actor_options(resources: Resources, *, gpus: float | None = None) -> dict[str, Any]:
    """Options of `ray.remote` for one actor; `gpus` overrides those of `resources`."""
    options: dict[str, Any] = {
        "num_cpus": resources.cpus,
        "num_gpus": resources.gpus if gpus is None else gpus,
        "resources": dict(resources.custom) or None,
    }
    if resources.labels:
        options["label_selector"] = dict(resources.labels)
    return options


class Together:
    """A placement group of `count` equal actors: all of them get their place, or none."""

    def __init__(self, resources: Resources, count: int, strategy: Strategy, *, gpus: float | None = None) -> None:
        """Asks for the places; returns at once. `strategy` as in Ray: STRICT_PACK is one node."""
        import ray

        self._resources, self._gpus = resources, gpus
        labels = [dict(resources.labels)] * count if resources.labels else None
        bundle = _bundle(resources, gpus)
        self._group: Any = ray.util.placement_group([bundle] * count, strategy=strategy, bundle_label_selector=labels)

    def options(self, index: int) -> dict[str, Any]:
        """Options of `ray.remote` for the actor in place `index`. The group has looked at the labels already."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options = actor_options(self._resources, gpus=self._gpus)
        options.pop("label_selector", None)
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=index
        )
        return options

    def remove(self) -> None:
        """Gives the places back; actors in them end."""
        import ray

        ray.util.remove_placement_group(self._group)


def asks(resources: Resources, *, gpus: float | None = None) -> bool:
    """Whether an actor of these resources takes any: a placement group of nothing cannot be made."""
    return bool(_bundle(resources, gpus))


def _bundle(resources: Resources, gpus: float | None) -> Mapping[str, float]:
    amounts = {"CPU": resources.cpus, "GPU": resources.gpus if gpus is None else gpus, **resources.custom}
    return {name: amount for name, amount in amounts.items() if amount}
