#!/usr/bin/env bash
# Make a release.
#
#   release.sh build VERSION   build sdist and wheel into dist/, and check them
#   release.sh tag VERSION     the same, then tag the commit; pushing the tag starts the workflow "release"
#
# VERSION must be that of pyproject.toml, and CHANGELOG.md must have a section for it. Needs `pip install build twine`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
what=${1:?build or tag} version=${2:?VERSION}

fail() { echo "release.sh: $*" >&2; exit 1; }

declared=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
[ "$declared" = "$version" ] || fail "pyproject.toml has version $declared, not $version: change it, and commit."
grep -Eq "^## \[$version\] - [0-9]{4}-[0-9]{2}-[0-9]{2}$" CHANGELOG.md ||
  fail "CHANGELOG.md has no line '## [$version] - YYYY-MM-DD': give the version its date, and commit."
[ -z "$(git status --porcelain)" ] || fail "there are changes that are not committed: commit them, or stash them."

rm -rf dist
python -m build --outdir dist .
python -m twine check --strict dist/*
if [ "$what" = tag ]; then
  git tag --annotate "v$version" --message "ray-statestore $version"
  echo "Tagged v$version. To build it in CI, and to publish it if PUBLISH is true: git push origin v$version"
fi
