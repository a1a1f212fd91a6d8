"""A specification that depends on the values that it is given for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class SpecRule(ABC):
    """What stands where a tree of specifications is taken, and makes that tree from the argument or result itself."""

    @abstractmethod
    def for_tree(self, tree: Any, root: str) -> Any:
        """A prefix tree of specifications for `tree`, which messages call `root`.

        Raises:
            ShardingError: the tree is none that the rule can be applied to.
        """
