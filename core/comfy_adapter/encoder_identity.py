"""What a text encoder or a VAE computes, as a digest: of its weights, patches and settings.

Files and times would be cheaper, but ComfyUI's objects do not know their files, and a LoRA or a merge
between loader and encoder has none. The digest covers every byte of the weights, so it is the same in
every session and for every copy of a file, and another for whatever changes a result.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import RequestError
from ..training.dataset import content_digest, tensors_digest


def vae_identity(vae: Any) -> str:
    """Return the digest of a VAE.

    Raises:
        RequestError: If it carries something whose content cannot be told.
    """
    settings = [vae.latent_dim, vae.vae_dtype]
    return _identity("VAE", vae.patcher, [*settings, type(vae.first_stage_model)])


def clip_identity(clip: Any) -> str:
    """Return the digest of a text encoder; what it makes of a text is in the tokens' own digest.

    Raises:
        RequestError: If it carries hooks, or something whose content cannot be told.
    """
    if clip.patcher.forced_hooks is not None or clip.apply_hooks_to_conds or clip.use_clip_schedule:
        raise RequestError(
            "the CLIP carries hooks (Create Hook LoRA, or a schedule)",
            limit="Its captions would differ from step to step, which training does not follow",
            way_out="Connect the CLIP from before that node (a LoRA without hooks is honoured)",
        )
    settings = [clip.layer_idx, type(clip.cond_stage_model), type(clip.tokenizer)]
    return _identity("CLIP", clip.patcher, settings)


def _identity(kind: str, patcher: Any, settings: list[Any]) -> str:
    try:
        carried = content_digest(
            [
                settings,
                {str(key): [_plain(patch) for patch in patches] for key, patches in patcher.patches.items()},
                getattr(patcher, "weight_wrapper_patches", {}),
                patcher.object_patches,
                patcher.model_options,
                getattr(patcher, "injections", {}),
            ]
        )
    except TypeError as error:
        raise RequestError(
            f"the {kind} carries an object of type {error}",
            limit="Cached data is found again by the content of its encoder, and that of this is not known",
            way_out="Connect it from before the node that adds it",
        ) from error
    return content_digest([kind, carried, tensors_digest(_own_weights(patcher))])


def _own_weights(patcher: Any) -> dict[str, Tensor]:
    """Return the weights without what the patcher has merged into them while it is loaded."""
    weights = dict(patcher.model.state_dict())
    return weights | {name: entry.weight for name, entry in patcher.backup.items() if name in weights}


def _plain(patch: Any) -> Any:
    """Return a weight patch as containers of tensors and values; ComfyUI's adapters are objects."""
    if isinstance(patch, list | tuple):
        return [_plain(item) for item in patch]
    if hasattr(patch, "weights") and hasattr(patch, "loaded_keys"):
        return [type(patch), _plain(patch.weights)]
    return patch
