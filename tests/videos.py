"""Reading videos back."""

from __future__ import annotations

import os
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # here, as environments of the process that a test changes do not reach SDL


def read(path: Path) -> tuple[dict[str, Any], np.ndarray]:
    """What a file says of itself, and its frames, uint8 [N, height, width, 3]."""
    with warnings.catch_warnings(), closing(imageio_ffmpeg.read_frames(path)) as frames:
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves a pipe open
        meta = next(frames)
        width, height = meta["size"]
        return meta, np.stack([np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in frames])
