"""What the process of every actor does first."""

from __future__ import annotations

import sys

from infra import access, scrub, stacks


def enter() -> None:
    """Secrets out of its logs, stacks for whoever asks, and no open ports beyond this host where the run is local.
    Call it at the begin of an actor's constructor. In a process that is no actor's, and the second time, it does
    nothing."""
    if "ray" not in sys.modules or not stacks.register():
        return
    scrub.install()
    access.stay_on_host()
