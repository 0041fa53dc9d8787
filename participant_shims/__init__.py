"""What runs beside a server: one shim process, and inside the server the gate.

Reading order:

identity     PURE  who a call belongs to: rollout, attempt, call id; the headers that carry it
fence        PURE  who owns the pause: accept, replay, refuse
admission          the gate's doors: open, closed; parked, held; who is inside
gate/              what is loaded into an unmodified Gym server: inbound (ASGI), outbound, call log, session state
adapter            what the service asks of the code that knows one kind of server
adapters/          one file per kind of server
proxy              the gate as a raw reverse proxy, for servers that it can't be loaded into
service            the Participant service: RPC -> fence -> adapter; no decisions
export, stored_export  where a part of a snapshot lies: below a directory, in a store
shim, ends         one process: serves, registers, renews, ends; how processes end, told to those who miss them
cli                `safepoint shim`, `safepoint serve`, `safepoint inspect`

The shim and the gate run in other people's environments: they import `coordinator.wire` and `safepoint.v1` of ours, and
the gate nothing but the standard library and its own files.
"""
