"""The simulation is worth something: it finds the faults that are planted. ``planted_faults.py`` has the table.

Another test covers the faults that it does not find, or not soon.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.effort import only_thorough
from tests.patience import HANG
from tests.simulation.planted_faults import FAULTS, PlantedFault
from tests.simulation.searches import first_failure

ROOT = Path(__file__).parents[2]
WITH_FAULT = """
import os
import sys
import pytest
from tests.simulation.planted_faults import FAULTS

next(fault for fault in FAULTS if fault.name == sys.argv[1]).plant(pytest.MonkeyPatch())
code = pytest.main(["-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", sys.argv[2]])
sys.stdout.flush()
os._exit(code)  # threads that hang by the fault must not hold the process
"""


USUAL = ("no-fencing", "hasty-commit", "greedy-retention", "prepared-is-completed", "wrong-offset", "cold-moves")
"""One fault of each rule: fencing, durability, retention, completion, what manifests say, moves."""


def searched(fault: PlantedFault) -> Any:
    """A usual run looks for one fault of each rule. A fault with its own test is found late."""
    return pytest.param(fault, id=fault.name) if fault.name in USUAL else only_thorough(fault, id=fault.name)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [searched(fault) for fault in FAULTS if fault.seeds])
def test_the_simulation_finds_a_planted_fault(fault: PlantedFault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.plant(monkeypatch)
    found = first_failure(fault.seeds, fault.max_steps, fault.prepare)
    assert not isinstance(found.failure, TypeError | AttributeError | NameError), "the fault was planted wrongly"
    assert f"--seed {found.seed}" in str(found) and len(found.last_events) > 10


@pytest.mark.parametrize("fault", [pytest.param(f, id=f.name) for f in FAULTS if f.test is not None])
def test_faults_that_the_simulation_does_not_find_soon_have_another_test(fault: PlantedFault) -> None:
    assert fault.test is not None
    file, name = fault.test.split("::")
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{fault.test} is not there."


@pytest.mark.parametrize("fault", [only_thorough(f, id=f.name) for f in FAULTS if f.test is not None])
def test_the_other_test_sees_the_planted_fault(fault: PlantedFault) -> None:
    assert fault.test is not None
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    asked = [sys.executable, "-c", WITH_FAULT, fault.name, fault.test]
    done = subprocess.run(asked, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
