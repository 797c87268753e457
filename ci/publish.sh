#!/usr/bin/env bash
# Makes the GitHub release of a tag, or completes the one that is there: the files of dist/, and those of release/, which
# are their checksums and their attestation. The notes are the version's section of CHANGELOG.md. May run again: a file
# of the same name is replaced. Needs gh, and a GH_TOKEN that may write the repository's contents.
set -euo pipefail
cd "$(dirname "$0")/.."
tag=$1
for file in release/SHA256SUMS "release/sage_aot-${tag#v}.attestation.json"; do
  if [ ! -s "$file" ]; then
    echo "expected $file, got none: run ci/release.sh, and put the attestation next to what it leaves" >&2
    exit 1
  fi
done
(cd dist && sha256sum --check --strict ../release/SHA256SUMS)
if gh release view "$tag" > /dev/null 2>&1; then
  gh release upload "$tag" --clobber dist/* release/*
else
  awk -v version="${tag#v}" '/^## / { inside = $2 == version; next } inside' CHANGELOG.md |
    gh release create "$tag" --verify-tag --title "sage-aot ${tag#v}" --notes-file - dist/* release/*
fi
