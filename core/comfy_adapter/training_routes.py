"""``/ferry/trainings``: what runs now, and asking it to save, preview or stop.

- ``GET /ferry/trainings``: ``[{"prompt_id": ..., "step": ..., ...}]``, see ``TrainingProgress``.
- ``POST /ferry/trainings/{prompt_id}/{command}``: ``command`` is ``save``, ``preview`` or ``stop``. The
  answer comes at once; the training does it after the step that is running.
"""

from __future__ import annotations

from typing import Any

from ..errors import RequestError
from .running_trainings import find_training, running_trainings, server_instance


def register_training_routes() -> None:
    """Add the routes to ComfyUI's server, if there is one; called when the node list is built."""
    instance = server_instance()
    if instance is None:
        return
    from aiohttp import web  # ComfyUI's own dependency; only where there is a server

    async def list_trainings(request: Any) -> Any:
        return web.json_response([training.as_message() for training in running_trainings()])

    async def send_command(request: Any) -> Any:
        training = find_training(request.match_info["prompt_id"])
        if training is None:
            return web.json_response({"error": "no training of this prompt runs now"}, status=404)
        try:
            training.ask(request.match_info["command"])
        except RequestError as error:
            return web.json_response({"error": str(error)}, status=400)
        return web.json_response({"accepted": True}, status=202)

    instance.routes.get("/ferry/trainings")(list_trainings)
    instance.routes.post("/ferry/trainings/{prompt_id}/{command}")(send_command)
