"""Samples made ahead of time, by threads or by processes."""

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

# Returns a sample made of another one and of random numbers.
Transform: TypeAlias = Callable[[Sample, np.random.Generator], Sample]
Workers: TypeAlias = Literal["threads", "processes"]


class PrefetchDataset(Dataset):
    """The samples of ``dataset``, of which iteration makes ``prefetch_size`` ahead in ``threads``.

    Order and content are those of ``dataset`` for any number of workers. An error is raised at the
    turn of its sample. The workers end with the iteration, also if it is left halfway. With 0
    workers, and for ``dataset[i]``, a sample is made when the program asks for it.

    Threads suffice if ``get`` waits for files or computes in NumPy; several threads call it at
    once. Processes serve samples that are computed in Python. An iteration starts them anew
    ("spawn"), in some tenths of a second, without a world. They get ``dataset`` and ``transform``
    as a pickle, and import the main module of the program, which has to start its work under ``if
    __name__ == "__main__":``.

    Args:
        dataset: makes the samples. If it has ``set_epoch``, ours calls it.
        threads: how many workers, at least 0.
        prefetch_size: how many samples are made ahead, at least 1.
        workers: ``"threads"`` or ``"processes"``.
        transform: called with a sample and a generator of random numbers, such as for augmentation;
            returns the sample to hand out. Seed, epoch and index alone decide the numbers.
        seed: of those numbers, at least 0.

    Raises:
        ValueError: a number is below its limit, or ``workers`` is unknown.
        TypeError: when an iteration begins: ``dataset`` or ``transform`` cannot be pickled.
        FileNotFoundError: when processes would start: the current folder was deleted.
        RuntimeError: while iterating: a process has ended, killed or out of memory, or could not
            begin; or it has raised what cannot be pickled, or would end this one (``sys.exit``).

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
                "expected threads >= 0, prefetch_size >= 1 and seed >= 0, "
                f"got threads={threads}, prefetch_size={prefetch_size} and seed={seed}"
            )
        if workers not in get_args(Workers):
            raise ValueError(f"workers must be one of {get_args(Workers)}, got {workers!r}")
        self._dataset, self._transform = dataset, transform
        self._threads, self._prefetch_size, self._workers = threads, prefetch_size, workers
        self._seed, self._epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration draw other random numbers; tell ``dataset`` if it has epochs.

        Raises:
            ValueError: ``epoch`` is negative.
        """
        if epoch < 0:
            raise ValueError(f"PrefetchDataset.set_epoch: expected epoch >= 0, got {epoch}")
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._dataset)

    def get(self, index: int) -> Sample:
        return self._transformed(index, self._dataset.get(index))

    def handed_out(self, index: int) -> None:
        self._dataset.handed_out(index)

    def __iter__(self) -> Iterator[Sample]:
        if self._threads:
            return self._iterate_ahead()
        return (self._transformed(index, sample) for index, sample in enumerate(self._dataset))

    def _transformed(self, index: int, sample: Sample) -> Sample:
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
                f"PrefetchDataset: a worker process ended before sample {index} was there: it was "
                "killed, is out of memory, or could not begin (see what it wrote); a program that "
                'uses processes starts its work under if __name__ == "__main__":'
            ) from error
        finally:
            executor.shutdown(cancel_futures=True)

    def _start(self) -> tuple[Executor, Callable[[int], Sample]]:
        """Return workers, and the function that is to be called in them."""
        if self._workers == "threads":
            return ThreadPoolExecutor(self._threads, "flashlight-prefetch"), self.get
        check_folder("PrefetchDataset")
        size, spawn = max(1, min(self._threads, len(self))), multiprocessing.get_context("spawn")
        try:
            pickled = pickle.dumps(self, protocol=5)
        except Exception as error:
            raise TypeError(f"PrefetchDataset: processes get it pickled, but: {error}") from error
        return ProcessPoolExecutor(size, spawn, _begin, (pickled,)), _get


# In a worker process: the dataset that it makes samples of.
_own: list[PrefetchDataset] = []


def _begin(pickled: bytes) -> None:
    """Make this process a worker, which ends with its parent; Ctrl-C is the parent's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: os._exit(parent.join() or 1), daemon=True).start()
    _own.append(pickle.loads(pickled))


def _get(index: int) -> Sample:
    """Return the sample at ``index``; errors are such that the parent can raise them."""
    try:
        return _own[0].get(index)
    except BaseException as error:
        try:
            pickle.loads(pickle.dumps(error))
            problem = "" if isinstance(error, Exception) else "would end this process"
        except Exception:  # noqa: BLE001 - whatever its class does
            problem = "raised what cannot be pickled"
        if problem:
            raise RuntimeError(f"sample {index} {problem}: {traceback.format_exc()}") from None
        raise
