import copy
import io
import pickle

import pytest
import torch
from comfyui_ferry.core.module_hooks import ModuleHook, hook_names, install_hook, remove_hook
from torch import nn


class Log(ModuleHook):
    def __init__(self, name, log):
        self.name, self.log = name, log

    def run(self, forward, module, args, kwargs):
        self.log.append(f"{self.name}>")
        try:
            return forward(*args, **kwargs)
        finally:
            self.log.append(f"<{self.name}")


class Raises(nn.Module):
    def forward(self, x):
        raise KeyboardInterrupt


def test_the_first_hook_is_the_outermost_and_all_see_the_way_out():
    log, module = [], Raises()
    install_hook(module, "a", Log("a", log))
    install_hook(module, "b", Log("b", log))
    assert hook_names(module) == ["a", "b"]
    with pytest.raises(KeyboardInterrupt):
        module(torch.zeros(1))
    assert log == ["a>", "b>", "<b", "<a"]


@pytest.mark.parametrize("order", [["a", "b"], ["b", "a"]])
def test_removal_restores_the_module_exactly(order):
    module = nn.Linear(2, 2)
    before = dict(module.__dict__)
    for name in ("a", "b"):
        install_hook(module, name, Log(name, []))
    for name in order:
        remove_hook(module, name)
    assert module.__dict__ == before
    remove_hook(module, "a")


def test_a_name_can_be_installed_once():
    module = nn.Linear(2, 2)
    install_hook(module, "a", ModuleHook())
    with pytest.raises(ValueError, match="already installed"):
        install_hook(module, "a", ModuleHook())


def test_an_instance_forward_of_other_code_is_kept():
    module = nn.Linear(2, 2)
    module.forward = lambda x: x + 1
    theirs = module.forward
    install_hook(module, "a", ModuleHook())
    assert module(torch.zeros(1)).item() == 1
    remove_hook(module, "a")
    assert module.forward is theirs


def test_removal_below_other_code_leaves_a_pass_through():
    log, module = [], nn.Linear(2, 2)
    install_hook(module, "a", Log("a", log))
    ours = module.forward
    module.forward = lambda x: ours(x) * 2
    remove_hook(module, "a")
    x = torch.randn(1, 2)
    assert torch.equal(module(x), nn.functional.linear(x, module.weight, module.bias) * 2)
    assert log == []


def test_copies_and_pickles_are_unhooked():
    log, module = [], nn.Sequential(nn.Linear(2, 2))
    install_hook(module[0], "a", Log("a", log))
    buffer = io.BytesIO()
    pickle.dump(module, buffer, protocol=2)
    for other in (copy.deepcopy(module), pickle.loads(buffer.getvalue())):
        x = torch.randn(1, 2)
        with torch.no_grad():
            other[0].weight.zero_()
        assert torch.equal(other(x)[0], other[0].bias)
        assert log == []
    assert hook_names(module[0]) == ["a"]
