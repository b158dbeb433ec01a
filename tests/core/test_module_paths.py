import pytest
from comfyui_ferry.core.errors import PlanError
from comfyui_ferry.core.module_paths import find_modules, has_modules
from torch import nn


@pytest.fixture
def model():
    block = lambda: nn.ModuleDict({"attn": nn.Linear(1, 1), "mlp": nn.Linear(1, 1)})  # noqa: E731
    return nn.ModuleDict({"blocks": nn.ModuleList([block(), block(), block()]), "head": nn.Linear(1, 1)})


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("", [""]),
        ("head", ["head"]),
        ("blocks.0.attn", ["blocks.0.attn"]),
        ("blocks.-1", ["blocks.2"]),
        ("blocks.*.mlp", ["blocks.0.mlp", "blocks.1.mlp", "blocks.2.mlp"]),
        ("blocks.0.*", ["blocks.0.attn", "blocks.0.mlp"]),
    ],
)
def test_paths(model, path, names):
    assert [name for name, _ in find_modules(model, path)] == names
    assert all(module is model.get_submodule(name) for name, module in find_modules(model, path))


def test_a_path_that_matches_nothing_is_an_error(model):
    with pytest.raises(PlanError, match=r"blocks\.\*\.attention.*'attention'.*\['blocks', 'head'\]"):
        find_modules(model, "blocks.*.attention")
    assert not has_modules(model, "tail")


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("block.*.atn", r"blocks\.\*\.attn"),
        ("BLOCKS.0", r"blocks\.\*"),
        ("attn", r"blocks\.\*\.attn"),
        ("blocks.9.mlp", r"blocks\.\*\.mlp"),
    ],
)
def test_the_error_proposes_what_may_have_been_meant(model, path, near):
    with pytest.raises(PlanError, match=rf"Near it are {near}[,.]"):
        find_modules(model, path)
