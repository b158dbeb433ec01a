"""Run one prompt on a ComfyUI server as the browser does: post it, follow the websocket, read the history."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from .comfy_server import ComfyServer, ServerError

_POLL_S = 1.0
_BINARY_TEXT = 3


class PromptError(RuntimeError):
    """The server refused the prompt, or a node raised; the message is what the person would read.

    Attributes:
        node_type: The class of the node that failed, or None when the whole prompt was refused.
        detail: The server's full answer.
    """

    def __init__(self, message: str, *, node_type: str | None, detail: Any) -> None:
        super().__init__(message)
        self.node_type = node_type
        self.detail = detail


@dataclass(frozen=True)
class Progress:
    """One message on the way: which node, how far, and a text if it sent one."""

    node_id: str
    value: float = 0.0
    maximum: float = 0.0
    text: str = ""


@dataclass
class PromptResult:
    """What a finished prompt left behind.

    Attributes:
        outputs: Node id -> the node's output, as in ``/history``.
        progress: Every `Progress` message in order.
        cached: Ids of the nodes that ComfyUI did not run again.
        seconds: From posting to the end.
    """

    prompt_id: str
    outputs: dict[str, Any]
    progress: list[Progress] = field(default_factory=list)
    cached: set[str] = field(default_factory=set)
    seconds: float = 0.0


def run_prompt(
    server: ComfyServer,
    prompt: dict[str, Any],
    *,
    limit_s: float = 300.0,
    report: Callable[[Progress], None] = lambda _: None,
) -> PromptResult:
    """Run ``prompt`` and return when it has finished.

    Args:
        server: A started server.
        prompt: In the server's format (see `graph_to_prompt`).
        limit_s: Give up after so many seconds.
        report: Called with every progress message.

    Raises:
        PromptError: If the server refuses the prompt or a part of it, or a node raises.
        ServerError: If the server dies or the limit passes.
    """
    return asyncio.run(_run(server, prompt, limit_s, report))


async def _run(
    server: ComfyServer, prompt: dict[str, Any], limit_s: float, report: Callable[[Progress], None]
) -> PromptResult:
    client, start = uuid.uuid4().hex, time.monotonic()
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"{server.url}/ws?clientId={client}", max_msg_size=0) as socket,
    ):
        body = {"prompt": prompt, "client_id": client}
        async with session.post(f"{server.url}/prompt", json=body) as answer:
            accepted = await answer.json()
            if answer.status != 200:
                raise PromptError(_refusal(accepted), node_type=None, detail=accepted)
        result = PromptResult(accepted["prompt_id"], {})
        while not await _next_message(socket, result, report):
            if server.process is None or server.process.poll() is not None:
                raise ServerError(server.explain("the server died while the prompt ran"))
            if time.monotonic() - start > limit_s:
                raise ServerError(server.explain(f"the prompt did not finish within {limit_s:.0f} s"))
        async with session.get(f"{server.url}/history/{result.prompt_id}") as answer:
            result.outputs = (await answer.json())[result.prompt_id]["outputs"]
    result.seconds = time.monotonic() - start
    if accepted.get("node_errors"):  # ComfyUI runs the outputs that are valid and leaves the others out
        raise PromptError(_refusal(accepted), node_type=None, detail=accepted)
    return result


async def _next_message(
    socket: aiohttp.ClientWebSocketResponse, result: PromptResult, report: Callable[[Progress], None]
) -> bool:
    """Take in one message; return whether the prompt has finished."""
    try:
        message = await socket.receive(_POLL_S)
    except TimeoutError:
        return False
    if message.type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.ERROR):
        await asyncio.sleep(_POLL_S)  # the caller then finds the server dead, or its limit passed
        return False
    progress = None
    if message.type == aiohttp.WSMsgType.BINARY:
        progress = _text_message(message.data)
    elif message.type == aiohttp.WSMsgType.TEXT:
        kind, data = (parsed := json.loads(message.data))["type"], parsed.get("data", {})
        if data.get("prompt_id", result.prompt_id) != result.prompt_id:
            return False
        if kind == "execution_error":
            raise PromptError(data["exception_message"].strip(), node_type=data["node_type"], detail=data)
        if kind == "execution_interrupted":
            raise PromptError("the prompt was interrupted", node_type=data["node_type"], detail=data)
        if kind == "execution_cached":
            result.cached |= set(data["nodes"])
        elif kind == "executing" and data.get("node") is None:
            return True  # sent after the history is written; "execution_success" comes before
        elif kind == "executing":
            progress = Progress(data["node"])
        elif kind == "progress":
            progress = Progress(data["node"], data["value"], data["max"])
    if progress is not None:
        result.progress.append(progress)
        report(progress)
    return False


def _text_message(data: bytes) -> Progress | None:
    """Decode ``send_progress_text``: type, length of the node's id, id, text."""
    if int.from_bytes(data[:4], "big") != _BINARY_TEXT:
        return None
    length = int.from_bytes(data[4:8], "big")
    return Progress(data[8 : 8 + length].decode(), text=data[8 + length :].decode())


def _refusal(answer: dict[str, Any]) -> str:
    """Return a refused prompt's reasons, node by node, as one text."""
    reasons = [answer.get("error", {}).get("message", "refused")]
    for node_id, errors in answer.get("node_errors", {}).items():
        reasons += [
            f"{errors['class_type']} {node_id}: {e['message']}: {e['details']}" for e in errors["errors"]
        ]
    return "; ".join(reasons)
