"""What a replay file holds, and whether it is whole: for the commands ``inspect`` and ``verify``."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_compress.codec import decode
from gym_compress.errors import CorruptDataError, GymCompressError
from gym_compress.replay.buffer import CompressedReplayBuffer
from gym_compress.replay.file.format import as_corrupt
from gym_compress.replay.file.reader import FileReader
from gym_compress.tree import iter_leaves

_FRAMES = 32


def summary(path: Path) -> dict[str, str]:
    """What a replay file holds, as headings and values.

    Raises:
        CorruptDataError: If it is no replay file, or damaged as far as that is looked at: in all but the
            chunks.
        OSError: If it cannot be read.
    """
    with closing(FileReader.open(path)) as file:
        settings, table = file.read_checkpoint()
    with CompressedReplayBuffer.load(path, device=None, lazy=True) as buffer:
        rows, capacity = buffer.size() * buffer.n_envs, buffer.buffer_size * buffer.n_envs
        raw = buffer.nbytes / capacity * rows
        compression = buffer.table.compression._asdict()
        spaces = (buffer.observation_space, buffer.action_space)
    size = path.stat().st_size
    codecs = Counter(map(str, table.codecs))
    return {
        "saved by": _line(settings.get("class")),
        "transitions": f"{rows:,} of {capacity:,}, next row {settings['pos']:,}",
        "environments": f"{settings['n_envs']:,}",
        "observations": _line(spaces[0]),
        "actions": _line(spaces[1]),
        "chunks": f"{len(table.ids):,}, "
        + ", ".join(f"{n:,} by {codec}" for codec, n in codecs.most_common()),
        "compression": ", ".join(f"{name}={value!r}" for name, value in compression.items()),
        "in arrays": f"{raw:,.0f} bytes",
        "file": f"{size:,} bytes, {size / max(rows, 1):,.0f} a transition",
        "ratio": f"{raw / size:,.1f}x",
    }


def faults(path: Path, advance: Callable[[int, int], object]) -> Iterator[str]:
    """Reads all of a replay file.

    Args:
        path: The file.
        advance: Called now and then with how much is done, and of how much.

    Yields:
        A line for each fault.

    Raises:
        OSError: If it cannot be read.
    """
    found = False
    for fault in _faults(path, advance):
        found = True
        yield fault
    if not found:  # each part is whole; do they fit together?
        try:
            CompressedReplayBuffer.load(path, device=None, lazy=True).close()
        except CorruptDataError as error:
            yield str(error)


def _faults(path: Path, advance: Callable[[int, int], object]) -> Iterator[str]:
    try:
        with closing(FileReader.open(path)) as file:
            yield from file.structure_faults()
            settings, table = file.read_checkpoint()
            total = len(table.ids)
            for i, chunk in enumerate(file.stored_chunks(table)):
                advance(i, total)
                try:
                    content = chunk.content
                    if isinstance(content, bytes):
                        decode(content, np.empty(chunk.nbytes, np.uint8))
                except CorruptDataError as error:
                    yield f"Blob {chunk.id} of {path}: {error}"
            with as_corrupt(f"The settings of {path} are not valid"):
                blocks = [
                    (_line(name), operator.index(id_), expected)
                    for name, spec in settings["arrays"].items()
                    for id_, expected in spec["blocks"]
                ]
            for name, id_, expected in blocks:
                try:
                    with as_corrupt(f"Block {id_!r} is none"):
                        file.blob(id_, expected)
                except CorruptDataError as error:
                    yield f"{name}: {error}"
    except CorruptDataError as error:
        yield str(error)


def draw_frames(path: Path, png: Path) -> None:
    """Draws frames of a replay file, evenly chosen from the oldest to the newest, as a PNG.

    Raises:
        GymCompressError: If there are no transitions, or no images among their observations.
        CorruptDataError: If the file is damaged.
    """
    from matplotlib.figure import Figure

    with CompressedReplayBuffer.load(path, device=None, lazy=True) as buffer:
        size = buffer.size()
        if not size:
            raise GymCompressError(f"{path} holds no transitions")
        steps = np.unique(np.linspace(0, size - 1, _FRAMES).astype(int))
        rows = (steps + (buffer.pos if buffer.full else 0)) % buffer.buffer_size
        observations = buffer.get(rows * buffer.n_envs).observations
    images = [leaf for _, leaf in iter_leaves(observations) if leaf.ndim >= 3]
    if not images:
        raise GymCompressError(f"{path} holds no images")
    columns = min(8, len(rows))
    lines = -(-len(rows) // columns)
    figure = Figure(figsize=(1.5 * columns, 1.7 * lines), layout="constrained")
    for axes, step, image in zip(
        figure.subplots(lines, columns, squeeze=False).flat, steps, images[0], strict=False
    ):
        axes.imshow(_newest(image), cmap="gray")
        axes.set_title(f"{step:,}", fontsize=8)
    for axes in figure.axes:
        axes.set_axis_off()
    figure.savefig(png, format="png", dpi=100)


def _newest(observation: NDArray[Any]) -> NDArray[Any]:
    """The newest frame of a stack, or the image, as matplotlib shows it."""
    while observation.ndim > 3:
        observation = observation[-1]
    if observation.ndim == 2 or observation.shape[2] == 3:
        return observation
    if observation.shape[0] == 3:
        return np.moveaxis(observation, 0, 2)
    return observation[-1] if observation.shape[0] <= observation.shape[2] else observation[..., -1]


def _line(value: object) -> str:
    """What a stranger may have put into a file, as a line that a terminal can show."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(str(value).split()))
