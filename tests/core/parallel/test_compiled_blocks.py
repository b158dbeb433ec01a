from __future__ import annotations

from typing import Any

import torch
import torch._dynamo  # once, instead of in every rank
from comfyui_ferry.core.module_hooks import hook_names
from comfyui_ferry.core.parallel import CompiledBlocks, parallelize
from ferry_support.parity import TOLERANCE, relative_error, world_group
from ferry_support.ranks import run_ranks
from ferry_support.toy_model import PLAN, build_toy, toy_call


def _compiled() -> dict[str, Any]:
    sizes: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        sizes.append(sum(node.op in ("call_function", "call_method") for node in graph.graph.nodes))
        return graph.forward

    model = build_toy()
    expected = model(**toy_call())
    handle = parallelize(model, PLAN, group=world_group())
    compiled = CompiledBlocks(model, PLAN, backend=backend)
    options = {"override": compiled.attention_override(handle.attention_override)}
    counts, errors = [], []
    with torch.no_grad():
        for _ in range(2):
            output = handle.run(model, **toy_call(), transformer_options=options)
            errors.append(relative_error(output, expected))
            counts.append(len(sizes))
    compiled.remove()
    with torch.no_grad():
        uncompiled = handle.run(model, **toy_call(), transformer_options=options)
    handle.remove()
    left = [path for path, module in model.named_modules() if hook_names(module) or "forward" in vars(module)]
    return {
        "errors": errors,
        "uncompiled": relative_error(uncompiled, expected),
        "counts": counts,
        "operations": sum(sizes),
        "left": left,
        "restored": torch.equal(model(**toy_call()), expected),
    }


def test_compiled_blocks_compute_the_same_and_share_their_code() -> None:
    for seen in run_ranks(_compiled, 2):
        assert max(*seen["errors"], seen["uncompiled"]) <= TOLERANCE
        # Two blocks, compiled once, and nothing again in the second forward; hooks are not compiled.
        assert seen["counts"][0] == seen["counts"][1] <= 5
        assert 8 <= seen["operations"] <= 40
        assert seen["left"] == [] and seen["restored"]
