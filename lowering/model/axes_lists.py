"""Lists of axes by number, and the layouts that they make: candidates are very many, and such lists are few."""

from __future__ import annotations

from collections.abc import Sequence

from sdy_jax.lowering.analysis.factors import canonical
from sdy_jax.lowering.model.layout_table import LayoutTable
from sdy_jax.representation.axes import sort_and_merge
from sdy_jax.representation.mesh import Axes, AxisRef, axes_size

Numbers = tuple[int, ...]
"""Numbers of lists of axes, as one per factor of a rule."""


class AxesLists:
    """The lists of axes that atoms of a mesh form, alone and joined; number 0 is the empty list.

    Attributes:
        table: has the layouts.
        axes: the list of each number.
        sizes: into how many parts each splits a dimension.
    """

    def __init__(self, atoms: Sequence[AxisRef], table: LayoutTable):
        self.table, self._atoms = table, tuple(atoms)
        self.axes: list[Axes] = [()]
        self.sizes = [1]
        self._numbers: dict[Axes, int] = {(): 0}
        self._orders: dict[int, Numbers] = {0: (0,)}
        self._joined: dict[Numbers, int] = {}
        self._merged: dict[Numbers, int] = {}
        self._layouts: dict[tuple[Numbers, int, str], int] = {}

    def orders(self, atoms: int) -> Numbers:
        """The lists in which a dimension may have a set of atoms, which has a bit for each."""
        if atoms not in self._orders:
            found = tuple([atom for bit, atom in enumerate(self._atoms) if atoms >> bit & 1])
            self._orders[atoms] = tuple(map(self._number, self.table.orders(found)))
        return self._orders[atoms]

    def joined(self, numbers: Numbers) -> int:
        """The list of a dimension that is made of several factors, major to minor."""
        if numbers not in self._joined:
            self._joined[numbers] = self._number(canonical(self._all_of(numbers), self.table.mesh))
        return self._joined[numbers]

    def merged(self, numbers: Numbers) -> int:
        """The list of the axes of all these, in mesh order."""
        if numbers not in self._merged:
            self._merged[numbers] = self._number(sort_and_merge(self._all_of(numbers), self.table.mesh))
        return self._merged[numbers]

    def layout(self, dimensions: Numbers, unreduced: int, reduction: str) -> int:
        """The number of the layout with these lists in its dimensions, and unreduced along another one."""
        key = dimensions, unreduced, reduction
        if key not in self._layouts:
            axes = tuple([self.axes[number] for number in dimensions])
            self._layouts[key] = self.table.number_of_axes(axes, self.axes[unreduced], reduction)
        return self._layouts[key]

    def _all_of(self, numbers: Numbers) -> list[AxisRef]:
        return [axis for number in numbers for axis in self.axes[number]]

    def _number(self, axes: Axes) -> int:
        if axes not in self._numbers:
            self._numbers[axes] = len(self.axes)
            self.axes.append(axes)
            self.sizes.append(axes_size(axes, self.table.mesh))
        return self._numbers[axes]
