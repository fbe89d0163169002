"""HDFS of a NameNode and two DataNodes, and YARN of a ResourceManager and a NodeManager."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen
from xml.sax.saxutils import escape

from tests.patience import PATIENCE
from tests.services.artifacts import class_path
from tests.services.processes import JavaService, free_port

_SERVER = "org.apache.hadoop.hdfs.server"
_LOG4J = """log4j.rootLogger=INFO,console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d %p %c{2}: %m%n
"""


LOCAL = "127.0.0.1"


def write_configuration(file: Path, properties: Mapping[str, object]) -> None:
    """Write properties as Hadoop's XML."""
    lines = (
        f"<property><name>{name}</name><value>{escape(str(value))}</value></property>\n"
        for name, value in properties.items()
    )
    file.write_text(f"<configuration>\n{''.join(lines)}</configuration>\n")


def _listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


class Node(JavaService):
    """A Java process of Hadoop with a directory of its own, ready once ``port`` accepts connections."""

    def __init__(self, main: str, conf: Path, directory: Path, port: int, host: str = LOCAL) -> None:
        self.host, self.port = host, port
        classes = f"{conf}:{class_path('hadoop')}"
        options = [
            "--add-opens=java.base/java.lang=ALL-UNNAMED",
            f"-Djava.io.tmpdir={directory}",
            f"-Dhadoop.log.dir={directory}",
            "-cp",
            classes,
            main,
        ]
        super().__init__(options, directory / f"{main.rpartition('.')[2].lower()}.log")

    def up(self) -> None:
        """Start the process, again after ``stop`` or ``kill``, and wait until its port accepts connections."""
        self.start(lambda: _listens(self.host, self.port))

    def freeze(self) -> None:
        """Keep the process from running: it answers nothing, and its connections stay open."""
        self.send(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen process run again."""
        self.send(signal.SIGCONT)


class Hdfs:
    """A NameNode and its DataNodes, which keep their ports and files over crashes and restarts.

    ``conf`` is the directory with the configuration of clients, as ``HADOOP_CONF_DIR`` names it. As by default, a
    DataNode counts as dead only ten minutes after its last sign of life.
    """

    def __init__(self, directory: Path, data_nodes: int = 2, replication: int = 2, host: str = LOCAL) -> None:
        self._jars = class_path("hadoop")
        self._host = host
        port, self._http = free_port(), free_port()
        self.address = f"{host}:{port}"
        self.url = f"hdfs://{self.address}"
        self.conf = directory / "conf"
        self.conf.mkdir(parents=True)
        (self.conf / "log4j.properties").write_text(_LOG4J)
        write_configuration(self.conf / "core-site.xml", {"fs.defaultFS": self.url, "hadoop.tmp.dir": directory})
        self._site = {
            "dfs.replication": replication,
            "dfs.namenode.name.dir": f"file://{directory}/name",
            "dfs.namenode.http-address": f"{host}:{self._http}",
            "dfs.namenode.rpc-address": self.address,
            "dfs.permissions.superusergroup": "nobody",
            "dfs.heartbeat.interval": 1,
            "dfs.namenode.safemode.extension": 0,
            "dfs.namenode.fs-limits.min-block-size": 1 << 16,
            "dfs.namenode.edits.noeditlogchannelflush": "false",
        }
        write_configuration(self.conf / "hdfs-site.xml", self._site)
        java = ["java", "-cp", f"{self.conf}:{self._jars}", f"{_SERVER}.namenode.NameNode"]
        subprocess.run([*java, "-format", "-nonInteractive"], check=True, capture_output=True)
        self.name_node = Node(f"{_SERVER}.namenode.NameNode", self.conf, directory, port, host)
        self.data_nodes = [self._data_node(directory / f"data{number}", host) for number in range(data_nodes)]

    def _data_node(self, directory: Path, host: str) -> Node:
        conf = directory / "conf"
        conf.mkdir(parents=True)
        for name in ("core-site.xml", "log4j.properties"):
            (conf / name).write_text((self.conf / name).read_text())
        port = free_port()
        own = {
            "dfs.datanode.data.dir": f"file://{directory}/data",
            "dfs.datanode.address": f"{host}:{port}",
            "dfs.datanode.http.address": f"{host}:{free_port()}",
            "dfs.datanode.ipc.address": f"{host}:{free_port()}",
            "dfs.datanode.hostname": host,
        }
        write_configuration(conf / "hdfs-site.xml", {**self._site, **own})
        return Node(f"{_SERVER}.datanode.DataNode", conf, directory, port, host)

    def start(self) -> None:
        """Start all processes, and wait until files can be written."""
        for node in (self.name_node, *self.data_nodes):
            node.start(lambda: True)
        self.wait_for(len(self.data_nodes))

    def stop(self) -> None:
        """End all processes. Their files are of no use any more, so it need not be in order."""
        for node in (*self.data_nodes, self.name_node):
            node.kill()

    def wait_for(self, live: int) -> None:
        """Wait until the NameNode has left its safe mode and counts ``live`` DataNodes."""
        deadline = time.monotonic() + PATIENCE
        while (state := self._state()) != ("Operational", live):
            assert time.monotonic() < deadline, f"HDFS is {state}, not operational with {live} DataNodes."
            time.sleep(0.1)

    def _state(self) -> tuple[str, int] | None:
        """Return the state of the NameNode and the number of live DataNodes; None if it does not answer."""
        query = f"http://{self._host}:{self._http}/jmx?qry=Hadoop:service=NameNode,name=FSNamesystemState"
        try:
            with urlopen(query, timeout=1) as answer:
                beans: list[dict[str, Any]] = json.load(answer)["beans"]
        except (URLError, TimeoutError, ConnectionError):
            return None
        return (beans[0]["FSState"], beans[0]["NumLiveDataNodes"]) if beans else None


@contextmanager
def running_hdfs(directory: Path) -> Iterator[Hdfs]:
    """Run HDFS over ``directory``. Skips the test if its jars have not been fetched."""
    hdfs = Hdfs(directory)
    try:
        hdfs.start()
        yield hdfs
    finally:
        hdfs.stop()


class Yarn:
    """A ResourceManager and a NodeManager over HDFS. ``conf`` is what ``HADOOP_CONF_DIR`` names."""

    def __init__(self, directory: Path, hdfs: Hdfs, memory_mb: int = 4096, cores: int = 8) -> None:
        self.conf = directory / "yarn-conf"
        self.conf.mkdir(parents=True)
        for name in ("core-site.xml", "hdfs-site.xml", "log4j.properties"):
            (self.conf / name).write_text((hdfs.conf / name).read_text())
        resource_manager = ("address", "scheduler.address", "resource-tracker.address", "admin.address")
        node_manager = ("address", "localizer.address", "webapp.address")
        ports = {
            **{f"yarn.resourcemanager.{name}": free_port() for name in (*resource_manager, "webapp.address")},
            **{f"yarn.nodemanager.{name}": free_port() for name in node_manager},
        }
        scheduler = "org.apache.hadoop.yarn.server.resourcemanager.scheduler"
        site = {
            **{name: f"127.0.0.1:{port}" for name, port in ports.items()},
            "yarn.resourcemanager.hostname": "127.0.0.1",
            "yarn.resourcemanager.scheduler.class": f"{scheduler}.fifo.FifoScheduler",
            "yarn.scheduler.minimum-allocation-mb": 128,
            "yarn.nodemanager.hostname": "127.0.0.1",
            "yarn.nodemanager.resource.memory-mb": memory_mb,
            "yarn.nodemanager.resource.cpu-vcores": cores,
            "yarn.nodemanager.vmem-check-enabled": "false",
            "yarn.nodemanager.pmem-check-enabled": "false",
            "yarn.nodemanager.local-dirs": directory / "local",
            "yarn.nodemanager.log-dirs": directory / "containers",
            "yarn.nodemanager.disk-health-checker.enable": "false",
        }
        write_configuration(self.conf / "yarn-site.xml", site)
        server = "org.apache.hadoop.yarn.server"
        self._page = ports["yarn.resourcemanager.webapp.address"]
        self._nodes = [
            Node(f"{server}.resourcemanager.ResourceManager", self.conf, directory, self._page),
            Node(f"{server}.nodemanager.NodeManager", self.conf, directory, ports["yarn.nodemanager.address"]),
        ]

    def start(self) -> None:
        """Start both processes, and wait until containers can run."""
        for node in self._nodes:
            node.start(lambda: True)
        deadline = time.monotonic() + PATIENCE
        while self._active_nodes() != 1:
            assert time.monotonic() < deadline, "no NodeManager is active"
            time.sleep(0.1)

    def stop(self) -> None:
        """End both processes."""
        for node in self._nodes:
            node.stop()

    def _active_nodes(self) -> int:
        try:
            with urlopen(f"http://127.0.0.1:{self._page}/ws/v1/cluster/metrics", timeout=1) as answer:
                return int(json.load(answer)["activeNodes"])
        except (URLError, TimeoutError, ConnectionError):
            return 0


@contextmanager
def running_yarn(directory: Path, hdfs: Hdfs) -> Iterator[Yarn]:
    """Run YARN whose default file system is ``hdfs``."""
    yarn = Yarn(directory, hdfs)
    try:
        yarn.start()
        yield yarn
    finally:
        yarn.stop()


def main(host: str, directory: Path) -> None:
    """Run HDFS at an address of this machine and print its URL, until stdin ends: "kill" and "start" the NameNode."""
    hdfs = Hdfs(directory, host=host)
    try:
        hdfs.start()
        print(hdfs.url, flush=True)
        for line in sys.stdin:
            if line.strip() == "kill":
                hdfs.name_node.kill()
            else:
                hdfs.name_node.up()
                hdfs.wait_for(len(hdfs.data_nodes))
            print(line.strip(), flush=True)
    finally:
        hdfs.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
