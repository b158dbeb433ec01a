from __future__ import annotations

import inspect

import pytest
from comfyui_ferry.core.errors import PlanError
from comfyui_ferry.core.parallel.arguments import find_slot, named_slots, slot_of


def example(first, second, *rest, third=3, **more): ...


SIGNATURE = inspect.signature(example)


def test_a_slot_reads_and_replaces_by_position_or_name() -> None:
    slot = named_slots(SIGNATURE)["second"]
    assert slot.read((1, 2), {}) == 2
    assert slot.read((1,), {"second": 5}) == 5
    assert slot.read((1,), {}) is None
    assert slot.replace((1, 2, 9), {"third": 4}, 7) == ((1, 7, 9), {"third": 4})
    assert slot.replace((1,), {"second": 5}, 7) == ((1,), {"second": 7})


def test_names_only_and_variable_arguments() -> None:
    slots = named_slots(SIGNATURE)
    assert set(slots) == {"first", "second", "third"}
    assert slots["third"].position is None
    assert slot_of(SIGNATURE, "control").read((1, 2, 3), {"control": "c"}) == "c"


def test_a_plan_names_what_comes_by_star_arguments() -> None:
    slot = find_slot(SIGNATURE, "args[1]")
    assert slot is not None
    assert slot.read((1, 2, 10, 11), {}) == 11
    assert slot.read((1, 2, 10), {}) is None
    by_name = find_slot(SIGNATURE, "mask")
    assert by_name is not None
    assert by_name.read((), {"mask": "m"}) == "m"
    fixed = inspect.signature(lambda first, second: None)
    assert find_slot(fixed, "args[0]") is None
    assert find_slot(fixed, "mask") is None


def test_an_item_of_an_argument() -> None:
    slot = find_slot(SIGNATURE, "second[1]")
    assert slot is not None
    assert (slot.name, slot.item) == ("second", 1)
    assert slot.read((1, ("a", "b")), {}) == "b"
    assert slot.read((1,), {}) is None
    assert slot.replace((1, ("a", "b")), {}, "c") == ((1, ("a", "c")), {})
    assert slot.replace((1,), {"second": ["a", "b"]}, "c") == ((1,), {"second": ("a", "c")})
    with pytest.raises(PlanError, match="'second' to be a tuple of more than 1 values, got int"):
        slot.read((1, 2), {})
