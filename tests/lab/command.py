"""The program ``lab`` of the prompt: ``python command.py SOCKET WORD ...``. Needs only the standard library."""

from __future__ import annotations

import json
import socket
import sys


def main(path: str, words: list[str]) -> int:
    """Hand a command to the lab; print the answer, and return 0 if it was carried out."""
    with socket.socket(socket.AF_UNIX) as lab, lab.makefile("rwb") as stream:
        lab.connect(path)
        stream.write(json.dumps(words).encode() + b"\n")
        stream.flush()
        said = json.loads(stream.read())
    print(said.get("out", said.get("error")), file=sys.stderr if "error" in said else sys.stdout)
    return 1 if "error" in said else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
