#!/usr/bin/env bash
# Checks what is to be uploaded. The tag must name this commit and its version, and CHANGELOG.md the day of the version.
# dist/ must hold the sdist, every platform's wheel and that of sage-aot-sageattention; each wheel must be complete and
# right in every file, and the wheels of platforms must hold the same payload. Leaves in release/ what the GitHub release
# has in addition to dist/: the checksums.
set -euo pipefail
cd "$(dirname "$0")/.."
tag=$1
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' sage_aot/_version.py)
if [ "$tag" != "v$version" ]; then
  echo "expected the tag v$version, as sage_aot/_version.py has it, got $tag" >&2
  exit 1
fi
if [ "$(git rev-parse "$tag^{commit}")" != "$(git rev-parse HEAD)" ] || [ -n "$(git status --porcelain --untracked-files=no)" ]; then
  echo "expected the commit that $tag names, unchanged, got $(git describe --always --dirty)" >&2
  exit 1
fi
if ! grep -q "^## $version (20..-..-..)$" CHANGELOG.md; then
  echo "expected the section of $version in CHANGELOG.md to have a day, as in \"## $version (2026-12-01)\"" >&2
  exit 1
fi
python ci/wheels.py release dist "$tag" release
