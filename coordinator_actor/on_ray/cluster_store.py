"""The secret of a cluster, the registry of its tokens and its drained nodes, in Ray's own key-value store.

The store lives as long as the Ray cluster. So these outlive coordinators, streams and drivers. Every
process attached to the cluster can read it, just as it can ask the coordinator.
"""

from __future__ import annotations

from ray.experimental import internal_kv

KV_NAMESPACE = "statestore"


class ClusterStore:
    """The store of one coordinator, by Ray namespace and name of the actor (a ``TokenStore``)."""

    def __init__(self, namespace: str, name: str) -> None:
        self._prefix = f"{namespace}/{name}"

    def secret(self, candidate: str) -> str:
        """Return the secret of this cluster: the first candidate that was ever offered."""
        key = f"{self._prefix}/secret"
        internal_kv._internal_kv_put(key, candidate, overwrite=False, namespace=KV_NAMESPACE)
        return str(internal_kv._internal_kv_get(key, namespace=KV_NAMESPACE), "ascii")

    def load(self) -> bytes | None:
        """See ``TokenStore``."""
        content: bytes | None = internal_kv._internal_kv_get(f"{self._prefix}/tokens", namespace=KV_NAMESPACE)
        return content

    def save(self, content: bytes) -> None:
        """See ``TokenStore``."""
        internal_kv._internal_kv_put(f"{self._prefix}/tokens", content, overwrite=True, namespace=KV_NAMESPACE)

    def drain(self, node_id: str) -> None:
        """Take note that a node is to go: drivers let their hosts hand over what they own, and start none there."""
        internal_kv._internal_kv_put(f"{self._prefix}/drained/{node_id}", b"", namespace=KV_NAMESPACE)

    def keep(self, node_id: str) -> None:
        """Take note that a node stays after all."""
        internal_kv._internal_kv_del(f"{self._prefix}/drained/{node_id}", namespace=KV_NAMESPACE)

    def drained(self) -> frozenset[str]:
        """Return the ids of the nodes that are to go."""
        prefix = f"{self._prefix}/drained/"
        keys = internal_kv._internal_kv_list(prefix, namespace=KV_NAMESPACE)
        return frozenset(str(key, "utf-8").removeprefix(prefix) for key in keys)
