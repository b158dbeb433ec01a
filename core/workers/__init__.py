"""Worker processes: one per rank, outliving any one prompt, never hanging their parent.

Plain PyTorch. ``WorkerPool.start(WorkerSpec(...))`` starts them, ``pool.call(job, payload)`` runs a job,
``SharedArena`` holds weights once for all of them. Security: nothing but the parent can talk to a
worker (an inherited socket pair), and messages are data only; what the ranks say to each other goes
through torch.distributed over loopback, which trusts every user of the machine.
"""

from .calls import PendingCall
from .cluster import ClusterPool, ClusterSpec, check_address
from .doctor import describe as describe_findings
from .doctor import examine as examine_machine
from .engine import RankEngine
from .host_memory import UnchangedFilePages, available_host_bytes, file_backed_bytes
from .links import known_links
from .pool import WorkerPool
from .progress import ProgressCounter
from .protocol import check_sendable
from .shared_arena import SharedArena, open_arena
from .shared_memory import SharedFile
from .spec import Deadlines, WorkerSpec
from .worker import WorkerContext, borrows_arguments

__all__ = [
    "ClusterPool",
    "ClusterSpec",
    "Deadlines",
    "PendingCall",
    "ProgressCounter",
    "RankEngine",
    "SharedArena",
    "SharedFile",
    "UnchangedFilePages",
    "WorkerContext",
    "WorkerPool",
    "WorkerSpec",
    "available_host_bytes",
    "borrows_arguments",
    "check_address",
    "check_sendable",
    "describe_findings",
    "examine_machine",
    "file_backed_bytes",
    "known_links",
    "open_arena",
]
