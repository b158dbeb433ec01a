"""Command line: make the tiny checkpoint, unless it is there or another process makes it already."""

from __future__ import annotations

import argparse
from pathlib import Path

from .make import make_checkpoint

parser = argparse.ArgumentParser(description="Train the tiny Wan checkpoint (about two minutes), once.")
parser.add_argument("--comfyui", type=Path, required=True, help="a ComfyUI checkout")
parser.add_argument("--root", type=Path, required=True, help="where to put the files")
arguments = parser.parse_args()
print(make_checkpoint(arguments.root.resolve(), arguments.comfyui.resolve()))
