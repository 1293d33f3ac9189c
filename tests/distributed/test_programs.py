"""Random programs of every verb on every backend, compared with NumPy."""

from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.distributed.conformance import ranks_in
from tests.distributed.programs import every_verb, programs, run_program

WORLDS = [("single", 1), ("gloo", 2), ("shm", 2)]
SLOW = [("gloo", 5), ("shm", 5), ("hierarchical", 3), ("hierarchical", 5), ("mpi", 2), ("mpi", 4)]

# The same programs in every run. They are not shrunk: each try would need new processes.
repeatable = settings(
    derandomize=True,
    deadline=None,
    max_examples=8,
    phases=[Phase.explicit, Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

ranks = ranks_in(*WORLDS, slow=SLOW)


@repeatable
@given(data=st.data())
def test_random_programs_return_the_same_as_numpy(ranks: Any, data: st.DataObject) -> None:
    ranks.run(run_program, data.draw(programs(ranks.size)))


def test_each_verb_works_in_every_size(ranks: Any) -> None:
    """Rows of every width that random programs may have omitted."""
    for dtype, widths in (("float32", (1, 100_000)), ("int8", (1000,))):
        ranks.run(run_program, every_verb(ranks.size, dtype, widths), deadline=100.0)
