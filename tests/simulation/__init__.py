"""Safepoint under deterministic simulation. Read in this order.

loop      an event loop on virtual time; processes that pause, die and do blocking work on it
disk      a file system that forgets what was not fsynced
network   gRPC without sockets: lost, late and repeated calls, cut streams, partitions
local     the Unix sockets between gates and their shims
logs      the call logs of its servers, in memory
counting  the resources server of that Gym, whose sessions are saved as any other's
servers   a small Gym: an agent, models, resources with sessions, behind real gates
world     everything put together: coordinator, shims, servers, trainer
faults    what goes wrong when, made from one integer
checks    what must hold in every state, and once the faults are over; cut for snapshots, behaviour for participants
invariants  their numbers, with what each says and where it is asked
blame     runs with a single fault, which whatever fails must name
run       seeds from the command line; shrink makes a failing one small
mutants   guards taken away one by one, each of which a check must notice

The rule: whatever Safepoint does is done by the code that ships. Simulated are time, network, disk and the servers' own
work, nothing else.
"""
