"""K-means on several processes, and tests of it that run on one, two and three ranks.

    pytest examples/test_kmeans.py              # starts the ranks
    mpirun -n 3 pytest examples/test_kmeans.py  # uses the ranks of MPI

Each rank has a share of the points. One ``all_reduce`` in each step adds the points of each center.
"""

import numpy as np
import pytest

import flashlight_py as fl


def step(points: np.ndarray, centers: np.ndarray) -> np.ndarray:
    """Return for each center the mean of the nearest points of all ranks.

    A center without points keeps its position.
    """
    distances = ((points[:, None] - centers) ** 2).sum(axis=2)
    nearest = distances.argmin(axis=1)
    sums = np.zeros((len(centers), points.shape[1] + 1))
    np.add.at(sums, nearest, np.column_stack([points, np.ones(len(points))]))
    fl.all_reduce(sums)
    counts = sums[:, -1:]
    return np.where(counts > 0, sums[:, :-1] / np.maximum(counts, 1), centers)


def kmeans(points: np.ndarray, centers: np.ndarray, steps: int = 10) -> np.ndarray:
    """Return the centers after some steps. All ranks begin with the centers of rank 0."""
    centers = fl.broadcast(centers.copy())
    for _ in range(steps):
        centers = step(points, centers)
    return centers


CORNERS = np.array([[0.0, 0.0], [0.0, 9.0], [9.0, 0.0]])


@pytest.fixture
def points() -> np.ndarray:
    """Return 20 points around each corner."""
    return np.repeat(CORNERS, 20, axis=0) + np.random.default_rng(3).normal(size=(60, 2))


@pytest.mark.ranks([1, 2, 3])
def test_step_moves_centers_to_the_means_of_all_points(points: np.ndarray) -> None:
    share = points[fl.get_world_rank() :: fl.get_world_size()]
    means = points.reshape(3, 20, 2).mean(axis=1)
    np.testing.assert_allclose(step(share, CORNERS), means)


@pytest.mark.ranks([1, 2, 3])
def test_all_ranks_return_the_same_bits(points: np.ndarray) -> None:
    rank = fl.get_world_rank()
    centers = kmeans(points[rank :: fl.get_world_size()], points[rank : rank + 3])
    assert all(np.array_equal(centers, other) for other in fl.all_gather_object(centers))


@pytest.mark.ranks(2)
def test_rank_without_points_gets_the_centers(points: np.ndarray) -> None:
    share = points if fl.get_world_rank() == 0 else points[:0]
    np.testing.assert_allclose(kmeans(share, CORNERS), CORNERS, atol=0.6)


@pytest.mark.ranks(2, timeout=10)
def test_different_numbers_of_centers_raise_on_every_rank(points: np.ndarray) -> None:
    with pytest.raises(fl.errors.MismatchError):
        step(points, CORNERS[: 2 + fl.get_world_rank()])
