"""The program ``statestore``. To import this package first checks that the packages are those of this project."""

from __future__ import annotations

from spark_bridge.cli.main import app, main

__all__ = ["app", "main"]

if __name__ == "__main__":
    main()
