"""An endless, seekable stream over a finite list of tasks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b

from configs.errors import ConfigError
from envs.formats.records import Record
from envs.task import ExpertTrace, Split, Task, TaskKind


class ListedTasks:
    """Every record once an epoch, each epoch in an order of its own that follows from the seed."""

    kind = TaskKind.CODE

    def __init__(
        self, name: str, seed: int, train: Sequence[Record], heldout: Sequence[Record] | None, heldout_share: float
    ) -> None:
        """Args:
        heldout: records of a file of their own; None to take them out of `train` (see `split_of`).

        Raises ConfigError if no record is left to train on.
        """
        self.name = name
        self._seed = seed
        if heldout is None:
            splits = {record.record_id: split_of(record, heldout_share) for record in train}
            heldout = [record for record in train if splits[record.record_id] is Split.HELDOUT]
            train = [record for record in train if splits[record.record_id] is Split.TRAIN]
        if not train:
            raise ConfigError(f"sources.{name}.heldout_share: leaves nothing to train on; lower it, or add records")
        self.records = {Split.TRAIN: train, Split.HELDOUT: heldout}

    def task(self, split: Split, index: int) -> Task:
        """The task at `index` >= 0 of a split. Raises ConfigError for the held-out split of a source that has none."""
        if index < 0:
            raise ValueError(f"task index {index} is negative")
        records = self.records[split]
        if not records:
            raise ConfigError(
                f"sources.{self.name}.heldout_share: no task is held out; set it, or heldout_path, or evaluate on "
                "another source"
            )
        epoch, position = divmod(index, len(records))
        record = records[_order(f"{self._seed}/{split}", epoch, len(records))[position]]
        return replace(
            record.task,
            task_id=f"{self.name}/{split}/{self._seed}/{index}",
            source=self.name,
            split=split,
            meta={**record.task.meta, "record": record.record_id, "epoch": str(epoch)},
        )

    def experts(self, task: Task) -> Iterator[ExpertTrace]:
        """None: nobody scripted solutions for tasks of others."""
        return iter(())

    @property
    def images_needed(self) -> tuple[str, ...]:
        """Ids of the records whose files only an image has."""
        return tuple(
            record.record_id
            for records in self.records.values()
            for record in records
            if record.task.image is not None and not record.task.files
        )


def split_of(record: Record, heldout_share: float) -> Split:
    """The record's own word; else by a hash of its id alone, so that other records move none across."""
    if record.split is not None:
        return record.split
    digest = blake2b(record.record_id.encode(), digest_size=8).digest()
    return Split.HELDOUT if int.from_bytes(digest) < heldout_share * 2**64 else Split.TRAIN


@lru_cache(maxsize=64)
def _order(stream: str, epoch: int, count: int) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(f"{stream}/{epoch}").shuffle(order)
    return tuple(order)
