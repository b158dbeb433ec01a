"""Workers on several machines over Ray, behind the same interface as those of this machine.

Ray says which nodes there are, reserves their GPUs, starts one agent a node and ends it with us. Messages,
weights included, go over a connection of our own from this process to each agent, as data only (see
``stream``). Nothing here imports ray but ``ray_driver``, which is a process of its own.
"""

from .addresses import check_address
from .pool import ClusterPool
from .spec import ClusterSpec

__all__ = ["ClusterPool", "ClusterSpec", "check_address"]
