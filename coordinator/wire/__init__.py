"""What both ends must agree on and a .proto cannot say.

ids       pattern of wire ids; the id types
terms     roles, phases, modes: the proto's enums for code that must not import protobuf
errors    the catalog of reasons and the SafepointError family
deadline  how much of a caller's time a server may use
auth      the bearer token: where it is read, how it is compared
rpc       errors <-> status, interceptors, channel and server options
record    where the coordinator listens, and that a call has reached that one
beneath   files below a directory, opened so that nobody can lead us out of it; standard library only
manifest_file  envelope, strict reading and durable writing of manifests; imports the generated messages

`ids`, `terms`, `errors`, `deadline` are pure and may be imported by the protocol core.
"""
