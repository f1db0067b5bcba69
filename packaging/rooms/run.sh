#!/bin/bash
# Moves the modules of the work tree in which it is called, and formats it. Commits nothing.
set -e
python3 $(dirname "$0")/gen.py; python3 $(dirname "$0")/patches.py
python3 $(dirname "$0")/move.py --root "$PWD"
ruff check --fix -q --select I,F401 qerl tests || true
ruff format -q qerl tests
python3 $(dirname "$0")/wrap.py
ruff format -q qerl tests
git add -A
export PYTHONPATH=$PWD
python -m qerl keys > /tmp/qerl-keys.$$ && mv /tmp/qerl-keys.$$ config/README.md
python -m qerl keys --schema > /tmp/qerl-keys.$$ && mv /tmp/qerl-keys.$$ workflow/schemas/config.schema.yaml
git add -A
