"""What README shows is what one gets."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


BEFORE = """
import jax, jax.numpy as jnp, sdy_jax as sdy
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((2, 4), ("data", "model"))
train_step = sdy.partition(lambda x: jnp.tanh(x @ x.T) @ x, mesh=mesh, in_shardings=P("data", "model"))
state = jnp.eye(64)
"""


@pytest.mark.slow
def test_a_thousand_calls_run_on_virtual_devices_as_it_says_they_do(tmp_path):
    (loop,) = [text for language, text in BLOCKS if language == "python" and "block_until_ready" in text]
    assert "all_reduce" in output_of(f"{BEFORE}\nprint(train_step.plan(state))\n{loop}", tmp_path, "train.py")
