"""Blocks that are alike, as equal layers have them: how many of a class are kept is a whole number.

Equal layers make branching hopeless: whichever of them drops a block, the program costs the same. Here single blocks of
a class may be kept in part, and only their number has to be whole. Every plan is a point of that program, so its
optimum is a bound, whatever is called alike; where layers are equal it lies close to the best plan, at a few nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from strategies.ilp.linear import SparseModel
from strategies.ilp.program import StagedProgram
from strategies.ilp.reduction import NEVER, Reduction


def alike(reduction: Reduction) -> list[list[int]]:
    """The blocks in classes: the same op, bytes and uses, made of the same, for the same."""
    looks = {x: _looks(reduction, x) for x in reduction.blocks}
    classes: dict[tuple[object, ...], list[int]] = {}
    for x, block in reduction.blocks.items():
        makers = tuple(looks.get(source) for _, source in reduction.nodes[block.maker].sources)
        readers = tuple(looks.get(y) for w in block.readers for y in reduction.nodes[w].blocks)
        classes.setdefault((looks[x], makers, readers), []).append(x)
    return list(classes.values())


def _looks(reduction: Reduction, storage: int) -> tuple[object, ...]:
    """What a block is by itself. Times are left out: noise must not tell equal layers apart."""
    block = reduction.blocks[storage]
    node = reduction.nodes[block.maker]
    return reduction.graph.ops[block.made].target, block.nbytes, block.first == NEVER, node.blocks.index(storage)


def counted(program: StagedProgram, model: SparseModel, classes: Sequence[Sequence[int]]) -> SparseModel:
    """The model in which the number of kept blocks of a class is whole, and single ones of several need not be."""
    several = [[program.keep[x] for x in blocks] for blocks in classes if len(blocks) > 1]
    integer, size = model.integer.copy(), model.n_variables
    columns, coefficients, lengths = [model.columns], [model.coefficients], list[int]()
    for number, keeps in enumerate(several):
        integer[keeps] = False
        for sign in (1.0, -1.0):  # both ways: an equation
            columns.append(np.array([*keeps, size + number]))
            coefficients.append(np.array([sign] * len(keeps) + [-sign]))
            lengths.append(len(keeps) + 1)
    more = np.zeros(len(several))
    return replace(
        model,
        cost=np.concatenate((model.cost, more)),
        integer=np.concatenate((integer, more == 0)),
        least=np.concatenate((model.least, more)),
        most=np.concatenate((model.most, [float(len(keeps)) for keeps in several])),
        starts=np.concatenate((model.starts, model.starts[-1] + np.cumsum(np.array(lengths, dtype=np.int64)))),
        columns=np.concatenate(columns),
        coefficients=np.concatenate(coefficients),
        lower=np.concatenate((model.lower, np.zeros(len(lengths)))),
    )
