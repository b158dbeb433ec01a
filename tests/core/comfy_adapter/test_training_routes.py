"""The routes answer what they should, also to what nobody should send."""

from __future__ import annotations

import asyncio
import sys
import types

import pytest

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(60)]


def talk(requests):
    """Register the routes with a bare server and return ``(status, JSON)`` of each request."""
    from aiohttp import web
    from aiohttp.test_utils import TestClient, TestServer
    from comfyui_ferry.core.comfy_adapter.training_routes import register_training_routes

    instance = types.SimpleNamespace(routes=web.RouteTableDef())
    module = types.SimpleNamespace(PromptServer=types.SimpleNamespace(instance=instance))

    async def run():
        before = sys.modules.get("server")
        sys.modules["server"] = module
        try:
            register_training_routes()
        finally:
            sys.modules.pop("server")
            if before is not None:
                sys.modules["server"] = before
        app = web.Application()
        app.add_routes(instance.routes)
        async with TestClient(TestServer(app)) as client:
            answers = []
            for method, path in requests:
                response = await client.request(method, path)
                is_json = response.content_type == "application/json"
                answers.append((response.status, await response.json() if is_json else None))
            return answers

    return asyncio.run(run())


def test_commands_reach_the_training_that_runs():
    from comfyui_ferry.core.comfy_adapter.running_trainings import RunningTraining, registered

    training = RunningTraining("p1", "7", steps=5)
    with registered(training):
        listed, saved, unknown, other, method = talk(
            [
                ("GET", "/ferry/trainings"), ("POST", "/ferry/trainings/p1/save"),
                ("POST", "/ferry/trainings/p1/erase"), ("POST", "/ferry/trainings/p2/stop"),
                ("GET", "/ferry/trainings/p1/stop"),
            ]
        )  # fmt: skip
    assert [entry["prompt_id"] for entry in listed[1]] == ["p1"]
    assert saved[0] == 202
    assert training.take() == {"save"}
    assert (unknown[0], other[0], method[0]) == (400, 404, 405)
    assert "erase" in unknown[1]["error"]
