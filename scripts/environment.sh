# Sourced by the scripts in the repository's root: makes .venv, and installs into it again when pyproject.toml changes.

stamp=.venv/installed
wanted=$(cksum <pyproject.toml)
if [[ ! -x .venv/bin/python ]]; then
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "sdy_jax needs Python 3.11 or later; set PYTHON to one, as in PYTHON=python3.12 $0" >&2
        exit 1
    }
    "${PYTHON:-python3}" -m venv .venv
fi
if [[ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]]; then
    echo "installing sdy_jax and what it needs into .venv; the first time this downloads jax" >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test,viz]'
    echo "$wanted" >"$stamp"
fi
