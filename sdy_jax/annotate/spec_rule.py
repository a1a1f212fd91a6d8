"""A specification that depends on the values that it is given for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class SpecRule(ABC):
    """What stands where a tree of specifications is taken, and makes that tree from the argument or result itself."""

    @abstractmethod
    def for_tree(self, tree: Any, root: str) -> Any:
        """A prefix tree of specifications for `tree`, which messages call `root`.

        Raises:
            ShardingError: the tree is none that the rule can be applied to.
        """

    def check_axes(self, names: Sequence[str], where: str) -> None:
        """Whether a mesh with axes of these `names` has all those that the rule may say; `where` is what states it.

        Raises:
            ShardingError: it lacks one.
        """
        return
