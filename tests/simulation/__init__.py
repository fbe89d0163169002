"""A simulator of the state store: the real coordinator, hosts and task clients in a world where everything goes wrong.

Real are ``coordinator_actor.coordinator.Coordinator`` and all beneath it, ``spark_bridge.host.host.Host``,
``backends.partition.partition_state.PartitionState`` and ``spark_bridge.task.task_store.TaskStore``. Simulated are
time, threads and locks, the network between processes (Ray calls and Flight alike), the checkpoint storage, and Spark's
driver, its executors and their tasks. The engine below a partition is RocksDB in one world of three, and otherwise one
in memory that outlives its process. Query clients are the real router and the real reads of hosts, over the simulated
network (``readers.py``). Programs outside the stream run the real code as well (``outsiders.py``): they forget keys,
take and restore savepoints, rewrite state, look up in storage, and follow the query. One seeded scheduler decides what
happens next, so a seed gives the same run again, but for the real RocksDB: its own threads may make another course.

The seed chooses a mixture of these faults:

- Messages arrive late, out of order, twice or never. Hosts are slow to register.
- Storage is slow and fails, before or after it has carried out the request, or carries it out later. Listings take
  several requests. Local disks are full.
- Coordinators, hosts, executors and drivers die, alone and together, between any two messages and storage calls. They
  stall for up to 40 s and then continue as if nothing had happened. They are cut off and replaced while they still
  work. Clocks are turned.
- Tasks are retried, speculated and repeated as a whole. A second driver starts on the same checkpoint, also in another
  Ray cluster.
- The user stops and starts the query, removes Spark's last batches, changes the number of partitions and the backend.

In some worlds a second query runs on the same hosts, and its storage hangs now and then. Each tenth seed is a calm
world, in which nothing else fails.

The simulation checks these rules, most of them at the moment at which they could be broken:

- A task of batch N reads exactly version N.
- A query reads completed versions only, and one version in each answer. The version is not older than the one that the
  client has seen, nor than the one that Spark had committed when the client asked. Of each version the query reads what
  the attempts wrote that its manifest names.
- Every manifest consists of durable, undamaged changelogs of one plan of one batch on the version below. A manifest
  does not count if it was written after a higher epoch was claimed.
- When Spark has logged a batch, its version is durable. A file that a kept version needs is not removed.
- No task of the newest run is too late for a batch that Spark has not committed. No task fails with an error that
  nothing excuses.
- After all faults have ended, the query makes progress within bounded time, no task fails, files that are not kept are
  removed, and runs that have ended are unloaded.
- In a calm world no batch of the first query is slow because the storage of the second one hangs, and no state of the
  first one is loaded again.
- Every kept version opens from storage alone with exactly the right content.

``planted_faults.py`` has deliberate faults of the protocol, which test these checks.

    python -m tests.simulation --seed 17             one seed again, with its last events if it fails
    python -m tests.simulation --seeds 1000:2000     a search
    python -m tests.simulation --for 10m             a search of fresh seeds in all worlds of ``searches.py``

Bugs that it found, each with its fix:

- Two drivers: one that was replaced wrote ``commits/N`` after the new run was registered. Spark began the new run
  behind that batch, and its tasks failed with an ``IncompleteBatchError`` that blames foreachBatch. A run that has not
  begun the batch itself takes the version of the run it has replaced, and writes it down as its own.
- Two drivers: a registration read the manifests first and Spark's commits second. The other driver committed batches in
  between, and the run was refused: "Spark has committed batch 37, so the query needs version 38, but versions 14 to 36
  exist". Now it reads in the other order, and reads the commits again when the epoch is claimed.
- The user removed Spark's last batches and restarted with another number of partitions: snapshots of the earlier layout
  that only manifests of the removed batches named were not carried over, and the snapshots that they had replaced were
  gone. The state could not be loaded any more. A run that goes back writes the manifest of its base again, with these
  snapshots.
- A repeated attempt's manifest was written, but the look at the epochs behind it failed, and the attempt was refused.
  The coordinator and its hosts continued with the first attempt, the storage with the second: one version, two
  contents. After such an error the accepted manifest is written again before the version is completed.
- A refresh of the manifests met one that maintenance was just removing, and a task failed: "does not exist". A manifest
  that was removed since the listing is left out; if it were needed, walking the chain would say so.
- ``Host.unload_run`` removed the local directory in which a partition of that run was just being loaded for the first
  time, because the partition was not yet among the host's instances. The task failed with a file that "does not exist".
  The host now records the partitions that it is loading.
- A replaced coordinator stored a manifest, and its answer reached no client. Its successor died before it had written a
  manifest, and the next one took the late manifest for the newest. A coordinator that claims a query now writes the
  newest manifest again under its own epoch (seed 1255).
- With its clock turned back by 100 s, a coordinator removed no files and dropped no lost hosts for 100 s. The actor's
  clock never goes back now; here clocks are turned back by up to 5 s all the same (``Troubles.turn_clock``).
- A host died after it had acknowledged changes of the running batch. Its successor loaded the partition for a query. It
  did not know of the prepared version, and so did not look at Spark's log: it answered from the version before, though
  Spark had committed the batch. A host that loads a partition for a query while a batch runs now looks (seed
  991662605).
- Coordinator and hosts died with a batch that Spark had committed and no manifest named, and the user restarted with
  another number of partitions: refused. Epochs now say in which layouts a run keeps its operators, and the version is
  put together in those (seed 2244).
- The lease of a driver ran out while the last changes of a version were being taken: the checkpoint was given up, and
  the changes were answered as taken, with no manifest. They are refused now (seed 3034).
- Keys were forgotten under a hold that had lapsed: retention had removed the new files, and no version could be loaded.
  A hold has an identity, and the files are looked at before they count.
- Storage wrote the manifest of an exchange, and its answer was lost: the program that forgot keys found the manifest
  and removed the old files, while the coordinator continued with them. Such a run is registered again.
- Spark removed a commit that nothing needs between the check and the copy, and a rewrite failed.
- The user removed the last record of a query's lookups: each maintenance of the looked-up query raised ``TypeError``,
  and retention stopped. A query without pins is forgotten.
"""
