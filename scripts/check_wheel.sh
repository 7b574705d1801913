#!/usr/bin/env bash
# Builds sdist and wheel (the wheel from the unpacked sdist, so both are complete), installs the wheel into a bare
# virtual environment, and runs the demo from an empty folder, so that nothing of the checkout is in reach.
#
#     scripts/check_wheel.sh [OUTPUT_FOLDER]        # keeps sdist and wheel there
#
# PYTHON chooses the interpreter. Versions are those of constraints.txt; pip's own settings and variables
# (PIP_INDEX_URL, PIP_FIND_LINKS) say where packages come from.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
output=${1:-$work/dist}
mkdir -p "$output" "$work/elsewhere"
output=$(cd "$output" && pwd)

"$python" -m venv "$work/build"
"$work/build/bin/python" -m pip install --quiet build
# From a copy: a build leaves build/ and *.egg-info behind.
mkdir "$work/source"
git -C "$root" archive HEAD | tar -x -C "$work/source"
"$work/build/bin/python" -m build --outdir "$output" "$work/source"

wheel=$(ls -t "$output"/kvbridge_hf-*.whl | head -n 1)
"$python" -m zipfile -l "$wheel" > "$work/contents"
for part in tinytown/models tinytown/mappers tinytown/questions tinytown/texts handoff-demo hub_cards; do
    grep -q "kvbridge_hf/$part/" "$work/contents" || { echo "The wheel lacks $part." >&2; exit 1; }
done
"$python" -m venv "$work/bare"
"$work/bare/bin/python" -m pip install --quiet --constraint "$root/constraints.txt" "$wheel"
cd "$work/elsewhere"
"$work/bare/bin/kvbridge" demo --json --questions 8 --repeats 2 > demo.json
"$work/bare/bin/python" - <<'PYTHON'
import json
import pathlib

import kvbridge_hf
from kvbridge_hf import bundled

result = json.loads(pathlib.Path("demo.json").read_text())
package = pathlib.Path(kvbridge_hf.__file__).parent
assert bundled.family_folder() == package / "tinytown", bundled.family_folder()
assert result["status"] == "ok", result
print(f"The demo ran from {package.name} {kvbridge_hf.__version__} out of the wheel: {result['source']} to {result['target']}.")
PYTHON
ls -l "$output"
