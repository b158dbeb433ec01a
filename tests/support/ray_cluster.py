"""A Ray cluster of several nodes on this machine, in a process of its own, for tests.

Run as a script it starts one, says where as a JSON line, and obeys commands until its input ends.
``RayCluster`` is the other side. Nothing of Ray runs in the test process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from typing import Any

_NODE = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80 << 20}


class RayCluster:
    """Nodes of one CPU each; the first one is the head and the node of this process."""

    def __init__(self, num_nodes: int, **environment: str) -> None:
        # Ray makes sockets below it, whose paths must be short.
        self.folder = tempfile.mkdtemp(prefix="fr", dir="/tmp")
        settings = {"RAY_enable_worker_prestart": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(num_nodes), self.folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | settings | environment,
            text=True,
            start_new_session=True,
            cwd=self.folder,
        )
        self.address: str = self._answer()["address"]

    def add_node(self, **environment: str) -> None:
        """Start one more node, with these variables set on it."""
        self._tell({"do": "add", "environment": environment})

    def kill_last_node(self) -> None:
        """End the newest node as a machine that crashes: all of its processes by SIGKILL."""
        self._tell({"do": "kill"})

    def agents(self) -> list[int]:
        """Return the processes that Ray started for agents."""
        return self._tell({"do": "agents"})["pids"]

    def close(self) -> None:
        """End the cluster."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _tell(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError("the Ray cluster did not start")


def main(num_nodes: int, folder: str) -> None:
    import psutil
    from ray.cluster_utils import Cluster

    def say(**values: Any) -> None:
        print(json.dumps(values), flush=True)

    head = _NODE | {"include_dashboard": False, "temp_dir": folder}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(**_NODE, wait=False) for _ in range(num_nodes - 1)]
    cluster.wait_for_nodes()
    say(address=cluster.address)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "add":
            os.environ.update(command["environment"])
            nodes.append(cluster.add_node(**_NODE))
            for name in command["environment"]:
                del os.environ[name]
            say()
        elif command["do"] == "kill":
            node = nodes.pop()
            for children in node.all_processes.values():
                for info in children:
                    for process in psutil.Process(info.process.pid).children(recursive=True):
                        process.kill()
            cluster.remove_node(node, allow_graceful=False)
            cluster.wait_for_nodes()  # until the head has noticed
            say()
        else:
            found = psutil.Process().children(recursive=True)
            say(pids=[child.pid for child in found if "ray::Agent" in " ".join(child.cmdline())])
    cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
