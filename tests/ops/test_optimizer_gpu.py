# SPDX-License-Identifier: Apache-2.0
"""The optimizer's kernels against plain torch, on the GPU they are written for."""

import importlib
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nmoe import arch
from nmoe.ops import registry
from nmoe.ops.adamw import Rule
from nmoe.ops.adamw import reference as adamw_reference
from nmoe.ops.gram import reference as gram_reference

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
RULE = Rule(learning_rate=1e-2, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8, number=3, scale=0.3)


def kernel(op: str):
    """The file that serves an op on this GPU; a test that ran the reference would prove nothing."""
    source = registry.source_file(op, on=arch.current())
    assert source is not None
    assert source.stem != "reference"
    return importlib.import_module(f"nmoe.ops.{op}.{source.stem}")


def state(size: int, *, first: int = 0) -> list[Tensor]:
    """Value, gradient and moments, beginning `first` elements after an aligned place."""
    generator = torch.Generator(device=DEVICE).manual_seed(size)
    drawn = [torch.randn(first + size, generator=generator, device=DEVICE) for _ in range(4)]
    drawn[3] = drawn[3].square()
    return [t[first:].to(torch.bfloat16) if number > 1 else t[first:] for number, t in enumerate(drawn)]


@pytest.mark.parametrize(("size", "begin"), [(1, 0), (8, 0), (4096, 0), (100_003, 0), (4096, 1), (3_000_000, 0)])
@pytest.mark.parametrize("offset", [0, (1 << 32) - 5, 7 << 33])
def test_adamw_draws_the_references_bits_and_makes_its_update(size, begin, offset):
    """Each of three updates from the same state.

    A value differs by roundings of fp32 at most, of the terms that it is a sum of. A moment's 16 cut bits decide with random
    ones whether it is rounded up, so a rounding of fp32 before turns one in 2^16 over, by one unit in the last place.
    """
    ulp = 2**-23
    ours, again = state(size, first=begin), state(size, first=begin)
    for number in (1, 2, 3):
        rule = replace(RULE, number=number)
        how = {"rule": rule, "key": 0xFEDCBA98_76543210 + number, "offset": offset}
        theirs = [t.clone() for t in ours]
        value, gradient, first, second = (t.float().abs() for t in theirs)
        gradient = gradient * rule.scale
        size = ((second * rule.beta2 + gradient.square() * (1 - rule.beta2)) * rule.correction2).sqrt()
        terms = value + rule.pace * (first + gradient) / size
        kernel("adamw").step(*ours, **how)
        kernel("adamw").step(*again, **how)
        adamw_reference.step(*theirs, **how)
        assert all(torch.equal(a, b) for a, b in zip(again, ours, strict=True))
        assert ((ours[0] - theirs[0]).abs() <= 4 * ulp * terms).all()
        for found, expected, term in zip(ours[2:], theirs[2:], (first + gradient, second), strict=True):
            assert int((found != expected).sum()) <= 2 + len(found) // 10_000
            unit = 2**-7 * expected.float().abs()
            assert ((found.float() - expected.float()).abs() <= unit + 2 * ulp * term).all()


def test_adamw_of_a_part_is_that_part_of_the_whole():
    whole, parts = state(4096), state(4096)
    kernel("adamw").step(*whole, rule=RULE, key=1, offset=0)
    for begin, end in ((0, 1000), (1000, 1003), (1003, 4096)):
        kernel("adamw").step(*(t[begin:end] for t in parts), rule=RULE, key=1, offset=begin)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize(
    ("count", "rows", "columns"), [(1, 1024, 1024), (3, 1408, 2048), (2, 2048, 11264), (2, 96, 40)]
)
@pytest.mark.parametrize("tall", [False, True])
def test_symmetric_products_are_symmetric_and_as_good_as_cublas(count, rows, columns, tall):
    ours = kernel("gram")
    x = torch.randn(count, columns, rows, device=DEVICE).bfloat16().mT if tall else None
    x = x if x is not None else torch.randn(count, rows, columns, device=DEVICE).bfloat16()
    x = x / columns**0.5
    for found, plain, truth in (
        (ours.gram(x), gram_reference.gram(x), gram_reference.gram(x.double())),
        (
            ours.quadratic(gram_reference.gram(x), linear=-4.775, square=2.0315),
            gram_reference.quadratic(gram_reference.gram(x), linear=-4.775, square=2.0315),
            gram_reference.quadratic(gram_reference.gram(x).double(), linear=-4.775, square=2.0315),
        ),
    ):
        assert torch.equal(found, found.mT)
        assert (found.double() - truth).norm() <= 1.2 * (plain.double() - truth).norm()
    assert torch.equal(ours.gram(x), ours.gram(x))
