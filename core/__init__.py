"""The engines (offload, parallel, workers, training) and the adapter that shows them ComfyUI's models.

Everything but ``comfy_adapter`` is plain PyTorch and usable without ComfyUI.
"""
