"""The manifest that makes a folder the checkpoint of a replay memory."""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
from pathlib import Path
from typing import Any

from gym_compress.errors import CorruptDataError, positive
from gym_compress.replay.file.checkpoint import arguments_of
from gym_compress.replay.file.format import as_corrupt
from gym_compress.replay.settings import generator_from_json

__all__ = ["MANIFEST", "checked_sizes", "read_manifest", "write_manifest"]

MANIFEST = "replay.json"
_FORMAT, _VERSION = "gym_compress sharded replay", 1


def checked_sizes(buffer_size: int, num_shards: int, timeout: float) -> dict[str, Any]:
    """The numbers of a manifest; a ValueError or TypeError if :class:`ShardedReplay` does not take them."""
    num_shards, buffer_size = positive(num_shards, "num_shards"), positive(buffer_size, "buffer_size")
    if buffer_size < num_shards:
        raise ValueError(f"{num_shards} shards cannot hold {buffer_size} transitions together")
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout is expected to be a number of seconds above 0, actual value: {timeout}")
    return {"num_shards": num_shards, "buffer_size": buffer_size, "timeout": float(timeout)}


def read_manifest(path: Path) -> dict[str, Any]:
    """What :func:`write_manifest` wrote.

    Raises:
        FileNotFoundError: If there is none.
        CorruptDataError: If it is damaged, or of a later version.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} holds no checkpoint: there is no {path.name}")
    with as_corrupt(f"{path} is not valid"):
        manifest: dict[str, Any] = json.loads(path.read_text())
        found = manifest.pop("format"), manifest.pop("version")
        if found != (_FORMAT, _VERSION):
            raise CorruptDataError(f"format and version are {found}, expected {(_FORMAT, _VERSION)}")
        if manifest.pop("checksum") != _checksum(manifest):
            raise CorruptDataError("it does not have its checksum")
        names = [manifest["replay"], *manifest["origins"]]
        if not all(isinstance(name, str) for name in names):
            raise CorruptDataError(f"{names} are no names")
        checked_sizes(manifest["buffer_size"], manifest["num_shards"], manifest["timeout"])
        arguments_of(manifest["settings"])
        generator_from_json(manifest["generator"])
    return manifest


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Replaces a manifest in one step."""
    text = {"format": _FORMAT, "version": _VERSION, "checksum": _checksum(manifest), **manifest}
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("w") as file:
            json.dump(text, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _checksum(manifest: dict[str, Any]) -> str:
    data = json.dumps(manifest, sort_keys=True, allow_nan=False).encode()
    return hashlib.blake2b(data, digest_size=8).hexdigest()
