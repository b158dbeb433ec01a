"""A tiny but real checkpoint: a Wan VAE and a Wan 2.1 denoiser, trained from scratch on handwritten digits.

Run as ``python -m support.tiny_checkpoint --help`` from the folder ``tests``. The files it writes are
ordinary ComfyUI files: UNETLoader and VAELoader load them with no help from the pack.
"""
