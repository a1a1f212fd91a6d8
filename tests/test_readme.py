"""What README shows is what one gets."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)


def output_of(program: str, folder: Path, name: str) -> str:
    (folder / name).write_text(program)
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run([sys.executable, name], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_example_prints_what_it_says_it_prints(tmp_path):
    (language, program), (_, printed) = BLOCKS[:2]
    assert language == "python" and output_of(program, tmp_path, "mlp.py") == printed
