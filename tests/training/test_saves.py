"""Saves that are killed, that find no room, or that meet another; and checkpoints that somebody has tampered with."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pickle
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.training import load_checkpoint, save_checkpoint, storage
from tests.training.toy import ONE, Toy, make_optimizer, train

ALONE = Topology()


class Planted:
    """Touches a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.open, (str(self.canary), os.O_CREAT | os.O_WRONLY)


def sealed(path: Path) -> None:
    """Makes the checksums right again, as whoever tampers with a checkpoint would."""
    metadata = FileSystemReader(path).read_metadata() if (path / ".trusted").exists() else None
    assert metadata is None
    head, _, body = (path / ".checksums").read_bytes().partition(b"\n")
    held = json.loads(body)
    held["index"] = hashlib.sha256((path / ".metadata").read_bytes()).hexdigest()
    for file, items in held["items"].items():
        data = (path / file).read_bytes()
        for item in items:
            item[2] = hashlib.sha256(data[item[0] : item[0] + item[1]]).hexdigest()
    body = json.dumps(held).encode()
    (path / ".checksums").write_bytes(storage._head(body) + b"\n" + body)


def replace_item(path: Path, key: str, thing: Any) -> None:
    """Puts a pickle in the place of an item that is no tensor, at the end of its file."""
    data = BytesIO()
    torch.save(thing, data)
    metadata = FileSystemReader(path).read_metadata()
    (info,) = (info for index, info in metadata.storage_data.items() if index.fqn == key)
    body = json.loads((path / ".checksums").read_bytes().partition(b"\n")[2])
    items = body["items"][info.relative_path]
    items.remove(next(item for item in items if item[0] == info.offset))
    with (path / info.relative_path).open("ab") as file:
        info.offset, info.length = file.tell(), file.write(data.getvalue())
    items.append([info.offset, info.length, ""])
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    text = json.dumps(body).encode()
    (path / ".checksums").write_bytes(storage._head(text) + b"\n" + text)
    sealed(path)
