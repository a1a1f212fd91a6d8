"""Where things lie in the repository."""

from pathlib import Path

HELPERS = Path(__file__).resolve().parent
TESTS = HELPERS.parent
ROOT = TESTS.parent
SCRIPTS = ROOT / "scripts"
EXAMPLES = ROOT / "examples"
