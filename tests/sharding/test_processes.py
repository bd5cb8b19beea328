"""How processes find one another, as the environment says."""

import pytest

from jaxrlhf.sharding.processes import Rendezvous, rendezvous_of

WHOLE = {"JAX_COORDINATOR_ADDRESS": "node0:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}


def test_the_environment_describes_a_cluster():
    assert rendezvous_of(WHOLE, detect=False) == Rendezvous("node0:1234", 4, 3)


def test_without_it_a_run_is_alone_unless_jax_is_to_detect_who_is_there():
    assert rendezvous_of({}, detect=False) is None
    assert rendezvous_of({}, detect=True) == Rendezvous()
    assert rendezvous_of({"JAX_COORDINATOR_ADDRESS": "node0:1234"}, detect=True) == Rendezvous()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"JAX_PROCESS_ID": ""}, "go together. Got no JAX_PROCESS_ID. Set all three, or none."),
        ({"JAX_COORDINATOR_ADDRESS": "node0"}, "must be host:port, as in node0:1234. Got 'node0'."),
        ({"JAX_NUM_PROCESSES": "0"}, "JAX_NUM_PROCESSES: must be a number of processes, at least 1. Got '0'."),
        (
            {"JAX_PROCESS_ID": "4"},
            "JAX_PROCESS_ID: must lie between 0 and JAX_NUM_PROCESSES - 1. Got '4' of 4 processes.",
        ),
        ({"JAX_PROCESS_ID": "-1"}, "JAX_PROCESS_ID: must lie between 0 and JAX_NUM_PROCESSES - 1. Got '-1'"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ValueError) as raised:
        rendezvous_of({**WHOLE, **changes}, detect=False)
    assert message in str(raised.value)
