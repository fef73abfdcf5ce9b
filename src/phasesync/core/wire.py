"""JSON in and out, and the hashes made of it. The one file that imports the JSON library.

A digest must be the same on every host, so everything that is hashed goes through
`canonical`: sorted keys, no spaces, UTF-8.
"""

import hashlib
from typing import Any, TypeAlias

import orjson

__all__ = ("Json", "JsonError", "canonical", "decode", "encode", "sha256")

Json: TypeAlias = dict[str, Any]
JsonError = orjson.JSONDecodeError


def encode(value: object) -> bytes:
    """`value` as compact JSON; what JSON does not know is written as its `str`."""
    return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS)


def canonical(value: object) -> bytes:
    """`value` as the one JSON text that every host writes for it."""
    return orjson.dumps(value, default=str, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)


def decode(text: bytes | str) -> Any:
    """The value of a JSON text.

    Raises:
        JsonError: the text is not JSON.
    """
    return orjson.loads(text)


def sha256(value: object) -> str:
    """The hex sha256 of the canonical JSON of `value`."""
    return hashlib.sha256(canonical(value)).hexdigest()
