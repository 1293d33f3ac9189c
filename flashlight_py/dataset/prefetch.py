"""Dataset whose samples are made in advance by threads or processes."""

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from flashlight_py.cores import check_folder
from flashlight_py.dataset.dataset import Dataset, Sample

# Function of a sample and a random generator that returns the new sample.
Transform: TypeAlias = Callable[[Sample, np.random.Generator], Sample]
Workers: TypeAlias = Literal["threads", "processes"]


class PrefetchDataset(Dataset):
    """The samples of ``dataset``, made in advance by ``threads`` workers during iteration.

    The number of workers changes neither order nor content. If a sample raises an error, the
    iteration raises it at that sample. The workers end with the iteration, also if it is not
    completed. With 0 workers, and for ``dataset[i]``, a sample is made when it is requested.

    Threads suffice if ``get`` waits for files or computes in NumPy. They call ``get`` at the same
    time. Use processes if ``get`` runs much Python code. Each iteration starts new processes
    ("spawn"), which takes some tenths of a second. These processes do not join the world. They
    receive ``dataset`` and ``transform`` as a pickle, and import the main module of the program. So
    the program must start its work under ``if __name__ == "__main__":``.

    Args:
        dataset: Dataset that makes the samples. If it has a method ``set_epoch``, this object's
            ``set_epoch`` calls it.
        threads: Number of workers, at least 0.
        prefetch_size: Number of samples that are made in advance, at least 1.
        workers: ``"threads"`` or ``"processes"``.
        transform: Function of a sample and a random generator that returns the new sample, for
            example an augmentation. The random numbers depend only on seed, epoch and index.
        seed: Seed of these random numbers, at least 0.

    Raises:
        ValueError: If a number is below its limit, or ``workers`` is unknown.
        TypeError: If ``dataset`` or ``transform`` cannot be pickled, when an iteration starts.
        FileNotFoundError: If the current folder was deleted before processes start.
        RuntimeError: If, during iteration, a process is killed, runs out of memory, cannot start,
            or raises ``SystemExit`` or an exception that cannot be pickled.

    Example:
        >>> def noisy(sample, rng):
        ...     return (sample[0] + rng.normal(0, 0.1, sample[0].shape), *sample[1:])
        >>> rows = fl.dataset.TensorDataset([np.zeros((4, 2)), np.arange(4)])
        >>> ahead = fl.dataset.PrefetchDataset(rows, 2, 4, transform=noisy, seed=1)
        >>> ahead.set_epoch(3)
        >>> [int(label) for _, label in ahead]
        [0, 1, 2, 3]
    """

    def __init__(
        self, dataset: Dataset, threads: int, prefetch_size: int, workers: Workers = "threads",
        transform: Transform | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        if threads < 0 or prefetch_size < 1 or seed < 0:
            raise ValueError(
                "PrefetchDataset: expected threads >= 0, prefetch_size >= 1 and seed >= 0, "
                f"got threads={threads}, prefetch_size={prefetch_size} and seed={seed}"
            )
        if workers not in get_args(Workers):
            raise ValueError(f"workers must be one of {get_args(Workers)}, got {workers!r}")
        self._dataset, self._transform = dataset, transform
        self._threads, self._prefetch_size, self._workers = threads, prefetch_size, workers
        self._seed, self._epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch for ``transform``'s random numbers, and for ``dataset`` if it has epochs.

        Raises:
            ValueError: If ``epoch`` is negative.
        """
        if epoch < 0:
            raise ValueError(f"PrefetchDataset.set_epoch: epoch must be at least 0, got {epoch}")
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._dataset)

    def get(self, index: int) -> Sample:
        return self._transform_sample(index, self._dataset.get(index))

    def handed_out(self, index: int) -> None:
        self._dataset.handed_out(index)

    def __iter__(self) -> Iterator[Sample]:
        if self._threads:
            return self._iterate_ahead()
        return (self._transform_sample(index, sample) for index, sample in enumerate(self._dataset))

    def _transform_sample(self, index: int, sample: Sample) -> Sample:
        if self._transform is None:
            return sample
        return self._transform(sample, np.random.default_rng([self._seed, self._epoch, index]))

    def _iterate_ahead(self) -> Iterator[Sample]:
        executor, get = self._start()
        index = 0
        try:
            futures = (executor.submit(get, index) for index in range(len(self)))
            ahead = deque(islice(futures, self._prefetch_size))
            for index in range(len(self)):
                sample = ahead.popleft().result()
                ahead.extend(islice(futures, 1))
                self._dataset.handed_out(index)
                yield sample
        except BrokenProcessPool as error:
            raise RuntimeError(
                f"PrefetchDataset: expected sample {index}, got the end of a worker process, which "
                "was killed, ran out of memory or could not start (see its output). Start the work "
                'of the program under if __name__ == "__main__":'
            ) from error
        finally:
            executor.shutdown(cancel_futures=True)

    def _start(self) -> tuple[Executor, Callable[[int], Sample]]:
        """Start the workers. Return them and the function that they run for each sample."""
        if self._workers == "threads":
            return ThreadPoolExecutor(self._threads, "flashlight-prefetch"), self.get
        check_folder("PrefetchDataset")
        size, spawn = max(1, min(self._threads, len(self))), multiprocessing.get_context("spawn")
        try:
            pickled = pickle.dumps(self, protocol=5)
        except Exception as error:
            raise TypeError(
                f"PrefetchDataset: dataset or transform cannot be pickled: {error}. Use threads"
            ) from error
        return ProcessPoolExecutor(size, spawn, _begin_worker, (pickled,)), _get_in_worker


# In a worker process: a list that contains the unpickled dataset.
_worker_datasets: list[PrefetchDataset] = []


def _begin_worker(pickled: bytes) -> None:
    """Prepare a worker process: load ``pickled``, ignore Ctrl-C, and exit when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: os._exit(parent.join() or 1), daemon=True).start()
    _worker_datasets.append(pickle.loads(pickled))


def _get_in_worker(index: int) -> Sample:
    """Return the sample at ``index``. Errors that cannot be pickled become RuntimeError."""
    try:
        return _worker_datasets[0].get(index)
    except BaseException as error:
        try:
            pickle.loads(pickle.dumps(error))
            problem = "" if isinstance(error, Exception) else "would end this process"
        except Exception:  # noqa: BLE001 - user code
            problem = "raised an exception that cannot be pickled"
        if problem:
            raise RuntimeError(f"sample {index} {problem}: {traceback.format_exc()}") from None
        raise
