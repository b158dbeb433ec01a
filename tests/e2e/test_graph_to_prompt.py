from __future__ import annotations

import pytest
from ferry_support.graph_builder import GraphBuilder
from ferry_support.graph_to_prompt import GraphError, graph_to_prompt, widget_names

INFO = {
    "Load": {
        "display_name": "Load it",
        "input": {
            "required": {
                "name": [["a", "b"]],
                "image": ["COMBO", {"options": ["x.png"], "image_upload": True}],
            }
        },
        "output": ["MODEL"],
        "output_name": ["model"],
    },
    "Sample": {
        "display_name": "Sample it",
        "input": {
            "required": {
                "model": ["MODEL"],
                "seed": ["INT", {"default": 3}],
                "steps": ["INT", {"default": 20}],
                "text": ["STRING", {"forceInput": True}],
            },
            "optional": {"scale": ["FLOAT", {"default": 1.5}]},
        },
        "input_order": {"required": ["model", "seed", "steps", "text"], "optional": ["scale"]},
        "output": [],
        "output_name": [],
    },
}


def build() -> dict:
    builder = GraphBuilder(INFO)
    (model,) = builder.add("Load", (0, 0), name="b")
    builder.add("Sample", (400, 0), node_title="Mine", model=model, steps=7)
    builder.note("hello", (0, 400), (100, 100))
    return builder.graph()


def test_widgets_that_only_the_front_end_knows_are_skipped() -> None:
    assert widget_names(INFO["Sample"]) == ["seed", None, "steps", "scale"]
    assert widget_names(INFO["Load"]) == ["name", "image", None]


def test_a_built_graph_becomes_the_prompt_it_describes() -> None:
    assert graph_to_prompt(build(), INFO) == {
        "1": {"class_type": "Load", "inputs": {"name": "b", "image": "x.png"}, "_meta": {"title": "Load it"}},
        "2": {
            "class_type": "Sample",
            "inputs": {"model": ["1", 0], "seed": 3, "steps": 7, "scale": 1.5},
            "_meta": {"title": "Mine"},
        },
    }


def test_a_widget_that_a_newer_server_added_gets_its_default() -> None:
    graph = build()
    graph["nodes"][1]["widgets_values"].pop()
    assert graph_to_prompt(graph, INFO)["2"]["inputs"]["scale"] == 1.5


def test_a_widget_turned_into_an_input_takes_the_link() -> None:
    builder = GraphBuilder(INFO)
    (model,) = builder.add("Load", (0, 0))
    builder.add("Sample", (0, 0), model=model, seed=model)
    assert graph_to_prompt(builder.graph(), INFO)["2"]["inputs"]["seed"] == ["1", 0]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda graph: graph["nodes"][0].update(type="Gone"), "'Gone'"),
        (lambda graph: graph["nodes"][0].update(mode=4), "bypassed"),
        (lambda graph: graph["nodes"][1]["widgets_values"].append(1), "5 widget values"),
    ],
)
def test_a_graph_that_does_not_fit_the_server_is_refused(change, named: str) -> None:
    graph = build()
    change(graph)
    with pytest.raises(GraphError, match=named):
        graph_to_prompt(graph, INFO)


def test_unknown_inputs_are_refused_when_building() -> None:
    with pytest.raises(ValueError, match="colour"):
        GraphBuilder(INFO).add("Load", (0, 0), colour="red")
