"""The trainings that run now: what they tell, and what they may be asked to do meanwhile.

A training runs in ComfyUI's prompt thread; requests come from the server's thread. They are noted
here and looked at between two steps.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import RequestError

EVENT = "ferry.training"
COMMANDS = ("save", "preview", "stop")
_SECONDS_BETWEEN_EVENTS = 0.25


@dataclass(frozen=True)
class TrainingProgress:
    """What a person watching wants to know; sizes in bytes, times in seconds, None where not known.

    Attributes:
        step: Optimizer steps done.
        steps: Of the whole training.
        loss: The last step's.
        average_loss: Moving average of the losses, for the eye.
        seconds_per_step: Of the last steps, moving average.
        seconds_left: At that speed.
        predicted_seconds: Of a step, by the plan of what stays on the GPU.
        plan: That plan in words, empty without one.
        gpu_bytes: Allocated on the GPU by this process.
        gpu_peak_bytes: The most since the training began.
        gpu_total_bytes: What the GPU has.
        gpu_planned_bytes: The peak by the plan.
        pinned_bytes: Host memory registered with CUDA.
        stalled_share: Part of the last pass's time spent waiting for weights, 0 to 1.
        saved: The last file written, relative to the output folder.
        saved_step: When it was written.
        preview: The last preview as ComfyUI names files: ``filename``, ``subfolder``, ``type``.
        message: Something that happened, such as a skipped step.
    """

    step: int
    steps: int
    loss: float | None = None
    average_loss: float | None = None
    seconds_per_step: float | None = None
    seconds_left: float | None = None
    predicted_seconds: float | None = None
    plan: str = ""
    gpu_bytes: int | None = None
    gpu_peak_bytes: int | None = None
    gpu_total_bytes: int | None = None
    gpu_planned_bytes: int | None = None
    pinned_bytes: int | None = None
    stalled_share: float | None = None
    saved: str | None = None
    saved_step: int | None = None
    preview: dict[str, str] | None = None
    message: str = ""

    def line(self) -> str:
        """Return the most of it as one line for the node."""
        minutes, seconds = divmod(int(self.seconds_left or 0), 60)
        hours, minutes = divmod(minutes, 60)
        return (
            f"step {self.step}/{self.steps}  loss {self.loss or 0:.5f} "
            f"(average {self.average_loss or 0:.5f})  {self.seconds_per_step or 0:.2f} s/it  "
            f"{hours}:{minutes:02}:{seconds:02} left"
        )


class RunningTraining:
    """One running training.

    Args:
        prompt_id: The prompt that it belongs to.
        node_id: The node that runs it, None outside of a prompt.
        steps: Of the whole training.
    """

    def __init__(self, prompt_id: str, node_id: str | None, *, steps: int) -> None:
        self.prompt_id = prompt_id
        self.node_id = node_id
        self._lock = threading.Lock()
        self._asked: set[str] = set()
        self._progress = TrainingProgress(0, steps)
        self._sent_at = 0.0

    def ask(self, command: str) -> None:
        """Ask for something, from any thread; asking twice before it is done is asking once.

        Raises:
            RequestError: If ``command`` is none of ``COMMANDS``.
        """
        if command not in COMMANDS:
            raise RequestError(
                f"the command {command!r} was sent to a training",
                limit=f"Known are {list(COMMANDS)}",
                way_out="Send one of them",
            )
        with self._lock:
            self._asked.add(command)

    def take(self) -> set[str]:
        """Return what was asked for since the last call."""
        with self._lock:
            asked, self._asked = self._asked, set()
        return asked

    def tell(self, progress: TrainingProgress, *, now: bool = False) -> None:
        """Keep ``progress``, and send it to the browsers unless the last one went out just before.

        Args:
            progress: The present state.
            now: Send it in any case.
        """
        with self._lock:
            self._progress = progress
        if now or time.monotonic() - self._sent_at >= _SECONDS_BETWEEN_EVENTS:
            self._sent_at = time.monotonic()
            send_event(EVENT, self.as_message())

    def as_message(self) -> dict[str, Any]:
        """Return the present state as plain values."""
        with self._lock:
            progress = self._progress
        return {"prompt_id": self.prompt_id, "node_id": self.node_id, **asdict(progress)}


_LOCK = threading.Lock()
_RUNNING: dict[str, RunningTraining] = {}


@contextlib.contextmanager
def registered(training: RunningTraining) -> Iterator[RunningTraining]:
    """List a training while it runs."""
    with _LOCK:
        _RUNNING[training.prompt_id] = training
    try:
        yield training
    finally:
        with _LOCK:
            _RUNNING.pop(training.prompt_id, None)


def running_trainings() -> list[RunningTraining]:
    """Return the trainings that run now."""
    with _LOCK:
        return list(_RUNNING.values())


def find_training(prompt_id: str) -> RunningTraining | None:
    """Return the training of a prompt, None if it runs none now."""
    with _LOCK:
        return _RUNNING.get(prompt_id)


def server_instance() -> Any:
    """Return ComfyUI's server, None outside of one."""
    server = sys.modules.get("server")  # ComfyUI's; not imported for this, it is a whole web server
    return getattr(getattr(server, "PromptServer", None), "instance", None)


def executing_node_id() -> str | None:
    """Return the node whose code runs in this thread, None outside of a prompt."""
    from comfy_execution.utils import get_executing_context

    context = get_executing_context()
    return None if context is None else str(context.node_id)


def send_event(event: str, data: dict[str, Any]) -> None:
    """Send an event to every browser, if a server is running."""
    instance = server_instance()
    if instance is not None:
        instance.send_sync(event, data)


def show_text(text: str, node_id: str | None) -> None:
    """Show a line on the node, if a server is running."""
    instance = server_instance()
    if instance is not None and node_id is not None:
        instance.send_progress_text(text, node_id)
