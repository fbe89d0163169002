"""The page of a checkpoint whose storage is damaged, which is to say what is wrong and what to do."""

from __future__ import annotations

from pathlib import Path

from spark_bridge.ui.live import StoredSystem
from spark_bridge.ui.requests import tables_of
from tests.spark_bridge.state_data.format_fixtures import Stored, copied
from tests.spark_bridge.ui.conftest import Look


def test_damaged_newest_manifest_is_shown_until_it_is_restored(look: Look, tmp_path: Path) -> None:
    checkpoint = copied(Stored("file").checkpoint, tmp_path / "ck")
    manifest = sorted(Path(checkpoint, "statestore/manifests").iterdir())[-1]
    sound = manifest.read_bytes()
    manifest.write_bytes(b"rubbish")
    for path, status in (("/", 200), ("/scan", 200), ("/keys", 200), ("/savepoints", 200), ("/query", 404)):
        answer = look(StoredSystem(checkpoint)).get(path)
        assert answer.status_code == status, path
        said = answer.text
        assert "Nothing can be shown." in said and manifest.name in said and "statestore verify" in said, path
        assert "ray status" not in said and "coordinator" not in said, "nothing of it runs on a cluster"
    front = look(StoredSystem(checkpoint)).get("/").text
    assert "Nothing is known" in front and "No query runs" not in front and "Nothing is wrong" not in front
    manifest.write_bytes(sound)
    front = look(StoredSystem(checkpoint)).get("/").text
    assert "Nothing is wrong" in front and "<code>statestore verify</code> reads the files" in front


def test_damaged_older_manifest_does_not_hide_intact_versions(look: Look, tmp_path: Path) -> None:
    checkpoint = copied(Stored("file").checkpoint, tmp_path / "ck")
    manifest = sorted(Path(checkpoint, "statestore/manifests").iterdir())[0]
    sound = manifest.read_bytes()
    manifest.write_bytes(b"rubbish")
    system = StoredSystem(checkpoint)
    client = look(system)
    totals = next(table.id for table in tables_of(system.overview()) if table.operator == "totals")
    front = client.get("/").text
    assert manifest.name in front and "The versions 4 to 5 of the state can be read" in front
    assert "Put the file back from a copy" in front and "Nothing can be shown." not in front
    for path in ("/query", f"/scan?table={totals}", "/savepoints", "/keys"):
        answer = client.get(path)
        assert answer.status_code == 200 and "Nothing can be shown." not in answer.text, path
    manifest.write_bytes(sound)
    last = sorted(Path(checkpoint, "statestore/manifests").iterdir())[4]  # with it goes the last version
    last.write_bytes(b"rubbish")
    client = look(StoredSystem(checkpoint))
    for path, status in ((f"/scan?table={totals}&limit=9", 400), (f"/scan?table={totals}&limit=9&version=3", 200)):
        answer = client.get(path)
        assert (answer.status_code, last.name in answer.text) == (status, status == 400), path
    assert "Versions 0 to 3 can be read" in client.get(f"/keys?table={totals}").text
