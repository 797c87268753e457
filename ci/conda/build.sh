#!/usr/bin/env bash
# Compiles the kernels with conda's compiler, and installs the wheel that holds them. The wheel becomes one for every
# platform, as noarch packages are: pip refuses one whose tag names another.
set -euo pipefail

# codegen finds its tools as the packages of PyPI that pyproject.toml names. These stand for them, and name conda's files.
tools=$SRC_DIR/tools
stand_in() {  # DISTRIBUTION PREFIX PACKAGE FILE
  local version
  version=$(basename "$2"/conda-meta/"$3"-[0-9]*.json | cut -d- -f3)
  local info=$tools/${1//-/_}-$version.dist-info
  mkdir -p "$info"
  printf 'Metadata-Version: 2.1\nName: %s\nVersion: %s\n' "$1" "$version" > "$info/METADATA"
  printf '%s,,\n' "$2/$4" > "$info/RECORD"
}
stand_in nvidia-cuda-nvrtc-cu12 "$PREFIX" cuda-nvrtc lib/libnvrtc.so.12
stand_in nvidia-cuda-nvdisasm "$BUILD_PREFIX" cuda-nvdisasm bin/nvdisasm
mkdir "$tools/ninja"  # conda's ninja has no module
cp ninja_source/ninja-upstream/misc/ninja_syntax.py "$tools/ninja"
echo "BIN_DIR = '$BUILD_PREFIX/bin'" > "$tools/ninja/__init__.py"

PYTHONPATH=$tools "$PYTHON" -m pip wheel -vv --no-index --no-deps --no-build-isolation -w made .
"$PYTHON" -m wheel tags --remove --platform-tag any made/*.whl
"$PYTHON" -m pip install -vv --no-index --no-deps made/*.whl
