"""The proxy in front of one vLLM server: who may start, what each request has generated, what goes on after a restart.

    call          one HTTP call on a connection of its own
    control       pause, resume and looking, one writer at a time
    discovery     what the server is, and whether it can be covered
    request       PURE  what a caller asks for, and what of it can be recorded and continued
    record        PURE  what one request has generated so far
    answer        PURE  what the caller gets, from chunks or from a record
    continuation  PURE  the request for what is missing of a restored record
    pool          restored records that nobody has asked for yet
    requests_file the snapshot's `requests.jsonl`
    stream        reading and recording what the engine streams
    serving       one request: recorded, continued or passed on as it came
    end_note      how the engine ended, told by whoever started it
    proxy         admission, the set in flight, control calls of others

The rule of the package: a caller gets what the server would have said. What the proxy asks for besides is taken out again,
and what it can't record or continue exactly is passed on untouched, or begun anew, and counted as that.
"""
