"""What the settings dialog writes decides where a node says auto, and nowhere else."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch
from comfyui_ferry.core.comfy_adapter import devices, fill_auto, user_settings
from comfyui_ferry.core.errors import RequestError
from ferry_support.tiny_patchers import PATCHERS

pytestmark = [pytest.mark.comfy]


@pytest.fixture
def write(monkeypatch, tmp_path):
    """Write the settings of a server's only user."""
    import folder_paths

    instance = types.SimpleNamespace()
    server = types.SimpleNamespace(PromptServer=types.SimpleNamespace(instance=instance))
    monkeypatch.setitem(sys.modules, "server", server)
    monkeypatch.setattr(folder_paths, "user_directory", str(tmp_path))
    (tmp_path / "default").mkdir()

    def run(**values):
        text = json.dumps({f"Ferry.{name}": value for name, value in values.items()})
        (tmp_path / "default" / "comfy.settings.json").write_text(text)

    return run


def test_a_budget_holds_where_the_node_says_auto(write):
    assert user_settings.budget_gb("vram", 0.0) == 0.0  # no file yet
    write(VramBudgetGb=8, RamBudgetGb=32.5)
    assert user_settings.budget_gb("vram", 0.0) == 8.0
    assert user_settings.budget_gb("vram", 3.0) == 3.0
    assert user_settings.budget_gb("ram", 0.0) == 32.5


def test_a_cached_node_runs_again_only_if_its_auto_means_something_else(write):
    write(VramBudgetGb=8)
    before = user_settings.settings_version(vram=0.0), user_settings.settings_version(vram=3.0)
    write(VramBudgetGb=9)
    after = user_settings.settings_version(vram=0.0), user_settings.settings_version(vram=3.0)
    assert (before[0] != after[0], before[1] == after[1]) == (True, True)
    chosen = user_settings.settings_version("gpus")
    write(Gpus=[0])
    assert user_settings.settings_version("gpus") != chosen


def test_a_training_that_offloads_takes_the_budgets_and_says_so(write):
    model = PATCHERS["wan"].build()
    asked = {"rank": 4, "alpha": 4.0, "learning_rate": 1e-4, "targets": "", "loss_function": "auto",
             "optimizer": "AdamW"}  # fmt: skip
    write(VramBudgetGb=8)
    filled = fill_auto(model, asked | {"offload": True})
    assert (filled.values["vram_budget_gb"], filled.values["ram_budget_gb"]) == (8.0, 0.0)
    assert "8 GB of VRAM (Settings > Ferry)" in filled.plan
    own = fill_auto(model, asked | {"offload": True, "vram_budget_gb": 3.0})
    assert own.values["vram_budget_gb"] == 3.0
    assert "Settings" not in own.plan
    assert fill_auto(model, asked | {"offload": False}).values["vram_budget_gb"] == 0.0


@pytest.mark.parametrize("value", [-1, "8", True, float("inf"), [8]])
def test_a_budget_that_is_no_number_is_refused(write, value):
    write(VramBudgetGb=value)
    with pytest.raises(RequestError, match=r"Ferry\.VramBudgetGb.*Settings > Ferry"):
        user_settings.budget_gb("vram", 0.0)


def test_workers_get_the_chosen_gpus_and_no_others(write, monkeypatch):
    monkeypatch.setattr(devices, "_available_devices", lambda: ("GPU-a", "GPU-b", "GPU-c", "GPU-d"))
    write(Gpus=[])
    assert devices.worker_devices(4) == ("GPU-a", "GPU-b", "GPU-c", "GPU-d")
    write(Gpus=[3, 1])
    assert devices.worker_devices(2) == ("GPU-b", "GPU-d")
    assert devices.device_index("GPU-d", 1) == 3
    with pytest.raises(RequestError, match=r"gpus=3.*Settings > Ferry allows 2: 1, 3.*from 1 to 2"):
        devices.worker_devices(3)


def test_a_training_takes_its_helpers_from_the_chosen_gpus_too(write, monkeypatch):
    monkeypatch.setattr(devices, "_available_devices", lambda: ("GPU-a", "GPU-b", "GPU-c", "GPU-d"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="b"))
    own = torch.device("cuda", 1)
    write(Gpus=[])
    assert devices.helper_devices(3, first=own) == ("GPU-a", "GPU-c")
    write(Gpus=[1, 2, 3])
    assert devices.helper_devices(3, first=own) == ("GPU-c", "GPU-d")
    write(Gpus=[2, 3])
    assert devices.helper_devices(2, first=own) == ("GPU-c",)
    with pytest.raises(RequestError, match="Settings > Ferry allows 2: 2, 3"):
        devices.helper_devices(3, first=own)


@pytest.mark.parametrize("value", [[4], [-1], [0, 0], "0,1", [True], [0.5], {"0": 1}])
def test_gpus_that_do_not_exist_are_refused(write, monkeypatch, value):
    monkeypatch.setattr(devices, "_available_devices", lambda: ("GPU-a", "GPU-b", "GPU-c", "GPU-d"))
    write(Gpus=value)
    with pytest.raises(RequestError, match=r"Ferry\.Gpus"):
        devices.worker_devices(1)


def test_no_setting_holds_for_several_users_or_outside_of_a_server(write, monkeypatch):
    import comfy.cli_args

    write(VramBudgetGb=8, Gpus=[99])
    monkeypatch.setattr(comfy.cli_args.args, "multi_user", True)
    assert user_settings.budget_gb("vram", 0.0) == 0.0
    monkeypatch.setattr(comfy.cli_args.args, "multi_user", False)
    monkeypatch.delitem(sys.modules, "server")
    assert user_settings.chosen_gpus(2) == [0, 1]
