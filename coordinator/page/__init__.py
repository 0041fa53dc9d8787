"""A page in the browser: what happened, what happens now, who takes part.

The rule: the page only looks. It is served on loopback, by a thread, from what is on disk and what a scrape may read; an
operation never waits for it, and nothing that it is asked changes anything.

timeline      one operation as a document: lanes, bars, curves (PURE)
past          the list of operations, read once
overview      operations, snapshots, who takes part, what differs between two snapshots
serving       the HTTP server, and who is let in
report        one operation as one file that needs nothing else
static/       the page itself; draw.js makes the figures, for the page and for a report alike
"""
