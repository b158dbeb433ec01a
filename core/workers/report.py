"""What is said when a pool is lost: each rank's fate, traceback and last log lines."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .calls import PendingCall

_TAIL_LINES = 60
_TAIL_BYTES = 16_000
_THREAD = "hread 0x"  # "Thread 0x..." or "Current thread 0x..."
_DISTRIBUTED = "torch/distributed/"


@dataclass
class RankReport:
    """One rank's fate.

    Attributes:
        rank: The rank.
        device: Its device, as asked.
        pid: Its process id.
        log_path: Its log.
        raised: One line: the exception it raised, or None.
        traceback: Of that exception, or None.
        ended: One line: how the process ended by itself, or None.
        hung: Whether it did nothing for too long.
        stacks_dumped: Whether its stacks were written to the log before it was stopped.
    """

    rank: int
    device: str | int
    pid: int
    log_path: Path
    raised: str | None = None
    traceback: str | None = None
    ended: str | None = None
    hung: bool = False
    stacks_dumped: bool = False

    @property
    def fate(self) -> str:
        """What happened to this rank, in one line."""
        said = [text for text in (self.raised and f"raised {self.raised}", self.ended) if text]
        if said:
            return ", then ".join(said)
        stacks = "; its stacks are in its log below" if self.stacks_dumped else ""
        state = "did nothing any more" if self.hung else "was still running"
        return f"{state} and has been ended{stacks}"

    @property
    def waits_for_others(self) -> bool:
        """Whether its dumped stack shows the main thread inside torch.distributed."""
        if not self.stacks_dumped:
            return False
        # faulthandler writes the oldest thread last, and that is the main one.
        return _DISTRIBUTED in log_tail(self.log_path).rpartition(_THREAD)[2]

    def section(self) -> str:
        """Return the rank's part of the report, several lines."""
        lines = [f"--- rank {self.rank} (device {self.device}, pid {self.pid}) {self.fate}"]
        if self.traceback is not None:
            lines.append(self.traceback.rstrip())
        lines += [f"last lines of {self.log_path}:", log_tail(self.log_path) or "(nothing)"]
        return "\n".join(lines)


def compose(cause: str | None, reports: Sequence[RankReport], calls: Sequence[PendingCall]) -> str:
    """Return the message of the ``WorkerError`` that ends all open calls.

    Args:
        cause: What was noticed, if it was not a rank's own failure (a deadline).
        reports: All ranks, in the order in which they failed.
        calls: The calls that were under way.
    """
    doing = ", ".join(f"{call.job!r} on ranks {list(call.ranks)}" for call in calls) or "no job"
    headline = cause or first_failure(reports)
    sections = "\n".join(report.section() for report in sorted(reports, key=lambda report: report.rank))
    return (
        f"{headline}. Running: {doing}. All {len(reports)} workers of this pool have been stopped; "
        f"start a new pool to go on.\n{sections}"
    )


def first_failure(reports: Sequence[RankReport]) -> str:
    """Return one line about the rank to blame.

    A process that ended comes before one that raised: the others' collectives raise because of it.
    """
    blamed = [report for report in reports if report.ended] or [report for report in reports if report.raised]
    return f"worker rank {blamed[0].rank} {blamed[0].fate}" if blamed else "the workers were lost"


def describe_exit(code: int | None) -> str:
    """Return how a process with this exit code ended, None standing for one that hung up only."""
    if code is None:
        return "closed its connection"
    if code >= 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (the system kills a process like this when memory runs out)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def log_tail(path: Path) -> str:
    """Return the last lines of a log, "" if it has none or is gone."""
    try:
        with open(path, "rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - _TAIL_BYTES))
            text = log.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-_TAIL_LINES:])
