"""Arguments of a call along the batch."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.parallel import batch_size, join_batch, split_batch


def test_uneven_parts_and_what_is_for_all() -> None:
    x = [torch.arange(5.0)[:, None], torch.arange(10.0).view(5, 2)]
    arguments = {
        "x": x, "shared": torch.ones(1, 3), "scale": torch.tensor(2.0), "steps": 5,
        "control": {"input": [None, torch.arange(5)]}, "options": {"sigmas": torch.arange(7)},
    }  # fmt: skip
    parts = split_batch(arguments, 2, size=batch_size(x), whole=frozenset({"options"}))
    assert [part["x"][1].shape[0] for part in parts] == [3, 2]
    assert parts[1]["control"]["input"][1].tolist() == [3, 4]
    assert all(part["shared"] is arguments["shared"] for part in parts)
    assert all(part["options"] is arguments["options"] for part in parts)
    joined = join_batch([part["x"] for part in parts])
    assert all(torch.equal(one, other) for one, other in zip(joined, x, strict=True))


def test_fewer_samples_than_parts() -> None:
    assert len(split_batch({"x": torch.ones(2, 1)}, 4, size=2)) == 2
    whole = {"x": torch.ones(1, 1), "y": torch.ones(9)}
    assert split_batch(whole, 4, size=1) == [whole]


def test_a_tensor_of_another_length_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"control\.input\[0\] is \(3, 2\).*batch_degree to 1"):
        split_batch({"x": torch.ones(2), "control": {"input": [torch.ones(3, 2)]}}, 2, size=2)
    with pytest.raises(TypeError, match="str"):
        join_batch(["a", "b"])
