"""The relay of a node: one process between the coordinator and the node's shims.

The rule: it decides nothing. To a shim it is what it registers at; to the coordinator it is how those shims are reached,
at the cost of one peer. What it knows is gone with it, and nobody needs it back.

door       what shims call: Register, ReportEnd
standing   its own announcement at the coordinator, with all who are behind it
fanning    what the coordinator calls: one call at many shims, answers in batches
host       put together, bound, announced, stopped
"""
