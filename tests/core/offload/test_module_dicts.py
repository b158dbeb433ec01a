from __future__ import annotations

import copy
import pickle

import pytest
import torch
from comfyui_ferry.core.offload.module_dicts import ManagedDict


class Recorder:
    def __init__(self) -> None:
        self.read_names: list[str] = []
        self.changes: list[tuple] = []
        self.num_waits = 0
        self.updates = self

    def finish_entries(self, entries):
        self.num_waits += 1

    def read(self, holder, name):
        self.read_names.append(name)

    def entry_changed(self, holder, name, before):
        self.changes.append((name, before))


@pytest.fixture
def managed():
    original = {"a": torch.ones(1), "b": None, "c": torch.ones(2)}
    holder = ManagedDict(original, Recorder(), torch.nn.Module(), path="x.y", is_parameters=True)
    holder.managed = {"a": object()}
    return holder


def test_only_a_subscript_of_a_managed_name_counts_as_reading(managed):
    (
        list(managed),
        list(managed.items()),
        list(managed.values()),
        managed.get("a"),
        "a" in managed,
        dict(managed),
    )
    assert managed.engine.read_names == [] and managed.engine.num_waits == 3
    managed["a"], managed["c"]
    assert managed.engine.read_names == ["a"]


def test_every_way_of_assigning_is_reported(managed):
    a, c, new = dict.get(managed, "a"), dict.get(managed, "c"), torch.zeros(1)
    managed["a"] = a
    assert managed.engine.changes == []
    managed["a"] = new
    managed.update({"d": new}, e=new)
    managed.setdefault("f", new)
    managed |= {"g": new}
    assert managed.pop("c") is c
    assert managed.popitem()[0] == "g"
    del managed["d"]
    assert [name for name, _ in managed.engine.changes] == ["a", "d", "e", "f", "g", "c", "g", "d"]
    assert managed.engine.changes[0][1] is a
    assert managed.pop("missing", 3) == 3
    with pytest.raises(KeyError):
        managed.pop("missing")
    managed.clear()
    assert not managed and managed.hand_back() is managed.original and managed.original == {}


def test_copies_and_pickles_are_plain_dicts(managed):
    for made in (
        managed.copy(),
        copy.copy(managed),
        copy.deepcopy(managed),
        pickle.loads(pickle.dumps(managed)),
    ):
        assert type(made) is dict and list(made) == ["a", "b", "c"]
    assert copy.deepcopy(managed)["a"] is not dict.get(managed, "a")


def test_the_original_keeps_step_and_names_are_full(managed):
    managed["z"] = torch.zeros(1)
    del managed["b"]
    assert list(managed.original) == ["a", "c", "z"]
    assert managed.full_name("a") == "x.y.a"
