"""Fences over networks that are slow, cut, or not what they seem."""

import os

os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
