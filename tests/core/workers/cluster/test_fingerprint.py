from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.workers.cluster.fingerprint import differences, fingerprint, interface_of
from comfyui_ferry.core.workers.cluster.joining import check_node
from comfyui_ferry.core.workers.cluster.placement import Share
from comfyui_ferry.core.workers.spec import PACK_ROOT


def test_the_same_code_elsewhere_is_the_same_and_one_changed_line_is_not(tmp_path: Path):
    version = tmp_path / "version.py"
    version.write_text("1")
    copy = tmp_path / "elsewhere"
    shutil.copytree(PACK_ROOT / "core", copy / "core", ignore=shutil.ignore_patterns("__pycache__"))
    here = fingerprint(PACK_ROOT, {"ComfyUI": version})
    assert fingerprint(copy, {"ComfyUI": version}) == here
    with open(copy / "core" / "log.py", "a") as file:
        file.write("\n")
    version.write_text("2")
    found = differences(here, fingerprint(copy, {"ComfyUI": version}))
    assert [text.split()[0] for text in found] == ["ComfyUI-Ferry", "ComfyUI"]
    assert differences(here, here | {"PyTorch": "1.0"}) == [
        f"PyTorch is 1.0 there and {here['PyTorch']} here"
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"problem": "the pack is not in /x"}, "the pack is not in /x"),
        ({"fingerprint": {"PyTorch": "1.0"}}, "PyTorch is 1.0 there and 2.0 here"),
        ({"fingerprint": {}}, "PyTorch is missing there"),
        ({"interface": None}, "no network interface"),
        ({"devices": ["GPU-1"]}, "Ray gave 2 GPUs there but PyTorch sees 1"),
    ],
)
def test_a_node_that_is_not_like_this_machine_is_refused(change, message):
    good = {"fingerprint": {"PyTorch": "2.0"}, "interface": "eth0", "devices": []}
    share = Share("id", "10.0.0.2", False, range(2, 4))
    check_node(share, good, {"PyTorch": "2.0"})
    with pytest.raises(RequestError, match=rf"ranks 2 to 3 on node 10\.0\.0\.2.*{message}"):
        check_node(share, good | change, {"PyTorch": "2.0"})


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") is None
