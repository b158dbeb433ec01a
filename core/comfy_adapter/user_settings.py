"""The pack's settings in ComfyUI's settings dialog: what an input at ``auto`` means on this machine.

- ``Ferry.VramBudgetGb``, ``Ferry.RamBudgetGb``: for budgets that are 0 (auto) on a node.
- ``Ferry.Gpus``: the GPUs that workers may use, as a list of indices; empty: all.

They are read from the file in which ComfyUI keeps its only user's settings, whenever they are needed. With
``--multi-user`` nobody knows whose prompt runs, so none applies; nor does one outside of a server.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import comfy.cli_args
import folder_paths

from ..errors import RequestError
from .running_trainings import server_instance

_BUDGETS = {"vram": "Ferry.VramBudgetGb", "ram": "Ferry.RamBudgetGb"}
_GPUS = "Ferry.Gpus"
_WHERE = "Settings > Ferry"


def budget_gb(kind: str, asked_gb: float) -> float:
    """Return the budget that holds: what a node asks for, or the setting where it leaves it to auto (0).

    Args:
        kind: ``vram`` or ``ram``.
        asked_gb: The node's input in GB (2**30 bytes).

    Raises:
        RequestError: If the setting is no number of GB.
    """
    return asked_gb if asked_gb else default_budget_gb(kind)


def default_budget_gb(kind: str) -> float:
    """Return the setting in GB, 0.0 if there is none.

    Raises:
        RequestError: If it is no number of GB.
    """
    value = _setting(_BUDGETS[kind])
    if value in (None, ""):
        return 0.0
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if not 0 <= number < math.inf:
        raise RequestError(
            f"the setting {_BUDGETS[kind]} is {value!r}",
            limit="It is a number of GB, 0 or more; 0: none",
            way_out=f"Correct it in {_WHERE}",
        )
    return float(number)


def chosen_gpus(num_devices: int) -> list[int]:
    """Return the indices of the devices that workers may use: the setting's, or all.

    Raises:
        RequestError: If the setting names a device that does not exist, or one twice.
    """
    value = _setting(_GPUS)
    if value in (None, "", []):
        return list(range(num_devices))
    known = (
        isinstance(value, list)
        and all(isinstance(index, int) and not isinstance(index, bool) for index in value)
        and len(set(value)) == len(value)
        and all(0 <= index < num_devices for index in value)
    )
    if not known:
        raise RequestError(
            f"the setting {_GPUS} is {value!r}",
            limit=f"It is a list of different GPUs from 0 to {num_devices - 1}; empty: all",
            way_out=f"Choose the GPUs in {_WHERE}",
        )
    return sorted(value)


def settings_version(*kinds: str, **asked_gb: float) -> str:
    """Return a text that changes with the settings that decide here, for a node's fingerprint.

    Args:
        kinds: ``gpus``, if the chosen GPUs decide.
        asked_gb: Budgets by kind, as a node asks for them.
    """
    parts = [f"gpus={_setting(_GPUS)!r}"] if "gpus" in kinds else []
    parts += [f"{kind}={_setting(_BUDGETS[kind])!r}" for kind, asked in asked_gb.items() if not asked]
    return " ".join(parts)


def _setting(name: str) -> Any:
    if server_instance() is None or comfy.cli_args.args.multi_user:
        return None
    file = Path(folder_paths.get_user_directory()) / "default" / "comfy.settings.json"
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise RequestError(
            f"the settings in {file} were asked for",
            limit=f"The file is damaged: {error}",
            way_out="Repair or remove it",
        ) from error
    return settings.get(name) if isinstance(settings, dict) else None
