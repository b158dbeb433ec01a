"""What a host does between the parts of a training: progress, interrupt, the offload engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..log import get_logger

_LOG = get_logger("training")


def _nothing() -> None:
    return None


def _no_report(step: int, loss: float) -> None:
    return None


def _run(passes: Callable[[], Any]) -> Any:
    return passes()


def _log_skip(what: str) -> None:
    _LOG.warning("%s", what)


@dataclass(frozen=True)
class Callbacks:
    """What a host does during training; each may raise to stop it.

    Attributes:
        before_micro_step: Called before each forward and backward.
        after_backward: Called after each backward, before anything reads a gradient.
        after_step: Called with the number of finished optimizer steps and the last one's loss.
        after_skip: Called with a line that says why a step was skipped.
        run_passes: Called with what does a step's forwards and backwards; may repeat it, gradients undone.
    """

    before_micro_step: Callable[[], None] = _nothing
    after_backward: Callable[[], None] = _nothing
    after_step: Callable[[int, float], None] = _no_report
    after_skip: Callable[[str], None] = _log_skip
    run_passes: Callable[[Callable[[], Any]], Any] = _run
