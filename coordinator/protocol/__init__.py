"""The pure core: no IO, no clock, no asyncio. Read in this order.

phases       the order of everything, as one table
topology     who takes part, and whether they can be checkpointed together
operation    what an operation is asked to do; stages, outcomes, limits
proofs       what each reply must show
events       what goes in and what comes out
transaction  events in, ordered effects out
records      the journal's records, written and read
ledger       the rollouts of a snapshot, merged from what participants say
"""
