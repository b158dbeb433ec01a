from __future__ import annotations

import pytest
from comfyui_ferry.core.comfy_adapter.acceleration import ACCELERATIONS, Acceleration, check_acceleration
from comfyui_ferry.core.errors import RequestError

GPUS = ("cuda:0", "cuda:1")


def test_what_can_be_chosen():
    chosen = [check_acceleration(value, GPUS) for value in ACCELERATIONS]
    assert [(one.compiles, one.records) for one in chosen] == [
        (False, True),
        (False, False),
        (False, True),
        (True, False),
        (True, True),
    ]
    assert check_acceleration("torch.compile", ("cpu", "cpu")) is Acceleration.COMPILE
    assert check_acceleration("auto", ("cpu",)) is Acceleration.NONE


@pytest.mark.parametrize(
    ("value", "devices", "message"),
    [
        ("fast", GPUS, "'fast' was asked. There are auto, none, cuda graphs"),
        ("cuda graphs", ("cpu",), "need CUDA GPUs"),
        ("torch.compile + cuda graphs", ("cpu", "cpu"), "Set acceleration to none"),
    ],
)
def test_what_cannot_be_done_is_refused(value, devices, message):
    with pytest.raises(RequestError, match=message):
        check_acceleration(value, devices)


def test_without_triton_nothing_is_compiled_on_gpus(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RequestError, match="Install triton"):
        check_acceleration("torch.compile", GPUS)
    assert check_acceleration("cuda graphs", GPUS).records
