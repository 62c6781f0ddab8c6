"""How far a long step is: counting its tiles, and a bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from cupaged.errors import BackendUnavailableError
from cupaged.streaming.tiles import Tile

Progress = Callable[[int, int], object]


class ProgressBar:
    """A callback for ``StreamingDecoder.decode(progress=...)`` that draws a bar on standard error.

    >>> with ProgressBar("decode") as bar:
    ...     decoder.decode(q, sequences, output, stream=stream, progress=bar)

    Args:
        description: before the bar.

    Raises:
        BackendUnavailableError: tqdm is not installed (the extra ``progress``).
    """

    def __init__(self, description: str = "") -> None:
        try:
            from tqdm import tqdm
        except ImportError:
            raise BackendUnavailableError(
                "a progress bar needs tqdm; install it with: pip install 'cupaged[progress]'"
            ) from None
        self._bar: Any = tqdm(desc=description, unit="B", unit_scale=True, unit_divisor=1024)

    def __call__(self, done: int, total: int) -> None:
        """So many bytes of so many have been computed with; the next step begins at 0 again."""
        if done < self._bar.n or total != self._bar.total:
            self._bar.reset(total)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """End the line."""
        self._bar.close()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TileProgress:
    """Turns ended tiles into calls of a progress callback."""

    def __init__(
        self, tiles: Sequence[Tile], record_bytes: int, slots: int, progress: Progress | None
    ) -> None:
        self._sizes = [tile.num_blocks * record_bytes for tile in tiles]
        self._total = sum(self._sizes)
        self._slots = slots
        self._progress = progress
        self._done = 0

    def tile_begins(self, number: int) -> None:
        """The tile that had its slot before has ended."""
        ended = number - self._slots
        if ended >= 0:
            self._done += self._sizes[ended]
        if self._progress is not None:
            self._progress(self._done, self._total)

    def finish(self) -> None:
        """All have."""
        if self._progress is not None:
            self._progress(self._total, self._total)
