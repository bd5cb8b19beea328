"""Zero-redundancy grouping: the order of devices in which generation reuses the weights of training.

Training usually splits the weights over more devices than generation does. If every device's part in generation
contains its part in training, it receives only what it lacks, and holds nothing twice.

Reference:
    Sheng et al. 2024, HybridFlow, arXiv:2409.19256, section 5.3.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np


def zero_redundancy_order(
    train: Mapping[str, int], generate: Mapping[str, int], devices: Sequence[int]
) -> tuple[int, ...]:
    """The devices of the generation mesh, in row-major order.

    Each axis that splits weights has a degree in training, T, and in generation, G. If G divides T, a device with index
    i of T gets index i // (T / G) of G: its part grows. If T divides G, it gets an index within its own part, which
    shrinks. The remaining indices of the devices, consecutive ones first, distinguish copies of the weights.

    Args:
        train: Axis -> degree in the training mesh, outermost first. The first axis counts copies of the weights; the
            others split them.
        generate: The same axes in the same order, with their degrees in generation.
        devices: The devices of the training mesh, in row-major order.

    Returns:
        The devices for a generation mesh of those degrees. A reallocation from training to generation then moves the
        least that is possible for any order, to every device.

    Raises:
        ValueError: The meshes differ in axes or size, or neither of an axis' two degrees divides the other.
    """
    if list(train) != list(generate):
        raise ValueError(f"train and generate: must have the same axes. Got {list(train)} and {list(generate)}.")
    sizes = math.prod(train.values()), math.prod(generate.values())
    if sizes != (len(devices), len(devices)):
        raise ValueError(
            f"train and generate: must take all {len(devices)} devices. Got degrees {dict(train)} for {sizes[0]} and "
            f"{dict(generate)} for {sizes[1]}."
        )
    copies, *axes = generate
    for axis in axes:
        if train[axis] % generate[axis] and generate[axis] % train[axis]:
            raise ValueError(
                f"{axis}: its degree in training and that in generation must divide one the other. Got "
                f"{train[axis]} and {generate[axis]}."
            )
    # A training index is (shared, rest), a generation index is (shared, finer): `shared` is the same in both.
    shared = [min(train[axis], generate[axis]) for axis in axes]
    rest = [train[axis] // each for axis, each in zip(axes, shared, strict=True)]
    finer = [generate[axis] // each for axis, each in zip(axes, shared, strict=True)]
    n = len(axes)
    in_training = np.array(devices).reshape(
        train[copies], *(d for pair in zip(shared, rest, strict=True) for d in pair)
    )
    rests_first = in_training.transpose(0, *range(2, 2 * n + 1, 2), *range(1, 2 * n + 1, 2))
    dealt = rests_first.reshape(generate[copies], *finer, *shared)
    in_generation = dealt.transpose(0, *(d for i in range(n) for d in (1 + n + i, 1 + i)))
    return tuple(in_generation.reshape(-1).tolist())
