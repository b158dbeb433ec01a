"""Attention over a sequence that is spread over ranks."""
