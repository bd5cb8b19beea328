import concurrent.futures
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.execution.host_arrays import gather, hand_to_threads
from jaxrlhf.execution.process_channel import Channel
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy

THREADS = 4


@pytest.fixture
def often_interrupted():
    """Threads that take turns as often as can be, so that what may go wrong between them does."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("often_interrupted")
def test_threads_read_the_same_array_at_once():
    """Several function roles score one rollout. Without `hand_to_threads`, some of these fail every time."""
    rows = Layout.over(tuple(range(8)), Strategy(data=8)).rows
    make = jax.jit(lambda i: jnp.arange(64.0) + i, out_shardings=rows)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for i in range(300):
            array, together = make(i), threading.Barrier(THREADS)
            hand_to_threads([array, np.zeros(1)])

            def read(array=array, together=together):
                together.wait(timeout=60)
                return gather([array], Channel(), 0)

            for future in [pool.submit(read) for _ in range(THREADS)]:
                (whole,) = future.result(timeout=60) or [None]
                np.testing.assert_array_equal(whole, np.arange(64.0) + i)
