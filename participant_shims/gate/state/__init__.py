"""Session state of resources servers: what is saved, how, and how it comes back.

Reading order:

graph      the object graph as a flat table: references, cycles, limits; knows no type
scope      which classes may be named in a document, and how they are found again
containers, values  of the standard library   arrays  numpy        frames  pandas
objects    instances of the server's own classes, pydantic models, functions, locks
codec      the public face: encode, decode, dumps, loads (`gym-session-v1`)
layout     where a server keeps its sessions: per-session attributes, global ones, and whether those changed
source     what the source says about a server: what it keeps, calls and starts
file       the session file: JSON lines, blobs once
exporting  one export by the codec      loading  one load
modes      how a server's state is saved, and the reason in words
sessions   SessionState: what the gate calls
shapes     type guards
reexecute  the logged requests sent again, each answer compared
inspect    `safepoint inspect`: what of a server can be saved, and how

Everything here runs inside somebody else's server: it imports the standard library and its own files only, and looks at
numpy, pandas and pydantic when the server has them loaded already.
"""
