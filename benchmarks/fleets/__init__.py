"""Three fleets that do the same work: Safepoint's own, the HTTP peer's, and the least that the phase order asks for.

work             what every participant of every fleet does, and for how long
processes        worker processes: started, asked, ended; their CPU
ours             shims with a small adapter, beside a real coordinator
peer_servers     upstream's participants: FastAPI and uvicorn
peer_control     upstream's coordinator: aiohttp, one POST per phase and participant
bare             the limit: the messages of the phase order over grpc.aio, and nothing else
fleets           starts one of them, and takes one cut of it
"""
