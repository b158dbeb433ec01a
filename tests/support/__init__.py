"""Shared test material, imported as `ferry_support`."""
