"""``python -m spark_bridge.cli``: the same as the program ``statestore``."""

from spark_bridge.cli.main import main

main()
