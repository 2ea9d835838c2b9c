"""Which metrics are drawn: in `gagar report`, and in a Weights & Biases workspace with the same panels.

    python -m orchestrator.panels ENTITY PROJECT

makes that workspace. It needs `pip install wandb-workspaces` and a login; docs/monitoring.md says how to read it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from configs.errors import ConfigError, GagarError


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart over optimiser steps."""

    title: str
    key: str
    """Metric, as in docs/metrics.md."""
    share: bool = False
    """Whether it is a share, drawn from 0."""


CURVES: tuple[Panel, ...] = (
    Panel(title="Pass rate, training tasks", key="trajectories/pass_rate", share=True),
    Panel(title="T1 share of graded passes", key="grading/tier1_share", share=True),
    Panel(title="Turns a trajectory", key="trajectories/turns_mean"),
    Panel(title="Generated tokens a trajectory", key="trajectories/response_tokens_mean"),
    Panel(title="Entropy, nats", key="learner/entropy"),
    Panel(title="Lambda before the cap, mean", key="redistribution/lambda_mean"),
    Panel(title="Cap rate", key="redistribution/lambda_capped_rate", share=True),
    Panel(title="Change of the failing side's advantage", key="redistribution/failing_shift_mean"),
    Panel(title="Grading that fell back", key="grading/fallback_rate", share=True),
    Panel(title="Step, seconds", key="time/step_s"),
)
"""Drawn for every arm, its seeds as a band."""

SECTIONS: dict[str, tuple[Panel, ...]] = {
    "Outcome and quality": CURVES,
    "Health of the graders": (
        Panel(title="Wait for a grader, median", key="grading/queue_s_p50"),
        Panel(title="Grading, 95th percentile", key="grading/run_s_p95"),
        Panel(title="Confirmed hacks", key="grading/hacks"),
        Panel(title="Grading beside rollouts", key="overlap/share", share=True),
    ),
    "Health of the learner": (
        Panel(title="Learner and engine log-probability gap, max", key="learner/logprob_gap_max"),
        Panel(title="Tokens outside the ratio bounds", key="learner/ratio_masked_share", share=True),
        Panel(title="Gradient norm", key="learner/grad_norm"),
        Panel(title="Staleness, mean", key="staleness/mean"),
    ),
    "Where the time goes": (
        Panel(title="Critical: learner", key="bottleneck/learner", share=True),
        Panel(title="Critical: rollouts", key="bottleneck/rollout", share=True),
        Panel(title="Critical: graders", key="bottleneck/grader", share=True),
        Panel(title="Lost to infrastructure", key="infra/mask_rate", share=True),
    ),
}
"""The workspace. Distributions (`redistribution/lambda_histogram`) are in W&B under the runs' own charts."""


def workspace(entity: str, project: str) -> Any:
    """The workspace, not saved yet. Runs are grouped by `algorithm.mode`, so that seeds of one mode are one line.

    Raises:
        ConfigError: wandb-workspaces is not installed.
    """
    try:
        import wandb_workspaces.reports.v2 as parts
        import wandb_workspaces.workspaces as workspaces
    except ImportError:
        raise ConfigError("wandb-workspaces is not installed; pip install wandb-workspaces") from None
    sections = [
        workspaces.Section(
            name=name,
            is_open=True,
            panels=[parts.LinePlot(title=panel.title, x="step", y=[panel.key]) for panel in panels],
        )
        for name, panels in SECTIONS.items()
    ]
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name="gagar",
        sections=sections,
        runset_settings=workspaces.RunsetSettings(groupby=[workspaces.Config("algorithm.mode")]),
    )


def main(arguments: Sequence[str]) -> int:
    """Make the workspace at the server that `wandb login` chose; prints its address."""
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m orchestrator.panels ENTITY PROJECT\n")
        return 2
    try:
        made = workspace(*arguments)
    except GagarError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    made.save()
    sys.stdout.write(f"{made.url}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
