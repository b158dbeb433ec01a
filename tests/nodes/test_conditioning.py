from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.comfy


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import folder_paths

    monkeypatch.setattr(folder_paths, "models_dir", str(tmp_path))
    monkeypatch.delitem(folder_paths.folder_names_and_paths, "conditioning", raising=False)
    monkeypatch.setattr(folder_paths, "filename_list_cache", {})
    return tmp_path


def test_the_nodes_describe_themselves_before_the_folder_exists(models: Path) -> None:
    from comfyui_ferry.nodes.conditioning import LoadConditioning, SaveConditioning

    assert LoadConditioning.define_schema().inputs[0].options == []
    assert SaveConditioning.define_schema().is_output_node


def test_a_saved_prompt_is_listed_and_loads(models: Path) -> None:
    from comfyui_ferry.nodes.conditioning import LoadConditioning, SaveConditioning

    SaveConditioning.define_schema()
    cond = torch.randn(1, 3, 4)
    SaveConditioning.execute([[cond, {}]], "one", overwrite=False)
    assert LoadConditioning.define_schema().inputs[0].options == ["one.safetensors"]
    ((loaded, _),) = LoadConditioning.execute("one.safetensors").args[0]
    assert torch.equal(loaded, cond)


def test_a_changed_file_is_read_again(models: Path) -> None:
    from comfyui_ferry.nodes.conditioning import LoadConditioning, SaveConditioning

    SaveConditioning.define_schema()
    SaveConditioning.execute([[torch.zeros(1, 3, 4), {}]], "one", overwrite=False)
    first = LoadConditioning.fingerprint_inputs("one.safetensors")
    assert LoadConditioning.fingerprint_inputs("one.safetensors") == first
    SaveConditioning.execute([[torch.zeros(1, 5, 4), {}]], "one", overwrite=True)
    assert LoadConditioning.fingerprint_inputs("one.safetensors") != first
