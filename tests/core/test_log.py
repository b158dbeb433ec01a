import logging

from comfyui_ferry.core.log import RANK_VARIABLE, get_logger


def test_the_logger_has_a_stable_name(caplog):
    with caplog.at_level(logging.INFO, logger="comfyui_ferry"):
        get_logger("offload").info("moved %d bytes", 3)
    assert caplog.records[0].name == "comfyui_ferry.offload"
    assert caplog.records[0].getMessage() == "moved 3 bytes"


def test_a_worker_adds_its_rank(caplog, monkeypatch):
    monkeypatch.setenv(RANK_VARIABLE, "2")
    with caplog.at_level(logging.INFO, logger="comfyui_ferry"):
        get_logger("workers").info("ready")
    assert caplog.records[0].getMessage() == "[rank 2] ready"
