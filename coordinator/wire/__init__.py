"""What both ends must agree on and a .proto cannot say.

ids       pattern of wire ids; the id types
terms     roles, phases, modes: the proto's enums for code that must not import protobuf
errors    the catalog of reasons and the SafepointError family
deadline  how much of a caller's time a server may use
access    who may call what: one table, pure
lanes     how many calls at once, and how fast one caller; pure
auth      bearer tokens: where they are read, how they are compared
tls       certificates: read from one directory, taken again when they are replaced
links     how we dial: in TLS or not, and whether the token may go along
listening where a server listens, and that it is open to others only in TLS
guard     what is asked of every call before its handler sees it
rpc       errors <-> status, interceptors, channel and server options
record    where the coordinator listens, and that a call has reached that one
beneath   files below a directory, opened so that nobody can lead us out of it; standard library only
objects, names  objects in a store: copied to, made once
folder, stored_folder, stored_chunks  what holds the files of a root: a directory, or objects in a store
manifest_file  envelope, strict reading and durable writing of manifests; imports the generated messages

`ids`, `terms`, `errors`, `deadline`, `access`, `lanes` are pure and may be imported by the protocol core.
"""
