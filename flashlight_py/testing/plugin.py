"""The pytest plugin: ``@pytest.mark.ranks(2)`` runs a test and its fixtures on two ranks.

Without mpirun, session.py forks the ranks. Under ``mpirun -n 4 pytest``, they are MPI's.
"""

import contextlib
import os
from typing import Any

import pytest

from flashlight_py.testing import NUMBER

NAME = "flashlight-ranks"  # of the plugin
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "rank that --pdb inspects in tests with the mark `ranks` (default: 0)"
    parser.getgroup("debugconfig").addoption("--pdb-rank", type=int, default=0, help=text)


def pytest_configure(config: pytest.Config) -> None:
    text = "ranks(n, timeout=60, fresh=False): run on n ranks, or on each number of ranks in a list"
    config.addinivalue_line("markers", f"{text}; timeout: seconds; fresh: in new processes")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Prepare the ranks, if a test needs them. Other sessions import nothing for them."""
    if not any(item.get_closest_marker("ranks") for item in session.items):
        return
    from flashlight_py.testing.session import ForkedRanks, MpiRanks

    ranks = (MpiRanks if under_mpirun() else ForkedRanks)(session)
    session.config.pluginmanager.register(ranks, NAME)
    ranks.prepare()


def under_mpirun() -> bool:
    return any(int(os.environ.get(name, "1")) > 1 for name in MPI_SIZES)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is not None and mark.args and isinstance(mark.args[0], list | tuple):
        metafunc.fixturenames.append(NUMBER)
        metafunc.parametrize(NUMBER, mark.args[0], ids=lambda n: f"ranks={n}")


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> Any:
    """Return the ``mpi4py.MPI.Comm`` of the ranks of this test, in a session under mpirun."""
    ranks = request.config.pluginmanager.getplugin(NAME)
    if ranks is None:  # no test has the mark
        with contextlib.suppress(pytest.FixtureLookupError):
            return request.getfixturevalue("comm")  # of another plugin
    if ranks is None or not under_mpirun():
        text = "the fixture comm needs the mark ranks(n) and mpirun -n N python -m pytest"
        pytest.fail(text, pytrace=False)
    return ranks.comms[ranks.marks[request.node.nodeid].n]
