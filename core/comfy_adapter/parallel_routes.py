"""``/ferry/machine`` and ``/ferry/parallel``: what the GPU map has to know.

- ``GET /ferry/machine``: the devices that workers may use, see ``describe_devices``; with ``error`` in place
  of them if a setting is wrong.
- ``GET /ferry/parallel``: the last read-out of each parallel node, see ``readout_event``.
"""

from __future__ import annotations

from typing import Any

from ..errors import RequestError
from .devices import describe_devices
from .parallel_readout import latest_readouts
from .running_trainings import server_instance


def register_parallel_routes() -> None:
    """Add the routes to ComfyUI's server, if there is one; called when the node list is built."""
    instance = server_instance()
    if instance is None:
        return
    from aiohttp import web  # ComfyUI's own dependency; only where there is a server

    async def describe_machine(request: Any) -> Any:
        try:
            return web.json_response(describe_devices())
        except RequestError as error:
            return web.json_response({"error": str(error)})

    async def list_readouts(request: Any) -> Any:
        return web.json_response(latest_readouts())

    instance.routes.get("/ferry/machine")(describe_machine)
    instance.routes.get("/ferry/parallel")(list_readouts)
