"""The coordinator of one job, and what trainers and people use of it.

Reading order:

wire/           what both ends must agree on: ids, reasons, deadlines, the token, files on disk
protocol/       PURE  phases, topology, transaction, ledger: events in, ordered effects out
convert         protobuf <-> the core's types
snapshot_reading, snapshots           the snapshots of a root: listed, verified; reserved, published last, given up
retention, pruning                    PURE which of them stay; pins, and what is deleted
archive, copies                       snapshots pushed to an object store and pulled back; what is there
uploads, uploading, fetching          PURE what is copied next; how, once everybody has resumed; and back
journal, journal_stored, journals
                epoch, records of operations, outcomes: durable before the calls they cover; on a disk, in a store
registry, registration, membership, preflight
                who is there, who is missed, and whether they can be checkpointed together
participants    the coordinator's end of the Participant service
driver          one operation: performs the core's effects in order and feeds back what happens
publication, ledger_lines, ledger_merge, pause, reporting, feed, answers, outcomes, following
                what a driver needs: the commit point, the measured pause, events and who follows them
operations, past
                all operations: one at a time, bound to their ids; how they ended; recovery settles them after a crash
history, history_record, history_writing, history_files, explaining
                what operations did: written beside them on a disk or in a store, read back, told
settling        who has something of an operation that is over hears how it ended
service, status the Coordinator service
settings, server, ray_host            a running coordinator: as a process, as an actor; the only file that imports Ray

page/           a page in the browser, and one operation as one file
client          the trainer's end, sync and async; client_* are its parts
cli             the `safepoint` command; cli_* are its parts
certs           certificates for a cluster that has nothing that makes them
demo/           save, kill and restore live rollouts on real Gym servers

`import coordinator` imports nothing: a shim in somebody else's environment takes `coordinator.wire` alone.
"""
