"""Samples that are made ready by threads while others are used."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, islice

from flashlight_py.dataset.dataset import Dataset, Sample


class PrefetchDataset(Dataset):
    """The samples of ``dataset``, of which iteration makes ``prefetch_size`` ahead in ``threads``.

    Order and content are those of ``dataset``, whose ``get`` must bear calls from several threads
    at once. An error in it is raised when its sample's turn comes. The threads live as long as
    an iteration and end with it, also if it is left halfway. With 0 threads, and for
    ``dataset[i]``, samples are made when they are asked for.

    Raises:
        ValueError: ``threads`` < 0 or ``prefetch_size`` < 1.
    """

    def __init__(self, dataset: Dataset, threads: int, prefetch_size: int) -> None:
        if threads < 0 or prefetch_size < 1:
            raise ValueError(
                "expected threads >= 0 and prefetch_size >= 1, "
                f"got threads={threads} and prefetch_size={prefetch_size}"
            )
        self._dataset = dataset
        self._threads = threads
        self._prefetch_size = prefetch_size

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._dataset)

    def get(self, index: int) -> Sample:
        """Return the sample at ``index``, made now."""
        return self._dataset.get(index)

    def handed_out(self, index: int) -> None:
        """Notify ``dataset``."""
        self._dataset.handed_out(index)

    def __iter__(self) -> Iterator[Sample]:
        """Go through all samples in order."""
        return self._iterate_ahead() if self._threads else iter(self._dataset)

    def _iterate_ahead(self) -> Iterator[Sample]:
        indices = iter(range(len(self)))
        executor = ThreadPoolExecutor(self._threads, thread_name_prefix="flashlight-prefetch")
        try:
            first = islice(indices, self._prefetch_size)
            ahead: deque[Future[Sample]] = deque(executor.submit(self.get, i) for i in first)
            for index in count():
                if not ahead:
                    return
                sample = ahead.popleft().result()
                ahead.extend(executor.submit(self.get, i) for i in islice(indices, 1))
                self._dataset.handed_out(index)
                yield sample
        finally:
            executor.shutdown(cancel_futures=True)
