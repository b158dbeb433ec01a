"""The learning rate of every step: a function of the step alone, so that nothing has to be kept for it."""

from __future__ import annotations

import math

SCHEDULES = ("constant", "cosine", "linear")


def learning_rate_factor(name: str, step: int, *, warmup_steps: int, steps: int) -> float:
    """Return what the learning rate is multiplied by.

    Args:
        name: One of ``SCHEDULES``: ``cosine`` and ``linear`` fall from 1 at the end of the warm-up to 0
            after the last step (cosine without restarts: SGDR, arXiv:1608.03983).
        step: Counted from 0.
        warmup_steps: Over so many steps it rises evenly to 1.
        steps: Of the whole training, the warm-up included.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    return {"constant": 1.0, "cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done}[name]
