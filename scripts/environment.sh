# Sourced by the scripts in the repository's root: makes .venv, and installs into it again when pyproject.toml changes.
# The install is strictly editable, so that type checkers find the package too; new files need a new install, which is
# why the stamp names every directory's modules as well.

stamp=.venv/installed
wanted=$({ cat pyproject.toml; find sdy_jax lowering runtime -name '*.py' | LC_ALL=C sort; } | cksum)
if [[ ! -x .venv/bin/python ]]; then
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "sdy_jax needs Python 3.11 or later; set PYTHON to one, as in PYTHON=python3.12 $0" >&2
        exit 1
    }
    "${PYTHON:-python3}" -m venv .venv
fi
if [[ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]]; then
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test,viz]' \
        --config-settings editable_mode=strict
    echo "$wanted" >"$stamp"
fi

# The working directory holds `sdy_jax/` without its two other wings: keep it off Python's path, also in child processes.
export PYTHONSAFEPATH=1
