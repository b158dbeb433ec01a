"""ComfyUI-Ferry: train and sample diffusion models larger and faster than one GPU allows.

Importing the pack imports nothing else and changes nothing in ComfyUI: the nodes are built only
when ComfyUI asks for them through ``comfy_entrypoint``.
"""

WEB_DIRECTORY = "./web"

__version__ = "0.1.0"


async def comfy_entrypoint():  # noqa: ANN201 - the return type lives in ComfyUI
    """Return the pack's V3 extension (called by ComfyUI's node loader)."""
    from .nodes.extension import FerryExtension

    return FerryExtension()
