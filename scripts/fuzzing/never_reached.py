"""Prints what no case of a journal reached: ops on shards, strategies, steps of reshards."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import conftest

# isort: split
from reached import missing

__all__ = ["conftest"]


def main(path: str) -> None:
    for kind, left in missing(json.loads(Path(path).read_text())["reached"]).items():
        print(f"never reached {kind} ({len(left)}): {', '.join(left)}")


if __name__ == "__main__":
    main(sys.argv[1])
