from __future__ import annotations

import pytest
from comfyui_ferry.core.comfy_adapter.worker_notices import loss_notice

pytestmark = [pytest.mark.comfy]


@pytest.mark.parametrize(
    ("reason", "kind", "remedy"),
    [
        ("worker rank 1 raised OutOfMemoryError: CUDA out of memory.", "out_of_memory", "smaller"),
        ("the pool is lost (worker rank 0 was killed by SIGKILL (why)).", "killed", "host ran out of memory"),
        ("job 'forward' had no reply from rank 1\nRuntimeError: out of memory", "lost", "Ferry Doctor"),
        ("", "lost", "Ferry Doctor"),
    ],
)  # fmt: skip
def test_a_loss_comes_with_its_kind_and_a_remedy(reason, kind, remedy):
    notice = loss_notice(reason, 2)
    assert notice.kind == kind
    assert remedy in notice.remedy
    assert "Queue the prompt again" in notice.remedy
    assert "\n" not in notice.reason
    assert "pool" not in notice.reason
