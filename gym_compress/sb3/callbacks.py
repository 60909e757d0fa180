"""Callbacks for Stable-Baselines3."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from stable_baselines3.common.callbacks import CheckpointCallback

from gym_compress.sb3.buffers import CompressedReplayBase

__all__ = ["CheckpointReplayCallback"]


class CheckpointReplayCallback(CheckpointCallback):
    """SB3's ``CheckpointCallback``, with the replay buffer in one replay file that is saved incrementally.

    Every ``save_freq`` calls of ``env.step()`` the model goes to a file of its own, as in SB3, and the replay
    buffer to ``{save_path}/{name_prefix}.replay``, of which only what changed is written. A process that is
    killed meanwhile leaves whole files: the last whole checkpoint of the buffer, and models that are whole,
    since each gets its name when it is. The buffer is saved first, so it is as new as the newest model, or
    newer. SB3 calls callbacks before it stores a step, so the newest one is not in it.

    Args:
        save_freq: Calls of ``env.step()`` between two checkpoints; with several environments, each call is a
            step of all.
        save_path: The folder, which is made if it is not there.
        name_prefix: What the files' names begin with.
        save_vecnormalize: Whether the statistics of ``VecNormalize`` are saved too, in a pickle as in SB3.
        verbose: 0 for no output, 2 to be told of each checkpoint.

    Raises:
        TypeError: When training begins, if the algorithm's replay buffer is none of this module's.
    """

    def __init__(
        self,
        save_freq: int,
        save_path: str,
        name_prefix: str = "rl_model",
        *,
        save_vecnormalize: bool = False,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            save_freq, save_path, name_prefix, save_vecnormalize=save_vecnormalize, verbose=verbose
        )

    @property
    def replay_path(self) -> Path:
        """The replay file."""
        return Path(self.save_path, f"{self.name_prefix}.replay")

    def _init_callback(self) -> None:
        super()._init_callback()
        buffer = getattr(self.model, "replay_buffer", None)
        if not isinstance(buffer, CompressedReplayBase):
            raise TypeError(
                "CheckpointReplayCallback needs replay_buffer_class= with a buffer of gym_compress.sb3, "
                f"actual: {type(buffer)}"
            )

    def _on_step(self) -> bool:
        if self.n_calls % self.save_freq == 0:
            self.model.replay_buffer.save(self.replay_path)  # type: ignore[attr-defined]
            if self.verbose >= 2:
                print(f"Saving checkpoint to {self.replay_path}")  # noqa: T201
            self._save_whole(self.model.save, self._checkpoint_path(extension="zip"))
            env = self.model.get_vec_normalize_env()
            if self.save_vecnormalize and env is not None:
                self._save_whole(env.save, self._checkpoint_path("vecnormalize_", extension="pkl"))
        return True

    def _save_whole(self, save: Callable[[str], None], path: str) -> None:
        """Saves under a name that a file gets when it is whole."""
        part = f"{path}.part"
        save(part)
        os.replace(part, path)
        if self.verbose >= 2:
            print(f"Saving checkpoint to {path}")  # noqa: T201
