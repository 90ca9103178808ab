"""Readers of foreign models and the writer of `.edge` files; loaded by `edgellm export` only."""

from __future__ import annotations
