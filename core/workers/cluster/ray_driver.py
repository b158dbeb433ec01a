"""The process that talks to Ray, run as a script with ``python -P``; standard library and ray only.

It is a process of its own because Ray takes one over: it answers signals, starts threads, ends a process that
cannot reach the cluster's head, and allows one connection a process, which another pack may have made.

It speaks JSON lines with its parent over an inherited socket and lives as long as that socket. Commands:
``connect`` and ``look`` (answered by ``nodes``), ``place`` (by one ``placed`` an agent), ``serve`` (by
``ended`` whenever an agent ends). ``failed`` answers what could not be done. Ray ends the agents of a driver
that is gone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import os
import select
import signal
import socket
import sys
import traceback
from typing import Any

_LOOK_S = 0.05
_MAX_TEXT = 4_000


class Agent:
    """An actor; on its node it loads the pack that lies there and hands over to it."""

    def __init__(self, place: dict[str, Any]) -> None:
        self.place = place
        self.module: Any = None

    def describe(self, request: str) -> str:
        """Return what ``agent.describe`` says as JSON, or ``{"problem": ...}`` if there is no pack."""
        import importlib
        import runpy
        from pathlib import Path

        named = os.environ.get(self.place["root_variable"])
        folder = named or self.place["root"]
        bootstrap = Path(folder, "core", "workers", "bootstrap.py")
        if not bootstrap.is_file():
            return json.dumps({"problem": f"the pack is not in {folder}"})
        runpy.run_path(str(bootstrap))["load_package"](self.place["alias"], folder)
        self.module = importlib.import_module(f"{self.place['alias']}.core.workers.cluster.agent")
        return self.module.describe(request)

    def serve(self, request: str) -> None:
        """Serve the parent until the connection to it ends."""
        self.module.serve(request)


class Driver:
    """Does what the parent says, one command after the other, and watches the agents meanwhile."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.received = b""
        self.ray: Any = None
        self.agents: list[Any] = []
        self.open: dict[Any, tuple[str, int]] = {}  # what an agent is doing: answer to come, its number

    def run(self) -> None:
        """Return once the parent closes its end, or is gone."""
        while True:
            readable, _, _ = select.select([self.control], [], [], _LOOK_S if self.open else None)
            if readable and not self.read():
                return
            self.look_at_agents()

    def read(self) -> bool:
        """Run the commands that have arrived; False once there will be no more."""
        data = self.control.recv(1 << 16)
        *lines, self.received = (self.received + data).split(b"\n")
        for line in lines:
            command = json.loads(line)
            try:
                getattr(self, f"do_{command.pop('do')}")(**command)
            except Exception as error:  # noqa: BLE001 - the process boundary; the parent is told
                traceback.print_exc()
                self.say("failed", message=_text(error))
        return bool(data)

    def say(self, event: str, **values: Any) -> None:
        """Tell the parent."""
        self.control.sendall(json.dumps({"event": event, **values}).encode() + b"\n")

    def do_connect(self, address: str) -> None:
        """Join the cluster and say which nodes it has."""
        import ray

        self.ray = ray
        ray.init(
            address=address,
            namespace=f"comfyui-ferry-{os.getpid()}",
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the parent's
        self.do_look()

    def do_look(self) -> None:
        """Say which nodes the cluster has and what of them is free."""
        ray = self.ray
        here = ray.get_runtime_context().get_node_id()
        free = _free_resources()
        nodes = []
        for node in ray.nodes():
            if node["Alive"]:
                total = node["Resources"]
                nodes.append(
                    {
                        "id": node["NodeID"],
                        "address": node["NodeManagerAddress"],
                        "here": node["NodeID"] == here,
                        "gpus": int(total.get("GPU", 0)),
                        "cpus": int(total.get("CPU", 0)),
                        "free_gpus": int(free(node["NodeID"], total).get("GPU", 0)),
                        "free_cpus": int(free(node["NodeID"], total).get("CPU", 0)),
                    }
                )
        self.say(
            "nodes",
            nodes=nodes,
            address=ray.util.get_node_ip_address(),
            ray=importlib.metadata.version("ray"),
        )

    def do_place(self, agents: list[dict[str, Any]], place: dict[str, Any], requests: list[str]) -> None:
        """Start one agent a node, each holding the resources of its ranks."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        for number, asked in enumerate(agents):
            actor = self.ray.remote(Agent).options(
                num_gpus=asked["gpus"],
                num_cpus=asked["cpus"],
                max_restarts=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(asked["node"], soft=False),
            )
            self.agents.append(actor.remote(place))
            self.open[self.agents[-1].describe.remote(requests[number])] = ("placed", number)

    def do_serve(self, requests: list[str]) -> None:
        """Have every agent connect to the parent and serve it."""
        for number, request in enumerate(requests):
            self.open[self.agents[number].serve.remote(request)] = ("ended", number)

    def look_at_agents(self) -> None:
        """Say what has come of what the agents were asked."""
        if not self.open:
            return
        done, _ = self.ray.wait(list(self.open), num_returns=1, timeout=0)
        for answer in done:
            event, number = self.open.pop(answer)
            try:
                self.say(event, agent=number, answer=self.ray.get(answer), error=None)
            except Exception as error:  # noqa: BLE001 - whatever ended the agent; the parent is told
                self.say(event, agent=number, answer=None, error=_text(error))

    def close(self) -> None:
        """End the agents and leave the cluster."""
        if self.ray is not None and self.ray.is_initialized():
            for agent in self.agents:
                self.ray.kill(agent)
            self.ray.shutdown()


def _free_resources() -> Any:
    """Return a function from a node's id and its resources to those that nobody holds."""
    try:
        from ray._private.state import available_resources_per_node
    except ImportError:  # Ray has no public name for it; without it, waiting for a GPU ends with a deadline
        return lambda node, total: total
    free = available_resources_per_node()
    return lambda node, total: free.get(node, total)


def _text(error: BaseException) -> str:
    """Return the end of an error's message, where Ray puts the cause."""
    return f"{type(error).__name__}: {error}"[-_MAX_TEXT:]


def main() -> None:
    """Serve the parent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--control", type=int, required=True)
    arguments = parser.parse_args()
    os.set_inheritable(arguments.control, False)
    sys.argv = ["comfyui-ferry-ray-driver"]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    driver = Driver(socket.socket(fileno=arguments.control))
    try:
        driver.run()
    finally:
        # What Ray does at exit takes seconds if the cluster is gone; it needs no help to clean up.
        signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
        signal.alarm(3)
        driver.close()
        os._exit(0)


if __name__ == "__main__":
    main()
